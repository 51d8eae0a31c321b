"""What the package costs its readers and its users, counted: ``python -m scripts.ratchets [--record]``.

``tests/structure/test_ratchets.py`` compares the counts with those in ``tests/structure/ratchets.json``. A change may
lower a count; one that raises a count records it in the same commit, and says why in its message.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "zenflow_compile"
RECORD = ROOT / "tests" / "structure" / "ratchets.json"

_MODES_BY_TOPIC = {
    "weights": "given_back guard home order pending prefetch room unseen weights",
    "gradients": "accumulator compression gate in_backward late residual staged",
    "state": "cache exchange file store streamed",
    "ranks": "ranks share shard",
    "execution": "annotated profiler run_ahead staging streams timeline",
}
MODES = frozenset(name for names in _MODES_BY_TOPIC.values() for name in names.split())
"""Names of attributes and variables of ``runtime/`` that hold an optional part, or None where the part is absent."""

_PATCH = re.compile(r"monkeypatch|\bpatch(\.\w+)?\(|\bfailing\(")
"""Lines that replace parts of the package or of Python, by pytest, by ``mock``, or by the tests' own helpers."""

_NOT_CALLS = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>"}
_WARM_UP_STEPS = 5
_ROUNDS = 15
_MORE = 6


# Counted in the text.


@cache
def _sources(folder: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts}


@cache
def _trees(folder: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(source) for path, source in _sources(folder).items()}


def folder_of(path: Path) -> str:
    """The folder that a file of the package counts for: those of ``runtime/`` count one by one."""
    parts = path.relative_to(PACKAGE).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("runtime",) else 1]) or "."


def lines_and_files() -> tuple[dict[str, int], dict[str, int]]:
    """Lines of Python, and files with at least one, by folder and in ``all``."""
    lines, files = Counter[str](), Counter[str]()
    for path, source in _sources(PACKAGE).items():
        for folder in (folder_of(path), "all"):
            lines[folder] += source.count("\n")
            files[folder] += 1
    return dict(sorted(lines.items())), dict(sorted(files.items()))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.NamedExpr):
        return _name(node.value) if _name(node.value).strip("_") in MODES else _name(node.target)
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.strip("_")


def asks_for_mode(test: ast.expr) -> bool:
    """Return whether a condition depends on the presence of an optional part."""
    if isinstance(test, ast.BoolOp):
        return any(asks_for_mode(value) for value in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return asks_for_mode(test.operand)
    if isinstance(test, ast.Compare):
        compared = test.comparators[0]
        return isinstance(compared, ast.Constant) and compared.value is None and _name(test.left) in MODES
    return _name(test) in MODES


def _conditions(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def conditions_on_modes() -> int:
    """Conditions in ``runtime/`` that ask whether an optional part exists: statements, expressions and filters."""
    return sum(asks_for_mode(test) for tree in _trees(PACKAGE / "runtime").values() for test in _conditions(tree))


def public_options() -> int:
    """Fields of ``Options``."""
    (options,) = (
        node
        for node in ast.walk(_trees(PACKAGE)[PACKAGE / "options" / "options.py"])
        if isinstance(node, ast.ClassDef) and node.name == "Options"
    )
    return sum(isinstance(node, ast.AnnAssign) for node in options.body)


def methods_of_classes() -> dict[str, int]:
    """Methods and properties of each class, those of the package's classes that it inherits from among them."""
    classes = {
        node.name: node
        for tree in _trees(PACKAGE).values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def names(cls: ast.ClassDef) -> set[str]:
        own = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
        bases = (_name(base) for base in cls.bases)
        return own.union(*(names(classes[base]) for base in bases if base in classes and classes[base] is not cls))

    return {name: len(names(cls)) for name, cls in classes.items()}


_OF_OTHERS = {"_apply", "_exit", "_fields", "_make", "_replace", "_version"}
"""Private names of the package that are public ones, or PyTorch's, in other classes."""


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_reads() -> int:
    """Private attributes of the package's objects that tests read or write."""
    attributes = {
        node.attr
        for tree in _trees(PACKAGE).values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    functions = {
        node.name
        for tree in _trees(PACKAGE).values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    constants = {
        target.id
        for tree in _trees(PACKAGE).values()
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    known = {name for name in attributes | functions | constants if _private(name)} - _OF_OTHERS
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr in known
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls", "torch"})
        for tree in _trees(ROOT / "tests").values()
        for node in ast.walk(tree)
    )


def counts_of_text() -> dict[str, Any]:
    """All counts that need no run."""
    lines, files = lines_and_files()
    tests = _sources(ROOT / "tests").values()
    return {
        "lines": lines,
        "files": files,
        "options": public_options(),
        "conditions on modes": conditions_on_modes(),
        "methods of the largest class": max(methods_of_classes().values()),
        "lines of tests": sum(source.count("\n") for source in tests),
        "lines of tests that patch": sum(bool(_PATCH.search(line)) for source in tests for line in source.splitlines()),
        "private attributes that tests use": private_reads(),
    }


# Counted in a run.


class CallCounter:
    """Counts calls of functions of the package: in threads that start inside the ``with`` block, and in this one.

    Attributes:
        calls: by ``file:function``.
        counting: whether calls count now. Threads keep the profile function that they start with.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.counting = False
        self._seen = 0

    def __enter__(self) -> CallCounter:
        threading.setprofile(self._watch)
        return self

    def __exit__(self, *exception: object) -> None:
        threading.setprofile(None)

    def _watch(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.counting or event != "call" or code.co_name in _NOT_CALLS:
            return
        self._seen += 1
        if code.co_filename.startswith(str(PACKAGE)):
            self.calls[f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_name}"] += 1

    def wait_for_threads(self) -> None:
        """Wait until no thread has called for a while: on a busy machine they are late."""
        seen = -1
        for _ in range(100):
            if seen == self._seen:
                return
            seen = self._seen
            time.sleep(0.04)
        raise RuntimeError("threads of the package call on and on, although nothing is to be done")

    def least(self, run: Callable[[], None]) -> Counter[str]:
        """The calls of the round of ``run`` with the fewest.

        Threads decide whether an upload is handed to the lane or made at once, and whether the host has to wait: the
        shortest path of some rounds is the same in every run.
        """
        rounds = []
        for _ in range(_ROUNDS):
            self.calls = Counter()
            self.counting = True
            sys.setprofile(self._watch)  # not before: a compilation would call it a million times
            try:
                run()
            finally:
                sys.setprofile(None)
                self.counting = False
            rounds.append(self.calls)
        return min(rounds, key=Counter.total)


_runs = itertools.count()


def calls_of_step(layers: int, width: int, **options: Any) -> Counter[str]:
    """The calls of a backward, a step, ``zero_grad`` and the next forward of ``layers`` matrices, in all threads."""
    import torch
    from torch import nn

    from zenflow_compile import ZenFlowAdamW

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    inputs = torch.randn(8, width)
    with CallCounter() as counter:
        # Another rate for each optimizer: the numbers of a step are computed one time for all that are equal.
        optimizer = ZenFlowAdamW(
            model.named_parameters(), lr=1e-3 + 1e-6 * next(_runs), min_offload_size=1, workers=1, **options
        )
        call = torch.compile(model, backend="zenflow", options={"inner": "eager"})
        losses = [call(inputs).square().mean()]

        def step() -> None:
            losses.pop().backward()
            optimizer.step()
            optimizer.zero_grad()
            counter.wait_for_threads()
            losses.append(call(inputs).square().mean())

        for _ in range(_WARM_UP_STEPS):
            step()
        calls = counter.least(step)
        optimizer.close()
    torch._dynamo.reset()
    return calls


def _count(calls: Counter[str], uses: int) -> dict[str, int]:
    files = {call.partition(":")[0] for call, count in calls.items() if count > 0}
    return {"calls": round(calls.total() / uses), "files": len(files)}


def _added(width: int, **options: Any) -> Counter[str]:
    """What ``_MORE`` matrices add: threads that are late by a call or two hardly show in so many."""
    calls = calls_of_step(2 + _MORE, width, **options)
    calls.subtract(calls_of_step(2, width, **options))
    return calls


def counts_of_runs() -> dict[str, dict[str, int]]:
    """Calls into the package and files that they enter, per step: of one gradient, and of what one more adds."""
    kept: dict[str, Any] = {"policy": "zero_offload", "width": 256}
    loads = _added(**kept, offload_weights=1.0)
    loads.subtract(_added(**kept))
    return {
        "gradient": _count(calls_of_step(1, 64, update_interval=1), 1),
        "parameter": _count(_added(64, update_interval=1, device_share=0.0), _MORE),
        # Each step loads a weight for its forward and for its backward.
        "load and unload": _count(loads, 2 * _MORE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write the counts to {RECORD.relative_to(ROOT)}")
    counts = {**counts_of_text(), **counts_of_runs()}
    text = json.dumps(counts, indent=2) + "\n"
    if parser.parse_args().record:
        RECORD.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
