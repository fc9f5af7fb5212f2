"""The tiny model: the same bytes for the same seed, the same shapes for every seed."""

import json
from pathlib import Path

import pytest

from service.engine.tiny_model import MARKER, write_tiny_model

safetensors = pytest.importorskip("safetensors.numpy", reason="comes with vLLM")
tokenizers = pytest.importorskip("tokenizers", reason="comes with vLLM")


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("again", 7), ("b", 8)):
        write_tiny_model(tmp_path / name, seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "again")
    differing = {
        name
        for name, content in contents(tmp_path / "a").items()
        if content != (tmp_path / "b" / name).read_bytes()
    }
    assert differing == {"model.safetensors", MARKER}


def test_weights_of_one_fit_an_engine_started_on_another(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_tiny_model(tmp_path / str(seed), seed)
    first, second = (safetensors.load_file(tmp_path / str(seed) / "model.safetensors") for seed in (1, 2))
    assert {name: tensor.shape for name, tensor in first.items()} == {
        name: tensor.shape for name, tensor in second.items()
    }


def test_any_text_survives_the_tokenizer(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, 1)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Hello kolumi ta, naïve\n\t→ 東京 🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode(" ko").tokens == ["Ġko"]


def test_it_is_written_again_over_itself(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, 1)
    write_tiny_model(tmp_path, 2)
    assert json.loads((tmp_path / MARKER).read_text()) == {"seed": 2}


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="not empty"):
        write_tiny_model(tmp_path, 1)
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}
    with pytest.raises(ValueError, match="not a directory"):
        write_tiny_model(tmp_path / "thesis.tex", 1)


def test_a_negative_seed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="negative"):
        write_tiny_model(tmp_path / "model", -1)
    assert not (tmp_path / "model").exists()
