"""Import rules that import-linter cannot express; the others are in pyproject.toml."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file
    for package in ("bus", "service", "statemachine")
    for file in (ROOT / package).rglob("*.py")
}
VLLM = ("service.engine.vllm_*", "service.engine.tiny_model")
KEEPERS = {
    "nats": ("bus.connection",),
    "transitions": ("statemachine.lifecycle",),
    "vllm": VLLM,
    "torch": VLLM,
}
"""Library -> the only modules that may import it."""

OUT_OF_REACH = {
    "service.router*": ("service.engine", "service.runner", "service.worker", "statemachine"),
}
"""Module -> what it must not import. The router is another process and knows the instances from the bus."""


def imported(source: str) -> Iterator[str]:
    """Full names of what a module imports, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def trespasses(module: str, source: str) -> list[str]:
    def is_trespass(name: str) -> bool:
        keepers = KEEPERS.get(name.partition(".")[0])
        return (keepers is not None and not any(fnmatch(module, keeper) for keeper in keepers)) or any(
            f"{name}.".startswith(f"{forbidden}.")
            for pattern, names in OUT_OF_REACH.items()
            if fnmatch(module, pattern)
            for forbidden in names
        )

    return [name for name in imported(source) if is_trespass(name)]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_what_it_may(module: str) -> None:
    assert trespasses(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "seen"),
    [
        ("service.runner", "def f():\n    from nats.aio import client", ["nats.aio.client"]),
        ("bus.client", "import os, nats.js", ["nats.js"]),
        ("service.engine.process", "from torch import nn", ["torch.nn"]),
        ("service.engine.vllm_host", "import vllm, torch", []),
        ("service.router.pool", "from service import runner\nimport bus.discovery", ["service.runner"]),
        ("service.router.pool", "import service.engine.protocol", ["service.engine.protocol"]),
    ],
)
def test_a_trespass_is_seen_wherever_it_hides(module: str, source: str, seen: list[str]) -> None:
    assert trespasses(module, source) == seen
