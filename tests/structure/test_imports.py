"""The import rule of CONTRIBUTING.md: layers, each of which imports only from those below it, and no circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import zenflow_compile

PACKAGE = Path(zenflow_compile.__file__).parent
ROOT = PACKAGE.parent


def layers(title: str) -> list[list[str]]:
    """The rows of the block ``title`` in CONTRIBUTING.md, from the top layer down."""
    found = re.search(rf"^```text layers of {title}\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    assert found, title
    return [row.split() for row in found[1].splitlines()]


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below ``zenflow_compile``; "" is the package itself."""
    paths = {path.relative_to(PACKAGE).with_suffix(""): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(name.parts).removesuffix("__init__").removesuffix("."): path for name, path in paths.items()}


def imports_of(source: str) -> Iterator[str]:
    """The modules of the package that ``source`` imports, at its top, in functions, or for types alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == PACKAGE.name:
                yield rest if rest in modules() else rest.rpartition(".")[0]


@cache
def edges() -> tuple[tuple[str, str], ...]:
    """(importer, imported) of all modules but the package's own front, which names everything lazily."""
    found = ((name, to) for name, path in modules().items() if name for to in imports_of(path.read_text()))
    return tuple(sorted(set(found)))


def place_of(module: str, rows: list[list[str]]) -> int:
    """The row of ``module`` by its first part, 0 at the bottom."""
    part = module.partition(".")[0]
    (row,) = (number for number, row in enumerate(reversed(rows)) if part in row)
    return row


def below_runtime(module: str) -> str | None:
    """The part of a module's name below ``runtime``, None for other modules."""
    return module.removeprefix("runtime.") if module.startswith("runtime.") else None


def test_every_folder_has_one_layer() -> None:
    parts = {name.partition(".")[0] for name in modules() if name}
    named = [part for row in layers("zenflow_compile") for part in row]
    assert sorted(named) == sorted(parts)
    inside = {below.partition(".")[0] for name in modules() if (below := below_runtime(name))}
    named = [part for row in layers("runtime") for part in row]
    assert sorted(named) == sorted(inside)


def test_imports_point_down() -> None:
    rows = layers("zenflow_compile")
    upward = [(one, to) for one, to in edges() if to and place_of(one, rows) < place_of(to, rows)]
    assert not upward
    assert len(edges()) > 500


def test_imports_in_the_runtime_point_down() -> None:
    rows = layers("runtime")
    inside = [(below_runtime(one), below_runtime(to)) for one, to in edges()]
    upward = [(one, to) for one, to in inside if one and to and place_of(one, rows) < place_of(to, rows)]
    assert not upward


def test_no_circle_of_files() -> None:
    graph: dict[str, set[str]] = {}
    for one, to in edges():
        graph.setdefault(one, set()).add(to)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_passes_know_only_the_ops_of_the_runtime() -> None:
    known = {to for one, to in edges() if one.startswith("passes.") and to.startswith("runtime")}
    assert known == {"runtime.ops"}


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("from zenflow_compile.runtime import ops", ["runtime.ops"]),
        ("def f():\n    from zenflow_compile.planning.plan import Plan", ["planning.plan"]),
        ("if TYPE_CHECKING:\n    import zenflow_compile.optimizer", ["optimizer"]),
        ("import torch", []),
    ],
)
def test_imports_are_found(source: str, imported: list[str]) -> None:
    assert list(imports_of(source)) == imported
