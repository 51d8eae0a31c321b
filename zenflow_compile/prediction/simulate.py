"""Simulates the timeline of a plan on given hardware, in the events of a measured run.

A discrete-event simulation of one device: the training thread with its stream, a copy lane each way, a pool of workers,
a disk, and a lane for collectives if there are several devices. Each device has an equal share of the host's memory
bandwidth, cores and disk. Transfers that need more host memory bandwidth than there is are slowed in proportion; the
published performance models leave this contention out.

Simplifications: a block of the model is the smallest unit of computing, copying and updating; update windows are as
long as the plan says, and nothing re-selects; launching work costs nothing; a disk does one transfer at a time; memory
has no fragmentation; a backward loads every offloaded weight, although it reads no embedding; and a tied weight is
loaded once in a forward, which reads it twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from zenflow_compile.checks.validate import check_flag, check_integer
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.model_shape import ModelShape, flops_per_token
from zenflow_compile.planning.plan import Plan
from zenflow_compile.prediction.device import SimulatedDevice
from zenflow_compile.prediction.lanes import POOL, Row
from zenflow_compile.prediction.workload import Workload, workload_of
from zenflow_compile.profiling.recording import Recording, recording_of
from zenflow_compile.timeline import COMPUTE, D2H, DISK, H2D, Event, worker_lane

_NS = 1e9

ALIKE = 1e-4
"""Relative difference below which two cycles of a simulation take the same time."""


def simulate(
    plan: Plan,
    hardware: Hardware,
    model: ModelShape,
    *,
    tokens: int,
    steps: int | None = None,
    final_at_step: bool = False,
    recompute: bool = False,
    workers: int | None = None,
) -> Recording:
    """Run ``plan`` in simulated time.

    The recorded steps are in their steady state; the first one has the number after a full cycle
    of update windows. Bytes and ``model_bytes`` are one device's share, so that traffic in model sizes is the node's.

    Args:
        plan: of the parameters of ``model``, in the same order.
        model: gives the work of forward and backward.
        tokens: per device and step.
        steps: to record; None records three cycles of update windows, at least four steps, and whole periods of the
            steady state.
        final_at_step: gradients are final only after the whole backward; else each when it is produced.
        recompute: activations are computed again in the backward, which costs another forward.
        workers: threads of each device that update on the host, of its share of the cores; None takes all but two.

    Returns:
        A recording like the profiler's; nanoseconds from the first recorded step's start. Lane ``peers`` has the
        collectives (kind ``copy``), lane ``disk`` kinds ``read`` and ``write``.

    Raises:
        TypeError: a value is of the wrong type.
        ValueError: a value is out of range, the plan is another model's, or ``hardware`` lacks a number.
    """
    check_integer("tokens", tokens, 1)
    check_flag("final_at_step", final_at_step)
    check_flag("recompute", recompute)
    _check(plan, hardware, model)
    work = workload_of(plan, hardware, model, tokens=tokens, recompute=recompute)
    recorded = max(4, 3 * work.cycle) if steps is None else check_integer("steps", steps, 1)
    threads = threads_of(hardware, workers)
    device = SimulatedDevice(work, hardware, threads, final_at_step, first_step=first_step(work))
    steady = run_until_steady(device, steps=recorded, whole=steps is None)
    recording = recording_of(plan, _events(rows_of(device, steady), threads), plan.model_bytes // hardware.devices)
    return replace(
        recording,
        traffic=recording.traffic if hardware.all_devices == 1 else None,
        bandwidths=hardware.bandwidths(threads),
        flops_per_step=flops_per_token(model) * tokens,
        device_flops=hardware.device_flops,
        title=f"predicted: {model.name} on {hardware.name}",
        predicted=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyStep:
    """Means over one cycle of update windows, or over several if files do not settle; of one device.

    Attributes:
        seconds: of a step; stall: of them, in which the device waits.
        host_update: seconds of host updates.
        to_host, to_device: bytes of gradients down and weights up.
        loads: bytes of offloaded weights to the device; written_back: of those that the device has updated, to the
            host.
        state: bytes of state that is streamed through the device, both ways.
        disk: bytes read and written.
    """

    seconds: float
    stall: float
    host_update: float
    to_host: float
    to_device: float
    loads: float
    written_back: float
    state: float
    disk: float


def steady_step(
    plan: Plan,
    hardware: Hardware,
    model: ModelShape,
    *,
    tokens: int,
    final_at_step: bool = False,
    recompute: bool = False,
    workers: int | None = None,
) -> SteadyStep:
    """The numbers of a step, in a fraction of a recording's time; arguments and errors as for ``simulate``.

    Deep models and long cycles are simulated coarsely (``workload_of``). Measured differences (see
    tests/prediction/test_workload.py): with more than 128 layers, a step by less than 3%. With more than 1600 steps of
    a cycle times blocks of the model, a step by less than 2%, the host update by up to twice the largest parameter's
    share of all offloaded elements, the disk's bytes by up to twice its share of all that files move, and bytes over
    the link by at most 1%. All else is equal.
    """
    _check(plan, hardware, model)
    work = workload_of(plan, hardware, model, tokens=tokens, recompute=recompute, coarse=True)
    return steady_step_of(work, hardware, final_at_step=final_at_step, workers=workers)


def steady_step_of(
    work: Workload,
    hardware: Hardware,
    *,
    final_at_step: bool = False,
    workers: int | None = None,
    alike: float = ALIKE,
) -> SteadyStep:
    """The numbers of a step of ``work``; see ``steady_step``, and ``ALIKE``."""
    device = SimulatedDevice(work, hardware, threads_of(hardware, workers), final_at_step, first_step=first_step(work))
    steady = run_until_steady(device, steps=work.cycle, whole=True, alike=alike)
    rows = list(rows_of(device, steady))

    def seconds(lane: str, kind: str) -> float:
        return sum(row.end - row.begin for row in rows if (row.lane, row.kind) == (lane, kind)) / len(steady)

    def moved(*lanes: str, kind: str | None = None) -> float:
        return sum(row.size for row in rows if row.lane in lanes and kind in (row.kind, None)) / len(steady)

    return SteadyStep(
        seconds=(device.step_ends[steady[-1]] - device.step_ends[steady[0] - 1]) / len(steady),
        stall=seconds(COMPUTE, "wait"),
        host_update=seconds(POOL, "host_update"),
        to_host=moved(D2H, kind="copy"),
        to_device=moved(H2D, kind="copy"),
        loads=moved(H2D, kind="load"),
        written_back=moved(D2H, kind="write_back"),
        state=moved(D2H, H2D, kind="state"),
        disk=moved(DISK),
    )


def threads_of(hardware: Hardware, workers: int | None) -> int:
    """Threads of each device that update on the host.

    Raises:
        TypeError, ValueError: ``workers`` is no integer, or more than the share of the cores.
    """
    if workers is None:
        return hardware.workers
    remedy = f": the cores of {hardware.name!r} for each of its devices in use; None takes all of them but two"
    return check_integer("workers", workers, 1, max(1, hardware.cores // hardware.devices), remedy=remedy)


def _check(plan: Plan, hardware: Hardware, model: ModelShape) -> None:
    """Raise ValueError for a plan of another model, and for hardware that lacks a rate."""
    if [param.shape for param in plan.params] != [spec.shape for spec in model.params]:
        raise ValueError(f"the plan is not one of {model.name}: parameters differ; make it from the model's own")
    hardware.check_rates(in_files=plan.bytes_in_turn > 0)


def _events(rows: Iterable[Row], workers: int) -> tuple[Event, ...]:
    """Events of the recorded steps in order of time; those of the pool become one per worker."""
    events = []
    for row in rows:
        begin, end = round(row.begin * _NS), round(row.end * _NS)
        lanes = [worker_lane(index) for index in range(workers)] if row.lane == POOL else [row.lane]
        for index, lane in enumerate(lanes):
            size = row.size * (index + 1) // len(lanes) - row.size * index // len(lanes)
            events.append(
                Event(lane=lane, kind=row.kind, start_ns=begin, end_ns=end, step=row.step, param=row.param, bytes=size)
            )
    return tuple(sorted(events, key=lambda event: (event.start_ns, event.end_ns)))


_RUN_IN = 4  # steps
_PATIENCE = 24  # steps, in at least three cycles, after which the second half is reported even if nothing repeats


def first_step(work: Workload) -> int:
    """The number of the step to begin with: a whole cycle before the steady steps with state in files, else less."""
    return 0 if work.in_files else max(0, work.cycle - _RUN_IN)


def run_until_steady(device: SimulatedDevice, *, steps: int, whole: bool, alike: float = ALIKE) -> range:
    """Run ``device``, which begins at ``first_step``, and finish its work in flight.

    Args:
        steps: to report.
        whole: report more steps, up to whole periods of the steady state.
        alike: see ``ALIKE``.

    Returns:
        The steps to report.
    """
    cycle = device.work.cycle
    first, period = cycle + device.work.staleness, cycle
    if device.work.in_files:
        cycles, steady = _run_until_cycles_repeat(device, alike)
        first += (cycles - steady - 1) * cycle
        period *= steady
    if whole:
        steps = -(-steps // period) * period
    device.run(first + steps - device.next_step)
    device.finish()
    return range(first, first + steps)


def rows_of(device: SimulatedDevice, steps: range) -> Iterator[Row]:
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


def _run_until_cycles_repeat(device: SimulatedDevice, alike: float) -> tuple[int, int]:
    """Returns how many cycles ran, and how many of the last ones count."""
    cycle = device.work.cycle
    longest = max(3, _PATIENCE // cycle)
    begin, seconds, progress = 0.0, 0.0, (0, 0)
    for count in range(1, longest + 1):
        device.run(cycle)
        end = device.step_ends[device.next_step - 1]
        before = seconds, progress
        seconds, progress = end - begin, device.machine.files.progress()
        if abs(seconds - before[0]) <= alike * before[0] and progress == before[1]:
            return count, 1
        begin = end
    return longest, longest // 2
