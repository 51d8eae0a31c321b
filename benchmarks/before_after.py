"""Runs a benchmark in two checkouts of this project in turns, and compares them row by row.

    git worktree add /tmp/before main~10
    python -m benchmarks before_after op_overhead --against /tmp/before
    python -m benchmarks before_after peers --against /tmp/before --model optimizer-bound --system adamw zenflow

``--against`` is the checkout "before", this one is "after". Each round runs the benchmark one time in each checkout, in
its own process that imports that checkout's package. The order alternates, so that drift of the machine affects both. A
ratio is after over before within a round; rounds are summarized by medians. Further options go to the benchmark, so
that both checkouts must know them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, Spread, interleaved, option_parser, ratios, write_results

METRICS = {
    "op_overhead": ("python_cpu_ms", "cpu_ms", "wall_ms", "step_ms.*.median"),
    "peers": ("step_ms.median", "step_over_adamw.median"),
}
"""By benchmark, paths of the numbers to compare inside a row; ``*`` stands for every key."""
_IDENTITY = ("model", "inner", "system", "tokens", "clip", "memory")
"""Fields of a row that say what was measured."""

Measured = dict[tuple[str, str], float]
"""Numbers by row and metric."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout of the project whose benchmarks run in child processes."""

    root: Path

    def run(self, benchmark: str, options: Sequence[str]) -> dict[str, Any]:
        """Run ``benchmark`` and return its results. The checkout's own results file stays as it is.

        Raises:
            RuntimeError: the benchmark failed.
        """
        if "--out PATH" in self._python(benchmark, "--help"):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "results.json"
                self._python(benchmark, "--out", str(out), *options)
                return _read(out)
        results = self.root / "benchmarks" / "results" / f"{benchmark}.json"  # a checkout from before ``--out PATH``
        kept = results.read_bytes() if results.is_file() else None
        try:
            self._python(benchmark, *options)
            return _read(results)
        finally:
            if kept is not None:
                results.write_bytes(kept)
            else:
                results.unlink(missing_ok=True)

    def _python(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "benchmarks", *arguments]
        # The project may be installed in this environment: PYTHONPATH puts the checkout in front of that.
        environment = {**os.environ, "PYTHONPATH": str(self.root)}
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
            raise RuntimeError(f"{' '.join(command[1:])} failed in {self.root}:\n{last}")
        return done.stdout


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def numbers(results: Mapping[str, Any], metrics: Sequence[str]) -> Measured:
    """The numbers at ``metrics`` in each row of a results file."""
    found: Measured = {}
    for row in results["rows"]:
        label = ", ".join(str(row[key]) for key in _IDENTITY if row.get(key) is not None)
        for metric in metrics:
            for name, value in _at(row, metric.split(".")):
                found[label, name] = value
    return found


def _at(value: Any, path: Sequence[str], name: str = "") -> Iterator[tuple[str, float]]:
    if not path:
        if isinstance(value, (int, float)):
            yield name, float(value)
        return
    if not isinstance(value, Mapping):
        return
    for key in value if path[0] == "*" else path[:1]:
        if key in value:
            yield from _at(value[key], path[1:], f"{name}.{key}".lstrip("."))


def compare(before: Sequence[Measured], after: Sequence[Measured]) -> list[dict[str, Any]]:
    """One row per number that every round has in both checkouts: both spreads, and that of the ratios."""
    common = [key for key in after[0] if all(key in each for each in (*before, *after))]
    rows = []
    for label, metric in common:
        old, new = ([each[label, metric] for each in side] for side in (before, after))
        row: dict[str, Any] = {"row": label, "metric": metric}
        row |= {"before": Spread.of(old).row(), "after": Spread.of(new).row()}
        rows.append({**row, "ratio": Spread.of(ratios(new, old)).row() if all(old) else None})
    return rows


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Medians of both checkouts and of their ratio."""
    made = Table("row", "metric", title=title, caption="medians over rounds; ratio: after over before, within a round")
    for column in ("before", "after", "ratio"):
        made.add_column(column, justify="right")
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']['median']:.3f}"
        made.add_row(
            row["row"], row["metric"], f"{row['before']['median']:.4g}", f"{row['after']['median']:.4g}", ratio
        )
    return made


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Entry point of ``python -m benchmarks before_after``."""
    parser = option_parser("before_after", __doc__)
    parser.add_argument("benchmark", choices=tuple(METRICS))
    parser.add_argument("--against", type=Path, required=True, metavar="DIR", help="the checkout to compare with")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="runs in each checkout (%(default)s)")
    given, options = parser.parse_known_args(arguments)
    if not (given.against / "benchmarks" / f"{given.benchmark}.py").is_file():
        parser.error(f"--against {given.against} is no checkout of this project that has {given.benchmark}")
    if given.turns < 1:
        parser.error(f"--turns {given.turns} must be at least 1")

    console = Console(width=None if sys.stdout.isatty() else 150)
    collected: dict[str, list[Measured]] = {"before": [], "after": []}
    commits: dict[str, str | None] = {}

    def turn(name: str, checkout: Checkout) -> float:
        results = checkout.run(given.benchmark, options)
        commits[name] = results["commit"]
        collected[name].append(numbers(results, METRICS[given.benchmark]))
        console.print(f"{name}: run {len(collected[name])} of {given.turns}", highlight=False)
        return 0.0

    checkouts = {"before": Checkout(given.against.resolve()), "after": Checkout(root)}
    works = {name: partial(turn, name, checkout) for name, checkout in checkouts.items()}
    interleaved(given.turns, works, warm_up=0)
    rows = compare(collected["before"], collected["after"])
    title = f"{given.benchmark}: {commits['before']} before, {commits['after']} after"
    console.print(table(title, rows))
    written = [{"benchmark": given.benchmark, "commits": commits, "options": options, **row} for row in rows]
    console.print(f"wrote {write_results('before_after', written, out=given.out)}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
