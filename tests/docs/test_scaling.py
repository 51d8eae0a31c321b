"""The table of bytes on 1 to 256 devices has the numbers of the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.performance.test_rank_traffic import ZENFLOW, traffic
from zenflow_compile.performance.traffic import Sharing

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
WAYS = {
    "one device": Sharing.CHANGED_SLICES,
    "`process_group=`": Sharing.CHANGED_SLICES,
    "`fully_shard` over a mesh of (nodes, 8): HSDP": Sharing.HYBRID,
    "`fully_shard` over all": Sharing.SHARDED,
    "DDP, an optimizer each": Sharing.ALL_REDUCE,
}


def rows() -> list[tuple[str, list[float]]]:
    """The way of sharing the work, and the numbers, of each row."""
    found, name = [], ""
    lines = PAGE.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("| | devices |"))
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = first or name
        found.append((name, [float(cell) for cell in cells]))
    return found


def test_every_way_is_in_the_table() -> None:
    assert {name for name, _ in rows()} == WAYS.keys()


@pytest.mark.parametrize(("name", "numbers"), rows(), ids=lambda each: each if isinstance(each, str) else int(each[0]))
def test_bytes_are_those_of_the_plan(name: str, numbers: list[float]) -> None:
    devices, *sizes = numbers
    each = min(8, int(devices))
    found = traffic(ZENFLOW, each, WAYS[name], int(devices) // each)
    exact = (found.sent, found.leaving, found.to_host, found.to_device, found.host_bytes)
    for size, count in zip(sizes, exact, strict=True):
        assert size == pytest.approx(count / 1e9, abs=0.6 if size > 100 else 0.06)
