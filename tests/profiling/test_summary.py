import dataclasses
import json
import math
from itertools import pairwise

import pytest

from tests.profiling.synthetic import event, known_run, recording
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.summary import Summary, summarize
from zenflow_compile.timeline import AdaptiveWindows, NormSums


def test_known_run():
    summary = summarize(known_run())
    expected = {
        "policy": "zenflow",
        "update_interval": 4,
        "adaptive_windows": False,
        "shortest_window": None,
        "shortest_window_measured": False,
        "mean_window_steps": 1.0,
        "blocking": False,
        "state_note": None,
        "selected_share": 0.1,
        "steps": 2,
        "warm_up_steps": 0,
        "compilations": 0,
        "compilation_ms": 0.0,
        "evaluation_ms": 0.0,
        "step_ms": 40.0,
        "step_ms_median": 40.0,
        "step_ms_p95": 40.0,
        "stall_ms_per_step": 4.0,
        "stall_share": 8 / 80,
        "stall_early_share": 1.0,  # 2 of the 9 ms of forward work were done: under a quarter
        "stall_by_param": {"first": 4.0},
        "slack_by_block": {},
        "forward_ms_per_step": 9.0,  # 14 without 4 of waiting and 1 of merging
        "backward_ms_per_step": 20.0,
        "update_ms_per_step": 6.0,
        "merge_ms_per_step": 1.0,
        "select_ms_per_step": None,
        "other_ms_per_step": 0.0,
        "host_update_ms_per_step": 30.0,
        # In measured time: worker 0 26..46 (42..46 under a wait) and 66..80; worker 1 20..30 and 60..70.
        "forward_recorded": True,
        "hidden_fraction": (20 - 4 + 14 + 20) / (20 + 14 + 20),
        "workers": 2,
        "worker_busy_share": (20 + 14 + 20) / (2 * 80),
        "d2h_busy_share": 10 / 80,
        "h2d_busy_share": 3 / 80,
        "d2h_ms_per_step": 5.0,
        "h2d_ms_per_step": 1.5,
        "d2h_bytes_per_step": 8_000_000.0,
        "h2d_bytes_per_step": 1_250_000.0,
        "state_bytes_per_step": 250_000.0,
        "weight_bytes_per_step": 0.0,
        "traffic_model_sizes_per_step": 0.9,
        "state_model_sizes_per_step": 0.025,
        "host_update_gb_per_s": 0.8 / 0.052,  # some worker was busy in 20..46 and 60..86
        "d2h_gb_per_s": 16e6 / 10e6,
        "h2d_gb_per_s": 2.5e6 / 3e6,
        "selected_norm_share": 0.61,
        "windows_flushed": 4,
        "selections": 1,
        "state_moves": 1,
        "rank_wait_ms_per_step": None,
        "in_collectives_ms_per_step": None,
        "sent_bytes_per_step": None,
        "dense_gradients": {},
        "device_bytes_by_phase": {},
        "device_bytes_peak": None,
    }
    assert summary.keys() == expected.keys() == Summary.__annotations__.keys()
    for key, value in expected.items():
        assert summary[key] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), key


def test_mean_window_is_computed_per_parameter():
    """Flushes at steps 0, 3 and 4, at 2 and 6, and one alone: 8 steps in 3 windows."""
    flushed = [("a", 0), ("a", 3), ("a", 4), ("b", 2), ("b", 6), ("c", 5)]
    events = [event("windows", "flush", 10 * s, 10 * s, step=s, param=param) for param, s in flushed]
    events += [event("step", "step", 10 * s, 10 * s + 10, step=s) for s in range(7)]
    run = recording(events, adaptive_windows=AdaptiveWindows(shortest=1, longest=4, measured=True))
    summary = summarize(run)
    assert summary["mean_window_steps"] == pytest.approx(8 / 3)
    assert (summary["adaptive_windows"], summary["shortest_window"]) == (True, 1)
    json.dumps(summary, allow_nan=False)


def test_missing_measurements_are_none():
    summary = summarize(Recording(events=()))
    for key in ("step_ms", "stall_ms_per_step", "host_update_ms_per_step", "hidden_fraction", "d2h_bytes_per_step"):
        assert summary[key] is None, key
    assert summary["steps"] == summary["windows_flushed"] == 0
    json.dumps(summary, allow_nan=False)


def test_events_without_a_step_are_not_measured():
    summary = summarize(recording([event("worker 0", "host_update", 0, 5), event("compute", "wait", 0, 5)]))
    assert summary["stall_ms_per_step"] is None
    assert summary["hidden_fraction"] is None


def test_no_host_work_has_no_hidden_fraction():
    summary = summarize(recording([event("step", "step", 0, 10), event("compute", "forward", 0, 5)], norms=None))
    assert summary["hidden_fraction"] is None
    assert summary["host_update_gb_per_s"] is None
    assert summary["stall_ms_per_step"] == 0.0
    assert summary["host_update_ms_per_step"] == 0.0
    assert summary["d2h_bytes_per_step"] == 0.0
    assert summary["selected_norm_share"] is None
    assert summary["backward_ms_per_step"] is None


def test_step_time_is_a_mean_and_p95_is_interpolated():
    ends = [0, 10, 20, 30, 40, 60]
    steps = [event("step", "step", a, b, step=i) for i, (a, b) in enumerate(pairwise(ends))]
    summary = summarize(recording(steps))
    assert summary["step_ms"] == 12.0
    assert summary["step_ms_p95"] == pytest.approx(10 + 0.8 * 10)


def test_leading_compilation_is_left_out():
    events = [event("step", "step", 0, 1000, step=0), event("compute", "wait", 0, 900, step=0)]
    events += [event("D2H", "copy", 10, 20, step=0, size=1_000_000), event("windows", "flush", 5, 5, step=0)]
    for step in range(1, 5):
        origin = 1000 + 10 * step
        events.append(event("step", "step", origin - 10, origin, step=step))
        events.append(event("D2H", "copy", origin - 5, origin - 4, step=step, size=2_000_000))
    summary = summarize(recording(events))
    assert (summary["steps"], summary["warm_up_steps"]) == (5, 1)
    assert summary["stall_ms_per_step"] == 0.0
    assert summary["d2h_bytes_per_step"] == 2_000_000
    assert summary["step_ms_p95"] == 10.0
    assert summary["windows_flushed"] == 1


def test_slow_step_in_the_middle_counts():
    ends = [0, 10, 20, 120, 130]
    steps = [event("step", "step", a, b, step=i) for i, (a, b) in enumerate(pairwise(ends))]
    assert summarize(recording(steps))["warm_up_steps"] == 0


def test_work_after_the_last_step_counts_without_stall():
    """Work that ends while the profile exits belongs to the last step; waiting for it delays no step."""
    events = [event("step", "step", 0, 10, step=0)]
    events += [event("worker 0", "host_update", 8, 20, step=0), event("compute", "wait", 10, 20, step=0)]
    events += [event("H2D", "copy", 20, 21, step=0, size=5_000_000)]
    summary = summarize(recording(events))
    assert summary["stall_ms_per_step"] == 0.0
    assert summary["hidden_fraction"] == 1.0
    assert summary["host_update_ms_per_step"] == 12.0
    assert summary["h2d_bytes_per_step"] == 5_000_000


def test_work_of_unrecorded_steps_is_left_out():
    events = [event("step", "step", 0, 10, step=5), event("D2H", "copy", 1, 2, step=4, size=9)]
    events += [event("worker 0", "host_update", 0, 3, step=4)]
    summary = summarize(recording(events))
    assert summary["d2h_bytes_per_step"] == 0
    assert summary["host_update_ms_per_step"] == 0.0


def test_overlapping_waits_count_once():
    events = [event("step", "step", 0, 10), event("compute", "wait", 1, 4), event("compute", "wait", 3, 6)]
    assert summarize(recording(events))["stall_ms_per_step"] == 5.0


def test_blocking_host_update_is_not_hidden():
    events = [event("step", "step", 0, 10), event("compute", "wait", 4, 10), event("worker 0", "host_update", 5, 9)]
    assert summarize(recording(events))["hidden_fraction"] == 0.0


@pytest.mark.parametrize(("share", "hidden"), [(0.5, 0.75), (0.01, 0.25)])
def test_updates_of_little_hide_nothing(share, hidden):
    """The host updates for 2 ms in a forward, for 4 ms in the step's own update, and for 2 ms in neither."""
    events = [event("step", "step", 0, 20), event("compute", "forward", 0, 8), event("compute", "update", 10, 14)]
    events += [event("worker 0", "host_update", *span) for span in ((6, 8), (10, 14), (16, 18))]
    assert summarize(recording(events, updated_on_device=share))["hidden_fraction"] == hidden


def test_late_waits_are_not_early():
    events = [event("step", "step", 0, 20), event("compute", "forward", 0, 14)]
    events += [event("compute", "wait", 1, 2, param="a"), event("compute", "wait", 9, 12, param="b")]
    summary = summarize(recording(events))
    assert summary["stall_early_share"] == pytest.approx(1 / 4)
    assert summary["stall_by_param"] == {"b": 3.0, "a": 1.0}
    assert list(summary["stall_by_param"]) == ["b", "a"]


def test_unknown_model_size_and_zero_gradients():
    run = dataclasses.replace(known_run(), model_bytes=0, norms=NormSums(selected=0.0, total=0.0))
    assert summarize(run)["traffic_model_sizes_per_step"] is None
    assert summarize(run)["state_model_sizes_per_step"] is None
    assert summarize(run)["selected_norm_share"] is None


def test_simulated_clocks_may_start_anywhere():
    shifted = [
        dataclasses.replace(e, start_ns=e.start_ns - 10**12, end_ns=e.end_ns - 10**12) for e in known_run().events
    ]
    summary, moved = summarize(known_run()), summarize(recording(shifted))
    assert moved == summary
    assert not any(isinstance(value, float) and math.isnan(value) for value in summary.values())


def test_only_the_start_of_a_run_has_a_warm_up():
    """A stall makes the first of four steps long."""
    ends = [0, 100, 110, 120, 130]
    run = recording([event("step", "step", start, end) for start, end in pairwise(ends)])
    assert summarize(run)["step_ms"] == 10
    assert summarize(run, warm_up=0)["step_ms"] == 32.5
    assert summarize(dataclasses.replace(run, predicted=True))["step_ms"] == 32.5
