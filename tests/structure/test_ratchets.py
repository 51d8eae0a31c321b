"""The package costs its readers and users no more than what is recorded; see ``scripts/ratchets.py``."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from scripts import ratchets
from zenflow_compile.checks.validate import check_flag

HOW = (
    "lower it, or record it with `python -m scripts.ratchets --record` and give the reason in the message of the commit"
)


def flat(counts: dict[str, Any], path: str = "") -> Iterator[tuple[str, int]]:
    for name, count in counts.items():
        if isinstance(count, dict):
            yield from flat(count, f"{path}{name}: ")
        else:
            yield path + name, count


def test_no_count_is_above_its_record() -> None:
    # In a process of its own: as users have it, without what the tests change in theirs.
    command = [sys.executable, "-m", "scripts.ratchets"]
    counts = json.loads(subprocess.run(command, cwd=ratchets.ROOT, stdout=subprocess.PIPE, check=True).stdout)
    recorded = dict(flat(json.loads(ratchets.RECORD.read_text())))
    recorded["load and unload: calls"] += 1  # prefetches that are late by a moment: 71.5 on average
    above = {name: (count, recorded.get(name, 0)) for name, count in flat(counts) if count > recorded.get(name, 0)}
    assert not above, f"{above} (count, recorded): {HOW}"


@pytest.mark.parametrize(
    ("condition", "asks"),
    [
        ("self._home is not None", True),
        ("not ranks", True),
        ("done and (timeline := self._timeline) is None", True),
        ("self._home.loaded", False),
        ("count is None", False),
        ("order == 3", False),
    ],
)
def test_conditions_on_modes_are_told(condition: str, asks: bool) -> None:
    assert ratchets.asks_for_mode(ratchets.ast.parse(condition, mode="eval").body) == asks


def test_largest_class_counts_what_it_inherits() -> None:
    methods = ratchets.methods_of_classes()
    assert methods["PendingParts"] > methods["PendingGradient"]


def test_calls_are_counted_in_all_threads() -> None:
    with ratchets.CallCounter() as counter:
        counter.counting = True
        thread = threading.Thread(target=check_flag, args=("overlap_step", True))
        thread.start()
        thread.join()
    assert counter.calls.total() == 1
