"""The emulation runs end to end; how long anything takes is for the benchmark itself."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import weight_loads


@pytest.mark.parametrize("policy", weight_loads.POLICIES)
def test_copies_start_ahead_and_change_no_weight(policy: str) -> None:
    settings = weight_loads.Settings(layers=4, seconds=0.0, steps=4, rounds=1)
    rows = weight_loads.compare(policy, settings, shares=[0.5], warm_up=2)
    loads = {row["run"]: (row["loads_per_step"], row["loads_ahead_per_step"]) for row in rows}
    assert loads == {"on device": (0, 0), "prefetch": (7, 7), "naive": (7, 0)}
    assert all(row["weights_bitwise_equal"] for row in rows)
    on_device, prefetch, naive = (row["load_mb_per_step"] for row in rows)
    assert 0 == on_device < prefetch <= naive  # some copies of the first step were made before it


def test_link_bounds_the_stall_from_below() -> None:
    turn = weight_loads.Turn(step_ms=13.0, backward_ms=8.0, stall_ms=1.0, load_ms=0.0, load_mb=0.0, loads=7, ahead=7)
    assert turn.link_ms(4, 3.5) == pytest.approx(0.5)  # one copy, before anything else
    assert turn.link_ms(4, 10.5) == pytest.approx(3.0)  # four copies, and the work of three layers
    assert turn.link_ms(4, 28.0) == pytest.approx(18.0)  # all copies, and all but the backward of one layer


def test_targets_name_every_miss() -> None:
    rows: list[dict[str, Any]] = [
        {
            "policy": "zenflow", "run": run, "link_share": share, "stall_share": {"median": 0.2},
            "link_share_of_step": {"median": 0.19}, "weights_bitwise_equal": True,
        }
        for share in (0.3, 0.9)
        for run in weight_loads.RUNS
    ]  # fmt: skip
    assert [target.met for target in weight_loads.targets(rows)] == [False, True, True, True, True]
    rows[1]["stall_share"] = rows[2]["stall_share"] = {"median": 0.02}
    rows[4]["weights_bitwise_equal"] = False
    assert [target.met for target in weight_loads.targets(rows)] == [True, False, True, True, False]
