"""The emulation of a link for Muon's state."""

from __future__ import annotations

from typing import Any

from benchmarks import state_streams


def test_runs_make_the_same_updates() -> None:
    settings = state_streams.Settings(layers=8, seconds=1e-3, steps=2, rounds=1)
    rows = state_streams.compare(1.0, settings, shares=[0.5], subgroups=4)
    assert [row["run"] for row in rows] == [*state_streams.RUNS]
    assert all(row["weights_bitwise_equal"] for row in rows)
    by_run = {row["run"]: row["stall_share"]["median"] for row in rows}
    assert by_run["on device"] == 0.0 < by_run["naive"]


def test_least_stall_by_hand() -> None:
    """With 16 subgroups and 3 buffers, 13 copies follow each other; 15 updates are in front of the last one."""
    assert state_streams.least_stall(16.0, 0.0) == 13.0
    assert state_streams.least_stall(16.0, 8.0) == 13.0 - 7.5
    assert state_streams.least_stall(16.0, 16.0) == 0.0


def test_targets() -> None:
    def row(run: str, stall: float, *, equal: bool = True) -> dict[str, Any]:
        return {
            "run": run, "link_share": 0.6, "iterations": 1.0, "stall_share": {"median": stall},
            "link_share_of_step": 0.1, "weights_bitwise_equal": equal,
        }  # fmt: skip

    def met(*rows: dict[str, Any]) -> list[bool]:
        return [target.met for target in state_streams.targets(rows)]

    assert met(row("on device", 0.0), row("streamed", 0.12), row("naive", 0.5)) == [True, True]
    assert met(row("streamed", 0.14, equal=False)) == [False, False]
