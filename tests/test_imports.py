"""Libraries that only certain modules may import. The other import rules are in pyproject.toml."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("bus", "service", "statemachine")
ONLY = {
    "nats": ("bus.connection",),
    "transitions": ("statemachine.lifecycle",),
    "vllm": ("service.engine.vllm_*", "service.engine.tiny_model"),
    "torch": ("service.engine.vllm_*", "service.engine.tiny_model"),
}


def imported_libraries(source: str) -> Iterator[str]:
    """Top-level names of what a module imports, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def trespasses(module: str, source: str) -> list[str]:
    return [
        library
        for library in imported_libraries(source)
        if library in ONLY and not any(fnmatch(module, pattern) for pattern in ONLY[library])
    ]


MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file
    for package in PACKAGES
    for file in (ROOT / package).rglob("*.py")
}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_library_is_imported_only_by_its_keeper(module: str) -> None:
    assert trespasses(module, MODULES[module].read_text()) == []


def test_a_trespass_is_seen_wherever_it_hides() -> None:
    assert trespasses("service.runner", "def f():\n    from nats.aio import client") == ["nats"]
    assert trespasses("bus.client", "import os, nats.js") == ["nats"]
    assert trespasses("service.engine.process", "from torch import nn") == ["torch"]
    assert trespasses("service.engine.vllm_host", "import vllm, torch") == []
    assert trespasses("service.runner", "from . import nats") == []
