"""Which tests run: `make test` runs tier 1, `make test-ci` tiers 1 and 2, and `make test-long` all three.

CONTRIBUTING.md has the rules. Seconds are those of ``tests/structure/durations.json``.
"""

from __future__ import annotations

import heapq
import json
import random
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DURATIONS = ROOT / "tests" / "structure" / "durations.json"

COMMANDS = {1: "make test", 2: "make test-ci", 3: "make test-long"}
LIMITS = {1: 8 * 60, 2: 25 * 60}
"""Seconds that a tier may take with those below it: on two quiet cores, without what sets the environment up. Of tier 2
with what a commit draws from tier 3."""

START = 30.0
"""Seconds before the first test: processes start, import frameworks and collect."""

EACH_CASE = 0.12
"""Tier 1 runs one case of a test whose cases take longer, in seconds."""

LONGEST = 3.0
"""Tier 1 runs no test that takes longer, in seconds."""

SLOW = 2.0
"""Cases that take longer, in seconds, and are neither in tier 1 nor marked ``tier2``, are in tier 3."""

SLOW_PARTS = 4
"""Each slow case runs with tier 2 at one of so many commits."""

UNKNOWN = 1.0
"""What a test without a record counts as, in seconds."""

PARTS = 10
"""Each other case of tier 3 runs with tier 2 at one of so many commits."""

TIER = pytest.StashKey[int]()

RATE = pytest.StashKey[int]()
"""A case of tier 3 runs with tier 2 at one of so many commits."""

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""The tests that were collected, of all tiers, in the ``stash`` of the configuration."""


@dataclass
class Durations:
    """Seconds per case of each test function: the mean of the cases that were measured, with their fixtures.

    Attributes:
        seconds: by file and function.
    """

    seconds: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))

    @classmethod
    def read(cls, path: Path = DURATIONS) -> Durations:
        """Read a record. Without a file, nothing is known."""
        durations = cls()
        if path.exists():
            durations.seconds.update(json.loads(path.read_text()))
        return durations

    def write(self, path: Path = DURATIONS) -> None:
        path.write_text(json.dumps(self.seconds, indent=1, sort_keys=True) + "\n")

    def of(self, nodeid: str) -> float | None:
        """The seconds of one case; None if its function is not in the record."""
        file, _, case = nodeid.partition("::")
        return self.seconds.get(file, {}).get(case.partition("[")[0])

    def total(self, nodeids: Iterable[str]) -> float:
        """The seconds of many cases, one after the other."""
        return sum(UNKNOWN if (known := self.of(nodeid)) is None else known for nodeid in nodeids)

    def update(self, measured: Mapping[str, float]) -> None:
        """Replace the seconds of the functions of which cases were measured."""
        of_functions: dict[tuple[str, str], list[float]] = defaultdict(list)
        for nodeid, seconds in measured.items():
            file, _, case = nodeid.partition("::")
            of_functions[file, case.partition("[")[0]].append(seconds)
        for (file, name), found in of_functions.items():
            self.seconds.setdefault(file, {})[name] = round(sum(found) / len(found), 2)


def wall_seconds(test_seconds: float, processes: int) -> float:
    """How long a run takes whose tests take ``test_seconds``, one after the other."""
    return START + test_seconds / processes


def assign(items: Sequence[pytest.Item], durations: Durations, seed: int) -> None:
    """Give each item its tier, in ``item.stash[TIER]``, and those of tier 3 their rate, in ``item.stash[RATE]``.

    All processes of a run draw the same cases.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for name, cases in functions.items():
        draw = random.Random(f"{seed} {name}")
        matrix = [case for case in cases if not case.get_closest_marker("long")]
        if matrix and (marker := matrix[0].get_closest_marker("matrix")):
            matrix = _drawn(matrix, marker.args[0], draw)
        seconds = durations.of(cases[0].nodeid) or 0.0
        first = [case for case in matrix if case.get_closest_marker("tier1")]
        if seconds <= EACH_CASE or (seconds <= LONGEST and len(cases) == 1):
            first = matrix
        elif seconds <= LONGEST and matrix and not first:
            first = [draw.choice(matrix)]
        for case in cases:
            each_commit = case in matrix and (seconds <= SLOW or case.get_closest_marker("tier2"))
            case.stash[TIER] = 1 if case in first else 2 if each_commit else 3
            case.stash[RATE] = _rate(case, kept=case in matrix)


def _rate(case: pytest.Item, *, kept: bool) -> int:
    """At one of how many commits a case of tier 3 runs; ``kept`` ones are there only because they are slow."""
    if (long := case.get_closest_marker("long")) and long.args:
        return int(long.args[0])
    return SLOW_PARTS if kept else PARTS


def _drawn(cases: Sequence[pytest.Item], share: int, draw: random.Random) -> list[pytest.Item]:
    """Draw one case of ``share``; of a test with several arguments more, until each value is in one."""
    seen: set[tuple[str, int]] = set()
    needed, others = [], []
    for case in draw.sample(list(cases), len(cases)):
        arguments = case.callspec.params  # type: ignore[attr-defined]
        values = {(name, id(value)) for name, value in arguments.items()}  # cases share the objects
        (others if len(arguments) == 1 or values <= seen else needed).append(case)
        seen |= values
    return needed + others[: max(0, -(-len(cases) // share) - len(needed))]


def drawn_by_commit(items: Iterable[pytest.Item], durations: Durations, number: int) -> list[pytest.Item]:
    """The items of tier 3 that run with tier 2 at a commit.

    Args:
        number: of the commit: one of as many consecutive numbers as an item's rate draws it.
    """
    by_rate: dict[int, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if item.stash[TIER] == 3:
            by_rate[item.stash[RATE]][item.nodeid] = item
    drawn: list[pytest.Item] = []
    for rate, of_rate in by_rate.items():
        seconds = {nodeid: durations.total([nodeid]) for nodeid in of_rate}
        # The next longest goes to the part that takes least so far: all parts take about equally long.
        parts: list[tuple[float, int]] = [(0.0, part) for part in range(rate)]
        for nodeid in sorted(seconds, key=lambda each: (-seconds[each], each)):
            taken, part = parts[0]
            heapq.heapreplace(parts, (taken + seconds[nodeid], part))
            if part == number % rate:
                drawn.append(of_rate[nodeid])
    return drawn


def number_of_commit() -> int:
    """A number that the hash of the commit that is checked out gives; 0 outside a repository."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(commit, 16)
