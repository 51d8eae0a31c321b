from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.upload_scheduler import UploadScheduler


def scheduler_of(params: int) -> tuple[UploadScheduler, dict[int, Any]]:
    offloaded = {p: SimpleNamespace(updates=SimpleNamespace(deadline=p)) for p in range(params)}
    return UploadScheduler(SimpleNamespace(offloaded=offloaded), Recorder()), offloaded  # type: ignore[arg-type]


def order(offloaded: dict[int, Any]) -> list[int]:
    return sorted(offloaded, key=lambda p: offloaded[p].updates.deadline)


def test_graphs_keep_the_order_of_their_compilation() -> None:
    scheduler, offloaded = scheduler_of(6)
    scheduler.declare_order([1, 0, 2])
    scheduler.declare_order([4, 3, 5])
    assert order(offloaded) == [1, 0, 2, 4, 3, 5]


def test_recompiled_graph_keeps_its_place() -> None:
    scheduler, offloaded = scheduler_of(6)
    scheduler.declare_order([0, 1, 2])
    scheduler.declare_order([3, 4, 5])
    scheduler.declare_order([2, 0, 1])
    assert order(offloaded) == [2, 0, 1, 3, 4, 5]
    scheduler.declare_order([5, 4, 3])
    assert order(offloaded) == [2, 0, 1, 5, 4, 3]
