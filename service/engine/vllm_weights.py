"""vLLM's weight-transfer backend `file`: new weights from safetensors that every worker can read.

`init_info` is `{}`; `update_info` is `{path}`, one safetensors file or a directory of them. Needs no
accelerator and no connection to the trainer.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

INDEX = "model.safetensors.index.json"

# Two checkpoints that differ in one of these never fit one engine.
_ARCHITECTURE = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_experts",
    "num_local_experts",
)


class BadWeights(ValueError):
    """What `path` names cannot be loaded into this model."""


@dataclass
class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What one chunk of an update is.

    Attributes:
        path: of a safetensors file or of a directory that holds some, as the workers see it.
    """

    path: str

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise ValueError(f"path is text, {self.path!r} is not")


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):  # type: ignore[misc]
    """Runs in a Worker. Every chunk is a complete file or directory; a model may come in several."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        put_back_open_layers(self.model, self.model_config)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        import torch

        self.receive_weights(self.parse_update_info(update_info))
        # The base class does this always, which fails without an accelerator.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        path = Path(update_info.path)
        _check_architecture(path, self.model_config.hf_config)
        with ExitStack() as files, disable_mtp_completeness_check():
            tensors = _Tensors(files, find_files(path))
            tensors.check_shapes(self._shapes())
            try:
                self.model.load_weights(iter(tensors))
            except Exception as error:
                culprit = f"{path}: {tensors.current} does not fit the model"
                raise BadWeights(f"{culprit}: {_reason(error)}") from error

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the checkpoint that the engine was started on, where it can still be read.

        A weight loader of vLLM may cut a tensor that is too large without a word.
        """
        if not hasattr(self, "_known_shapes"):
            self._known_shapes: dict[str, tuple[int, ...]] = {}
            directory = _started_on(self.model_config)
            if directory is not None:
                try:
                    with ExitStack() as files:
                        self._known_shapes = _Tensors(files, find_files(directory)).shapes()
                except BadWeights:
                    pass
        return self._known_shapes


def put_back_open_layers(model: Any, model_config: Any) -> None:
    """End a layerwise reload that was left open; layers that it had not replaced get their weights back.

    vLLM's next reload would go on where this one stopped, and mix the two.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    layers = [info for info in map(get_layerwise_info, model.modules()) if info.can_load()]
    for info in layers:
        info.loaded_weights.clear()
        info.load_numel = 0
    if layers:
        finalize_layerwise_reload(model, model_config)


def find_files(path: Path) -> list[Path]:
    """The safetensors files that `path` stands for.

    Raises:
        BadWeights: there are none, or one that the index names is missing.
    """
    if not path.exists():
        raise BadWeights(f"{path}: no such file or directory")
    if path.is_file():
        return [path]
    if (index := path / INDEX).is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadWeights(f"{index}: not an index of safetensors files") from error
        files = [path / name for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise BadWeights(f"{path}: {', '.join(missing)} named by the index but not there")
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise BadWeights(f"{path}: no safetensors file inside")
    return files


class _Tensors:
    """The tensors of several safetensors files, all opened before the first is read.

    Opening checks a file's header against its length, so a truncated one spoils nothing.
    """

    def __init__(self, stack: ExitStack, paths: list[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self.current = "the first tensor"
        self._files = []
        self._homes: dict[str, Path] = {}
        for path in paths:
            try:
                file = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
                names = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise BadWeights(f"{path}: not a complete safetensors file: {_reason(error)}") from error
            for name in names:
                if other := self._homes.get(name):
                    raise BadWeights(f"{name} is in both {other} and {path}")
                self._homes[name] = path
            self._files.append((file, names))
        if not self._homes:
            raise BadWeights(f"{', '.join(map(str, paths))}: no tensor inside")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(file.get_slice(name).get_shape()) for file, names in self._files for name in names
        }

    def check_shapes(self, known: dict[str, tuple[int, ...]]) -> None:
        for name, shape in self.shapes().items():
            if known.get(name, shape) != shape:
                raise BadWeights(f"{self._homes[name]}: {name} has shape {shape}, the model {known[name]}")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for file, names in self._files:
            for name in names:
                tensor = file.get_tensor(name)
                self.current = f"{name} of shape {tuple(tensor.shape)}"
                yield name, tensor


def _check_architecture(path: Path, served: Any) -> None:
    config = path / "config.json"
    if not config.is_file():
        return
    try:
        other = json.loads(config.read_text(encoding="utf-8"))
        differences = [
            f"{key} {other[key]}, the engine's {getattr(served, key)}"
            for key in _ARCHITECTURE
            if other.get(key) is not None and getattr(served, key, None) not in (None, other[key])
        ]
    except (ValueError, AttributeError) as error:
        raise BadWeights(f"{config}: not a model configuration") from error
    if differences:
        raise BadWeights(f"{path}: a checkpoint of another architecture: {'; '.join(differences)}")


def _started_on(model_config: Any) -> Path | None:
    directory = Path(model_config.model)
    if directory.is_dir():
        return directory
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                model_config.model,
                revision=model_config.revision,
                allow_patterns=["*.safetensors", INDEX],
                local_files_only=True,
            )
        )
    except Exception:  # Not a hub model, or not in the cache: then there is nothing to compare with.
        return None


def _reason(error: Exception) -> str:
    """One line of an error's text."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
