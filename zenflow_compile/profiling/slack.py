"""Compares the time that host updates have with the time they take, for each block of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from statistics import median
from typing import TypedDict

from zenflow_compile.timeline.events import SLACK, Event

_NS_PER_MS = 1e6
_BLOCK = re.compile(r".*?(?<![^.])\d+(?=\.|$)")


class BlockSlack(TypedDict):
    """Times of one block's flushed update windows.

    Keys:
        slack_ms: median time from the final gradient to the weight's next use, be it in training or evaluation.
        taken_ms: median time from the final gradient to the end of the host's update.
        margin_ms: smallest difference of the two for one flush; negative if a use had to wait.
    """

    slack_ms: float
    taken_ms: float
    margin_ms: float


def block_of(param: str) -> str:
    """Return a parameter's block: its name up to the first number, ``layers.3`` of ``layers.3.mlp.up.weight``."""
    found = _BLOCK.match(param)
    return found.group() if found else param.rpartition(".")[0] or param


def slack_by_block(events: Iterable[Event], steps: set[int]) -> dict[str, BlockSlack]:
    """Compute slack and time taken of the update windows flushed in ``steps``, the smallest margin first."""
    spans: dict[tuple[int, str], Event] = {}
    ends: dict[tuple[int, str], int] = {}
    for event in events:
        key = (event.step, event.param)
        if event.lane == SLACK and event.step in steps:
            spans[key] = event
        elif event.is_worker and event.kind == "host_update":
            ends[key] = max(event.end_ns, ends.get(key, 0))
    blocks: dict[str, list[tuple[int, int]]] = {}
    for key, span in spans.items():
        if key in ends:
            times = (span.duration_ns, ends[key] - span.start_ns)
            blocks.setdefault(block_of(span.param), []).append(times)
    found = {
        block: BlockSlack(
            slack_ms=median(slack for slack, _ in times) / _NS_PER_MS,
            taken_ms=median(taken for _, taken in times) / _NS_PER_MS,
            margin_ms=min(slack - taken for slack, taken in times) / _NS_PER_MS,
        )
        for block, times in blocks.items()
    }
    return dict(sorted(found.items(), key=lambda item: item[1]["margin_ms"]))
