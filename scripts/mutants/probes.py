"""Inserts calls of ``reached.reach`` in front of statements, so that a run of tests tells which of them get there."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

_IMPORT = "from zenflow_compile.reached import reach as _reach"


def with_probes(source: str, wanted: Mapping[int, Sequence[int]]) -> tuple[str, set[int]]:
    """Insert a probe in front of the statement of each line.

    Args:
        wanted: the numbers of the probes, by line of ``source`` from 1.

    Returns:
        The new source, and the numbers of probes that have no place: those of lines that run when the file is imported,
        and of kernels that another compiler reads.
    """
    tree, text = ast.parse(source), source.splitlines()
    inserted: dict[int, list[str]] = {}
    missing: set[int] = set()
    for line, numbers in wanted.items():
        if (place := _place(tree, text, line)) is None:
            missing.update(numbers)
            continue
        indentation = text[place - 1][: -len(text[place - 1].lstrip())]
        inserted.setdefault(place, []).extend(f"{indentation}_reach({number})" for number in numbers)
    if inserted:
        inserted.setdefault(_first_line(_first_statement(tree)), []).insert(0, _IMPORT)
    for place in sorted(inserted, reverse=True):
        text[place - 1 : place - 1] = inserted[place]
    return "\n".join(text) + "\n", missing


def _place(tree: ast.Module, text: Sequence[str], line: int) -> int | None:
    """The line of the innermost statement with ``line`` that has a line of its own, inside of a function."""
    path = list(_statements_at(tree.body, line))
    functions = [at for at, each in enumerate(path[:-1]) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if not functions or any("jit" in ast.unparse(each) for each in path[functions[-1]].decorator_list):  # type: ignore[attr-defined]
        return None
    for statement in reversed(path[functions[-1] + 1 :]):
        first = text[_first_line(statement) - 1]
        has_own_line = len(first) - len(first.lstrip()) == statement.col_offset
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if has_own_line and not is_docstring and not first.lstrip().startswith("elif "):
            return _first_line(statement)
    return None


def _statements_at(body: Sequence[ast.stmt], line: int) -> Iterator[ast.stmt]:
    """The statements with ``line``, from the outermost to the innermost."""
    for statement in body:
        if _first_line(statement) <= line <= (statement.end_lineno or 0):
            yield statement
            for block in _blocks(statement):
                yield from _statements_at(block, line)


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for owner in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        for name in ("body", "orelse", "finalbody"):
            yield getattr(owner, name, [])


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


def _first_statement(tree: ast.Module) -> ast.stmt:
    """The first one in front of which an import may stand."""
    return next(
        each
        for each in tree.body
        if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        and not (isinstance(each, ast.ImportFrom) and each.module == "__future__")
    )
