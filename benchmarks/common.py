"""What all benchmarks share: options, statistics, rounds in turns, and the results file.

Each benchmark writes one file of one format, ``benchmarks/results/NAME.json`` or where ``--out`` says::

    {"benchmark": NAME, "command": "python -m benchmarks NAME ...", "commit": ..., "seed": ..., "machine": {...},
     "rows": [{...}, ...], "targets": [{"claim", "measured", "limit", "met"}, ...]}

A measured quantity is written as ``Spread.row()``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psutil
import torch

if TYPE_CHECKING:  # DeepSpeed's environment runs this file, too
    from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "triton", "transformers", "deepspeed", "torchao")

Name = TypeVar("Name", bound=str)


def option_parser(
    name: str,
    doc: str,
    *,
    rounds: int | None = None,
    seed: bool = False,
    epilog: str | None = None,
    folder: str | None = None,
) -> argparse.ArgumentParser:
    """Make the parser of benchmark ``name`` with the options that benchmarks share.

    Args:
        name: of the benchmark's file, without suffix.
        doc: the benchmark's docstring, shown by ``--help``.
        rounds: default of ``--rounds``; None for benchmarks that have none, or a default of their own.
        seed: whether ``--seed`` sets weights and data.
        epilog: text below the options.
        folder: of the results, in benchmarks/results, for a benchmark with several results files.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=doc,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = f"results file (benchmarks/results/{name}.json)"
    if folder is not None:
        where = f"folder of the results files (benchmarks/results/{folder})"
    parser.add_argument("--out", type=Path, metavar="PATH", help=where)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, metavar="N", help="(%(default)s)")
    if seed:
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data (%(default)s)")
    return parser


@dataclass(frozen=True, slots=True)
class Spread:
    """Order statistics of repeated measurements, all in the unit of the measurements.

    Percentiles interpolate linearly between neighbors; ``iqr`` is the third quartile less the first.
    """

    n: int
    median: float
    p5: float
    p95: float
    iqr: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Summarise ``values``.

        Raises:
            ValueError: there are none.
        """
        if not values:
            raise ValueError("a spread needs at least one measurement")
        quartiles = percentile(values, 0.25), percentile(values, 0.75)
        return cls(
            n=len(values),
            median=statistics.median(values),
            p5=percentile(values, 0.05),
            p95=percentile(values, 0.95),
            iqr=quartiles[1] - quartiles[0],
        )

    def row(self, digits: int = 4) -> dict[str, float | int]:
        """Round every number for a results file to this many significant digits."""
        return {name: float(f"{value:.{digits}g}") if name != "n" else value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.p5:.3g} to {self.p95:.3g})"


@dataclass(frozen=True, slots=True)
class Target:
    """A claim with its measurement and its limit: ``at_least`` or at most."""

    claim: str
    measured: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether the measurement is within the limit."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        bound = "at least" if self.at_least else "at most"
        return f"{self.claim}: {self.measured:.3f}, {bound} {self.limit:g}: {'met' if self.met else 'MISSED'}"

    def row(self) -> dict[str, Any]:
        """For a results file."""
        return {**asdict(self), "measured": round(self.measured, 4), "met": self.met}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (in [0, 1]) of ``values`` lie, interpolated linearly."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def interleaved(rounds: int, works: Mapping[Name, Callable[[], float]], warm_up: int = 1) -> dict[Name, list[float]]:
    """Run every work one time per round, in reversed order in every other round, and collect the results.

    A slow minute of the machine affects all works alike, and ratios within a round cancel it. The results of the first
    ``warm_up`` rounds, which touch pages and fill caches, are dropped.
    """
    collected: dict[Name, list[float]] = {name: [] for name in works}
    for number in range(warm_up + rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            value = works[name]()
            if number >= warm_up:
                collected[name].append(value)
    return collected


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Quotients of measurements of the same round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def machine() -> dict[str, Any]:
    """The hardware and versions that numbers of this process belong to."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "hardware_threads": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **versions(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that numbers depend on, of this interpreter; ``torch`` with its build."""
    found = {"torch": str(torch.__version__)}
    for package in _PACKAGES:
        try:
            found.setdefault(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_results(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    out: Path | None = None,
    seed: int | None = None,
    targets: Sequence[Target] = (),
) -> Path:
    """Write ``rows`` with machine, versions, commit and command, and return the path of the file.

    Args:
        name: of the benchmark.
        rows: what was measured.
        out: the file; None for ``benchmarks/results/NAME.json``. Its folder is made if it is missing.
        seed: of weights and data; None where a benchmark has no random part that matters.
        targets: claims that the rows decide.
    """
    path = out or RESULTS / f"{name}.json"
    results = {
        "benchmark": name,
        "command": shlex.join(["python", "-m", "benchmarks", name, *sys.argv[1:]]),
        "commit": commit(),
        "seed": seed,
        "machine": machine(),
        "rows": list(rows),
        "targets": [target.row() for target in targets],
    }
    write_json(path, results)
    return path


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` to ``path``, whose folder is made if it is missing. An interrupt leaves the last whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(unfinished, path)  # atomic


def fill(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of ``name`` in the document at ``path``.

    Raises:
        ValueError: if the document has no marks.
    """
    marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    document = path.read_text(encoding="utf-8")
    before, begin, rest = document.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"{path} needs the lines {marks[0]} and {marks[1]}, between which the tables go")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def markdown(table: Table) -> str:
    """A table for the terminal in Markdown, with its title in bold above it."""
    headings = [str(column.header).replace("\n", " ") for column in table.columns]
    cells = zip(*(column.cells for column in table.columns), strict=True)
    rows = [headings, ["---"] * len(headings), *([str(cell) for cell in row] for row in cells)]
    return f"**{table.title}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def commit() -> str | None:
    """Commit of the sources, with ``+changes`` where the tree differs from it; None outside of a git checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD").strip()
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results").strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+changes" * bool(changed)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
