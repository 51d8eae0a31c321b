"""What the report says that one option would gain."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.profiling.synthetic import event, known_run, recording
from zenflow_compile.performance.hardware import Bandwidths
from zenflow_compile.performance.traffic import Traffic
from zenflow_compile.profiling.diagnose import Change
from zenflow_compile.profiling.gains import gain_of, limit_of_run
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.summary import summarize

# Steps take 40 ms, of which 4 are a stall; update windows have 4 steps. Per step 1.1e9 bytes on the host.
TRAFFIC = Traffic(
    host=1.1e9, to_host=4e6, to_device=1e6,
    host_per_window=4_384_000_000, host_per_gradient=4_000_000, upload_per_window=4_000_000,
)  # fmt: skip
RATES = Bandwidths(host=20e9, to_host=10e9, to_device=5e9)


def gain(change: Change | None, rates: Bandwidths | None = RATES, **changes: Any) -> str | None:
    run = dataclasses.replace(known_run(), traffic=dataclasses.replace(TRAFFIC, **changes), bandwidths=rates)
    return gain_of(change, run, summarize(run))


def test_longer_windows() -> None:
    """The host needs 55 ms at 20 GB/s, and 27.6 ms with windows of 8 steps: the device's own 36 ms remain."""
    assert gain(Change.LONGER_WINDOWS) == (
        "With update_interval=8 the bytes of a step allow 4.00 ms less stall: 36.0 ms per step at best, where this run "
        "takes 40.0 ms on average, 1.11 times as fast."
    )


def test_hidden_updates() -> None:
    """30 ms of host update fit under the device's own 36 ms."""
    said = gain(Change.OVERLAP, host=0.6e9, blocking=True)
    assert said is not None
    assert said.startswith("If host updates are hidden, the bytes of a step allow 4.00 ms less stall: 36.0 ms per step")


def uneven(stall_ms: float) -> Recording:
    """Eight steps of 100 ms of the device's own work; every fourth one also waits."""
    events, start = [], 0.0
    for step in range(8):
        end = start + 100 + (stall_ms if step % 4 == 3 else 0)
        events += [event("step", "step", start, end, step=step), event("compute", "forward", start, end, step=step)]
        events += [event("compute", "wait", start + 50, end - 50, step=step)]
        start = end
    return recording(events, traffic=TRAFFIC, bandwidths=RATES)


@pytest.mark.parametrize("stall_ms", [40, 360])
def test_limits_of_uneven_steps_are_means(stall_ms: float) -> None:
    """55 ms of host work fit under the device's own 100 ms."""
    run = uneven(stall_ms)
    limit = limit_of_run(run, summarize(run))
    assert limit is not None
    assert (limit.step_ms, limit.stall_ms) == (pytest.approx(100), 0)
    assert gain_of(Change.LONGER_WINDOWS, run, summarize(run)) is None  # the bytes allow 100 ms as it is


def test_gains_are_what_the_option_takes_off() -> None:
    """110 ms of host work: 10 ms more than the device's own. The other 80 ms of waiting stay."""
    run = uneven(360)
    run = dataclasses.replace(run, traffic=dataclasses.replace(TRAFFIC, host=2.2e9, host_per_window=8_784_000_000))
    said = gain_of(Change.LONGER_WINDOWS, run, summarize(run))
    assert said is not None
    assert (
        "allow 10.0 ms less stall: 180 ms per step at best, where this run takes 190 ms on average, 1.06 times" in said
    )


def test_no_gain_is_said() -> None:
    per_gradient = {"host": 1.1e9, "host_per_window": 400_000_000, "host_per_gradient": 1_000_000_000}
    said = gain(Change.LONGER_WINDOWS, **per_gradient)
    assert said == "With update_interval=8 the bytes of a step allow no shorter step on this machine."


@pytest.mark.parametrize(
    ("change", "rates", "changes"),
    [
        (None, RATES, {}),
        (Change.LONGER_WINDOWS, None, {}),
        (Change.LONGER_WINDOWS, RATES, {"host_per_window": 1}),  # windows of different lengths
        # 20 ms of host work: less than the device's own 36 ms also without the change.
        (Change.LONGER_WINDOWS, RATES, {"host": 0.4e9, "host_per_window": 1_584_000_000}),
    ],
)
def test_nothing_is_guessed(change: Change | None, rates: Bandwidths | None, changes: dict[str, Any]) -> None:
    assert gain(change, rates, **changes) is None
