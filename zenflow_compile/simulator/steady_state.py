"""Runs a simulated device until its steps repeat, and selects the steps to report.

Without files, only updates in flight carry over to later steps, for as many steps as their staleness; a few steps lead
to the steady state. A cache of files starts empty: cycles of update windows run until the last one repeats the one
before, in its time and in how far the disk has come.
"""

from __future__ import annotations

from collections.abc import Iterator

from zenflow_compile.performance.workload import Workload
from zenflow_compile.simulator.device import Device
from zenflow_compile.simulator.machine import Row
from zenflow_compile.timeline import DISK

_RUN_IN = 4  # steps
_ALIKE = 1e-4  # relative difference below which two cycles take the same time
_PATIENCE = 24  # steps, in at least three cycles, after which the second half is reported even if nothing repeats


def first_step(work: Workload) -> int:
    """The number of the step to begin with: a whole cycle before the steady steps with state in files, else less."""
    return 0 if work.in_files else max(0, work.cycle - _RUN_IN)


def run_until_steady(device: Device, *, steps: int, whole: bool) -> range:
    """Run ``device``, which begins at ``first_step``, and finish its work in flight.

    Args:
        steps: to report.
        whole: report more steps, up to whole periods of the steady state.

    Returns:
        The steps to report.
    """
    cycle = device.work.cycle
    first, period = cycle + device.work.staleness, cycle
    if device.work.in_files:
        cycles, steady = _run_until_cycles_repeat(device)
        first += (cycles - steady - 1) * cycle
        period *= steady
    if whole:
        steps = -(-steps // period) * period
    device.run(first + steps - device.next_step)
    device.finish()
    return range(first, first + steps)


def seconds_of(device: Device, steps: range) -> float:
    """Simulated time of ``steps``."""
    return device.step_ends[steps[-1]] - device.step_ends[steps[0] - 1]


def rows_of(device: Device, steps: range) -> Iterator[Row]:
    """Rows of ``steps``. The disk works ahead and behind: its rows count if they begin within these steps.

    Times are from the start of the first step, which gets the number of the first step after one cycle.
    """
    origin, end = device.step_ends[steps[0] - 1], device.step_ends[steps[-1]]
    shift = steps[0] - device.work.cycle - device.work.staleness
    for row in device.machine.rows:
        step = row.step
        if row.lane == DISK:
            if not origin <= row.begin < end:
                continue
            step = min(max(step, steps[0]), steps[-1])
        elif step not in steps:
            continue
        yield Row(row.lane, row.kind, row.begin - origin, row.end - origin, step - shift, row.param, row.size)


def _run_until_cycles_repeat(device: Device) -> tuple[int, int]:
    """Returns how many cycles ran, and how many of the last ones count."""
    cycle = device.work.cycle
    longest = max(3, _PATIENCE // cycle)
    begin, seconds, progress = 0.0, 0.0, (0, 0)
    for count in range(1, longest + 1):
        device.run(cycle)
        end = device.step_ends[device.next_step - 1]
        before = seconds, progress
        seconds, progress = end - begin, device.machine.files.progress()
        if abs(seconds - before[0]) <= _ALIKE * before[0] and progress == before[1]:
            return count, 1
        begin = end
    return longest, longest // 2
