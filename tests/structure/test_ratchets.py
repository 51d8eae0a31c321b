"""The package costs its readers and users no more than what is recorded; see ``scripts/ratchets.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from scripts import ratchets

HOW = (
    "lower it, or record it with `python -m scripts.ratchets --record` and give the reason in the message of the commit"
)


def flat(counts: dict[str, Any], path: str = "") -> Iterator[tuple[str, int]]:
    for name, count in counts.items():
        if isinstance(count, dict):
            yield from flat(count, f"{path}{name}: ")
        else:
            yield path + name, count


@pytest.mark.parametrize("counts", [ratchets.counts_of_text, ratchets.counts_of_runs], ids=["text", "runs"])
def test_no_count_is_above_its_record(counts: Any) -> None:
    recorded = dict(flat(json.loads(ratchets.RECORD.read_text())))
    above = {name: (count, recorded.get(name, 0)) for name, count in flat(counts()) if count > recorded.get(name, 0)}
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
    assert methods["OffloadedParam"] > methods["IncomingGradient"]


def test_calls_are_counted_in_all_threads() -> None:
    calls = ratchets.calls_of_step(1, 64, update_interval=1)
    assert any(call.startswith("runtime/host/host_adam.py") for call in calls)
