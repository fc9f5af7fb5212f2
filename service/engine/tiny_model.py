"""A small random model, written offline, so that everything runs without a download.

It speaks syllables: the random weights choose among " ka", "lo" and the like, one piece of text per
token, and never a special token at temperature 0, so that an answer lasts as long as was asked for.
"""

import json
from pathlib import Path
from typing import Any

MARKER = "watchkeeper-tiny-model.json"
"""Says that a directory is ours to overwrite."""

MAX_MODEL_LEN = 2048

ENGINE_ARGS = (
    "--enforce-eager",
    "--max-model-len",
    str(MAX_MODEL_LEN),
    "--kv-cache-memory-bytes",
    "64M",
    "--dtype",
    "float32",
)
"""Engine arguments that load it fast, in little memory, and keep its answers free of near ties.

In bfloat16 a request that is computed anew after its cache was dropped may take another turn where two
tokens score alike; in float32 it does not.
"""

_HIDDEN = 128
_LAYERS = 3
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 32
_INTERMEDIATE = 256
_VOCAB = 512
_BIGRAM = 5.0
_BOS, _EOS = 0, 2
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(directory: Path, seed: int) -> None:
    """Write a model directory as vLLM loads it; the same seed writes the same bytes.

    Every seed has the same shapes, so that one model's weights fit an engine started on another.

    Raises:
        ValueError: the directory holds something that this function did not write, or the seed is
            negative.
    """
    if seed < 0:
        raise ValueError(f"the seed of a tiny model is not negative, {seed} is")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MARKER).is_file():
        raise ValueError(f"{directory} is not empty and not a tiny model: it is left alone")
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / MARKER, {"seed": seed})

    vocabulary, merges = _vocabulary()
    _write_json(directory / "config.json", _config())
    # No token ends an answer early but <|im_end|>, which the weights do not choose at temperature 0.
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _BOS},
    )
    _write_json(directory / "tokenizer.json", _tokenizer(vocabulary, merges))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config())
    _write_weights(directory / "model.safetensors", seed, [i for t, i in vocabulary.items() if _is_spoken(t)])


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
        "dtype": "float32",
    }


def _vocabulary() -> tuple[dict[str, int], list[list[str]]]:
    """Three special tokens, the 256 bytes, and the syllables with and without a space before them."""
    tokens = [*_SPECIAL, *_BYTES]
    merges = []
    for consonant in "bdfghjklmnprstvwyz":
        for vowel in "aeiou":
            tokens.append(consonant + vowel)
            merges.append([consonant, vowel])
    for syllable in tokens[len(_SPECIAL) + len(_BYTES) :]:
        if len(tokens) < _VOCAB:
            tokens.append(_SPACE + syllable)
            merges.append([_SPACE, syllable])
    tokens += [f"<|unused{i}|>" for i in range(_VOCAB - len(tokens))]
    return {token: i for i, token in enumerate(tokens)}, merges


def _is_spoken(token: str) -> bool:
    return not token.startswith("<|") and len(token) > 1


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's mapping)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = []
    replacements = 0
    for byte in range(256):
        if byte in shown:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + replacements))
            replacements += 1
    return letters


_BYTES = _byte_letters()
_SPACE = _BYTES[ord(" ")]


def _tokenizer(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, i in vocabulary.items()
            if token.startswith("<|")
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_MODEL_LEN,
        "bos_token": _SPECIAL[_BOS],
        "eos_token": _SPECIAL[_EOS],
        "pad_token": _SPECIAL[_BOS],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }


def _write_weights(path: Path, seed: int, spoken: list[int]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.Generator(np.random.PCG64(seed))

    def normal(rows: int, columns: int, gain: float = 1.0) -> Any:
        return (random.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)

    def ones(size: int) -> Any:
        return np.ones(size, np.float32)

    # Strong weights: what comes next depends on every word before.
    embedding = normal(_VOCAB, _HIDDEN, gain=_HIDDEN**0.5)
    tensors = {"model.embed_tokens.weight": embedding}
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": ones(_HIDDEN),
            f"{name}.self_attn.q_proj.weight": normal(_HEADS * _HEAD_DIM, _HIDDEN),
            f"{name}.self_attn.k_proj.weight": normal(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{name}.self_attn.v_proj.weight": normal(_KV_HEADS * _HEAD_DIM, _HIDDEN, gain=2.0),
            f"{name}.self_attn.o_proj.weight": normal(_HIDDEN, _HEADS * _HEAD_DIM, gain=2.0),
            f"{name}.self_attn.q_norm.weight": ones(_HEAD_DIM),
            f"{name}.self_attn.k_norm.weight": ones(_HEAD_DIM),
            f"{name}.post_attention_layernorm.weight": ones(_HIDDEN),
            f"{name}.mlp.gate_proj.weight": normal(_INTERMEDIATE, _HIDDEN, gain=2.0),
            f"{name}.mlp.up_proj.weight": normal(_INTERMEDIATE, _HIDDEN, gain=2.0),
            f"{name}.mlp.down_proj.weight": normal(_HIDDEN, _INTERMEDIATE),
        }
    # A row of zeros scores 0, below the best of the syllables. A syllable dislikes to follow itself and
    # likes to follow one other: left alone, random weights soon say the same thing for ever.
    head = np.zeros((_VOCAB, _HIDDEN), np.float32)
    head[spoken] = normal(len(spoken), _HIDDEN, gain=4.0)
    circle = random.permutation(spoken)
    head[circle] += _BIGRAM * (embedding[np.roll(circle, 1)] - embedding[circle]) / _HIDDEN**0.5
    tensors |= {"model.norm.weight": ones(_HIDDEN), "lm_head.weight": head}
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
