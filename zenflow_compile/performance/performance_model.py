"""The performance model: the equations with the numbers of a policy, a model and a machine put in.

The equations themselves, with their sources, are in ``equations``; ``formulas`` lists those that a plan rests on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from zenflow_compile.performance.equations import (
    BLOCKING_IN_BACKWARD_STEP,
    BLOCKING_STEP,
    BLOCKING_UPDATE,
    BYTES,
    DEVICE_TIME,
    FINAL_AT_STEP_TIME,
    LANES,
    OVERLAPPED_STEP,
    PLAN_TRAFFIC,
    STRIDE_RATIO,
    TRAFFIC,
    interval_formula,
    window_parts,
    windowed_lanes,
)
from zenflow_compile.performance.formula import Formula
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.shares import Knobs
from zenflow_compile.performance.workload import DEVICE_UPDATE_BYTES
from zenflow_compile.planning.plan import FP32_BYTES, STATE_BYTES

NEVER = 2**31 - 1
"""A stride that no model has the subgroups for: nothing is streamed."""


def update_stride(*, cpu_update: float, gpu_update: float, link: float, cpu_downscale: float) -> float:
    """How many subgroups the CPU updates for one of the GPU, before rounding: Deep Optimizer States, Equation 1.

    Args:
        cpu_update: parameters/s that the CPU updates (the paper's U_c), for one device.
        gpu_update: parameters/s that the GPU updates (U_g).
        link: fp32 parameters/s over the link in one direction (B): bytes/s divided by 4.
        cpu_downscale: parameters/s that the CPU casts from fp32 to 16 bits (D_c). ``math.inf`` where the cast is part
            of the update.

    Returns:
        The ratio; ``math.inf`` where the link needs longer for a subgroup's 16-bit weights than the CPU for its whole
        update: then nothing that the GPU could take over makes the step shorter.

    Raises:
        ValueError: a rate is not above zero.
    """
    rates = {"cpu_update": cpu_update, "gpu_update": gpu_update, "link": link, "cpu_downscale": cpu_downscale}
    for name, rate in rates.items():
        if not rate > 0.0:
            raise ValueError(f"{name}={rate!r} must be a rate > 0 in parameters per second; measure it again")
    if 1 / cpu_update + 1 / cpu_downscale <= 1 / (2 * link):
        return math.inf
    return STRIDE_RATIO.evaluate(**rates)


def stride_of(cpu_to_gpu: float) -> int:
    """Every so many subgroups, one is updated on the device: one plus the ratio, rounded, at least 1.

    The paper uses k in two meanings. Equation 1's k is the ratio of ``update_stride``: k = 2 is two subgroups on the
    CPU for one on the GPU, a third of all on the GPU. Its Algorithm 1, and "every alternate subgroup", use k as a
    stride: k = 2 is half of all. This is the stride that has the equation's shares, so a ratio of 2 gives 3.

    Args:
        cpu_to_gpu: a ratio >= 0; ``math.inf`` gives ``NEVER``.

    Raises:
        ValueError: the ratio is negative or NaN.
    """
    if not cpu_to_gpu >= 0.0:
        raise ValueError(f"cpu_to_gpu={cpu_to_gpu!r} must be a number >= 0, as update_stride() gives")
    return min(NEVER, 1 + round(cpu_to_gpu)) if math.isfinite(cpu_to_gpu) else NEVER


def stride_rates(hardware: Hardware, *, weight_bytes: float = 2, window: int = 1) -> dict[str, float]:
    """The arguments of ``update_stride`` for a machine, per device.

    The host's update is as fast as its workers or its memory allow, whichever is slower, and casts by itself. Its one
    pass over a window counts as ``window`` updates, since the device would have updated in each of those steps; the
    pass reads as many gradients.
    """
    host_bytes = 2 * STATE_BYTES + 2 * weight_bytes  # state both ways, a gradient read, a weight written
    cores = hardware.devices * hardware.workers * hardware.adam_per_core
    node = min(cores, hardware.host_bandwidth / host_bytes)
    updates_per_pass = window * host_bytes / (host_bytes + (window - 1) * weight_bytes)
    return {
        "cpu_update": updates_per_pass * node / hardware.devices,
        "gpu_update": hardware.device_bandwidth / DEVICE_UPDATE_BYTES,
        "link": min(hardware.link_to_host, hardware.link_to_device) / FP32_BYTES,  # state goes both ways
        "cpu_downscale": math.inf,
    }


def traffic(topk_ratio: float, update_interval: float) -> float:
    """Bytes over the link per step, both directions together, in units of the model's size in its own dtype.

    Args:
        topk_ratio: share of the model, in [0, 1], whose state is on the device.
        update_interval: steps per window, >= 1.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0.0 <= topk_ratio <= 1.0:
        raise ValueError(f"topk_ratio={topk_ratio!r} must be a number in [0, 1]")
    if not update_interval >= 1.0:
        raise ValueError(f"update_interval={update_interval!r} must be a number >= 1")
    return TRAFFIC.evaluate(topk_ratio=topk_ratio, update_interval=update_interval)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes per parameter: on the device for optimizer state, in host memory, in files.

    Weights, gradients on the device, and what is shared by all (staging rings, the window that files pass through) are
    not counted, as in ``ParamPlan``.
    """

    device: float
    host: float
    file: float


def bytes_per_parameter(knobs: Knobs) -> StateBytes:
    """What the policy needs for each parameter: fp32 state, gradient slots and upload buffers.

    With a plan's own shares these are ``Plan.device_bytes``, ``host_bytes`` and ``file_bytes``; without, those of a
    large model, up to the rounding of ``k`` to lines.
    """
    values = knobs.values()
    return StateBytes(**{place: formula.evaluate(**values) for place, formula in BYTES.items()})


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        seconds: from step to step.
        device: of them, what the device works if it never waits for its host.
        update: what the step spends in updates after the backward; where windows are overlapped, the device's only.
        lanes: busy time of each lane.
    """

    seconds: float
    device: float
    update: float
    lanes: Mapping[str, float]

    @property
    def stall(self) -> float:
        """Seconds in which the device waits for its host."""
        return max(0.0, self.seconds - self.device)


def step_time(knobs: Knobs, hardware: Hardware, *, parameters: float, flops: float) -> StepTime:
    """The time of a step under a policy, a lower bound of the one that ``simulate`` finds.

    Args:
        parameters: of the model.
        flops: of a forward and backward on one device without recomputation; the backward takes two thirds.

    Raises:
        ValueError: the hardware lacks a number that the policy needs.
    """
    values = bindings(knobs, hardware, parameters=parameters, flops=flops)
    update = values["device_update"] if knobs.windowed else BLOCKING_UPDATE.evaluate(**values)
    return StepTime(
        seconds=step_formula(knobs).evaluate(**values),
        device=values["device"],
        update=update,
        lanes={name: values[name] for name in LANES},
    )


def step_formula(knobs: Knobs) -> Formula:
    """The equation of a step: blocking or overlapped, with updates from the step on or from the backward on."""
    if not knobs.windowed:
        return BLOCKING_STEP if knobs.final_at_step else BLOCKING_IN_BACKWARD_STEP
    return FINAL_AT_STEP_TIME if _waits_for_backward(knobs) else OVERLAPPED_STEP


def bindings(knobs: Knobs, hardware: Hardware, *, parameters: float, flops: float) -> dict[str, float]:
    """A value for every symbol, lanes included, as the formulas of ``formulas`` take them.

    Raises:
        ValueError: the hardware lacks a number that the policy needs.
    """
    compute = flops / (hardware.device_flops * hardware.utilization)
    values = knobs.values()
    collectives = _collectives(hardware, parameters * knobs.weight_bytes)
    on_device = values["streamed"] + values["selected"] + values["resident"]
    closing = 0.0 if knobs.windowed else values["offloaded"] / values["update_interval"]
    workers = hardware.workers if knobs.workers is None else knobs.workers
    values |= {
        "owned": parameters / hardware.devices,
        "devices": float(hardware.devices),
        "forward": compute / 3,
        "backward": compute if knobs.recompute else compute * 2 / 3,
        "collectives": collectives,
        "gathers": collectives * (on_device + closing),
        "link_to_host": hardware.link_to_host,
        "link_to_device": hardware.link_to_device,
        "device_bandwidth": hardware.device_bandwidth,
        "host_bandwidth": hardware.host_bandwidth,
        "core_rate": hardware.devices * workers * hardware.adam_per_core,
        **stride_rates(hardware, weight_bytes=values["stride_weight_bytes"]),
        **_disk_bytes(hardware, needed=values["in_files"] > 0),
    }
    values |= {name: formula.evaluate(**values) for name, formula in LANES.items()}
    values["device"] = DEVICE_TIME.evaluate(**values)
    values["hidden"] = values["device"] - max(values["backward"], values["collectives"])
    if knobs.windowed:
        late = _waits_for_backward(knobs)
        parts = [part for lane in windowed_lanes(late) for part in window_parts(lane, late)]
        values |= {part.name: part.evaluate(**values) for part in parts}
    return values


def _waits_for_backward(knobs: Knobs) -> bool:
    """Whether the host has only the next forward for its updates; a step of staleness gives it a whole one again."""
    return knobs.windowed and knobs.final_at_step and knobs.staleness == 0


def _collectives(hardware: Hardware, model_bytes: float) -> float:
    """Seconds of a ring's reduce-scatter of all gradients, or all-gather of all weights: each device sends (n-1)/n."""
    devices = hardware.devices
    if devices == 1:
        return 0.0
    if hardware.peer_bandwidth is None:
        raise ValueError(
            f"hardware {hardware.name} has no peer_bandwidth, which {devices} devices need; give it, or use one device"
        )
    return model_bytes * (devices - 1) / devices / hardware.peer_bandwidth


def _disk_bytes(hardware: Hardware, *, needed: bool) -> dict[str, float]:
    """Seconds to read a byte, and to write one: a disk does one at a time."""
    if not needed:
        return {"disk_read_byte": 0.0, "disk_write_byte": 0.0}
    if hardware.disk_read is None or hardware.disk_write is None:
        raise ValueError(
            f"hardware {hardware.name} has no disk_read and disk_write, which state in files needs; "
            "give both, or keep the state in host memory"
        )
    return {"disk_read_byte": 1 / hardware.disk_read, "disk_write_byte": 1 / hardware.disk_write}


def smallest_interval(knobs: Knobs, hardware: Hardware, *, parameters: float, flops: float) -> int | None:
    """The smallest ``update_interval`` of ``zenflow`` at which the device never waits for its host, by the equations.

    ``profiling.limits`` has the roofline of a run that was measured, from that run's own times and bytes. Arguments as
    for ``step_time``; the interval in ``knobs`` is not read. A plan's own shares count: one that was made for windows
    of one step sums no gradients in longer ones.

    Returns:
        Steps per window; None where no window is long enough, because what comes at every step takes longer than a
        step. Then a larger ``topk_ratio``, or more tokens per step, helps.

    Raises:
        ValueError: as ``step_time``; or the knobs are not ``windowed``, so that every window makes the step wait.
    """
    if not knobs.windowed:
        raise ValueError(
            f"policy={knobs.policy!r} with overlap={knobs.overlap} must be 'zenflow' with overlap=True: otherwise the "
            "step waits for its updates at any update_interval; use step_time for what they take"
        )
    values = bindings(knobs, hardware, parameters=parameters, flops=flops)
    late = _waits_for_backward(knobs)
    lanes = windowed_lanes(late)
    if values["late_state"] > values["device_update"]:
        return None
    copied = values["copied_first"] * max(values["gradients"], values["gradient_memory"])
    if late and copied > max(values["backward"], values["collectives"]):
        return None
    needed = 1.0
    for lane, (_, time) in lanes.items():
        left = values[str(time)] - values[f"{lane}_per_step"]
        if values[f"{lane}_per_window"] == 0.0:
            if left < 0.0:
                return None
        elif left <= 0.0:
            return None
        else:
            needed = max(needed, interval_formula(lane, late).evaluate(**values))
    return math.ceil(needed - 1e-9)  # rounding must not turn 4.0 into 5


def formulas(knobs: Knobs) -> tuple[Formula, ...]:
    """Every equation that a step rests on, in the order in which they build on each other."""
    found = [PLAN_TRAFFIC, *BYTES.values(), *LANES.values(), DEVICE_TIME]
    if not knobs.windowed:
        stride = (STRIDE_RATIO,) if knobs.policy == "deep_optimizer_states" else ()
        return (*stride, *found, BLOCKING_UPDATE, step_formula(knobs))
    late = _waits_for_backward(knobs)
    parts = [part for lane in windowed_lanes(late) for part in window_parts(lane, late)]
    intervals = [interval_formula(lane, late) for lane in windowed_lanes(late)]
    return (*found, step_formula(knobs), *parts, *intervals)


def explain(knobs: Knobs, hardware: Hardware, *, parameters: float, flops: float) -> tuple[str, ...]:
    """Every equation of a step with its numbers put in, one per line; those that come out as zero are left out.

    Arguments as for ``step_time``.
    """
    values = bindings(knobs, hardware, parameters=parameters, flops=flops)
    explained = formulas(knobs)
    if not math.isfinite(update_stride(**stride_rates(hardware, weight_bytes=values["stride_weight_bytes"]))):
        explained = tuple(formula for formula in explained if formula != STRIDE_RATIO)
    lines = [formula.explain(values) for formula in explained if formula.evaluate(**values) != 0.0]
    times = step_time(knobs, hardware, parameters=parameters, flops=flops)
    if times.stall:
        lines.append(f"stall [s] = step - device = {times.seconds:.4g} - {times.device:.4g} = {times.stall:.4g}")
    step = step_formula(knobs)
    return (*lines, f"step: {step.meaning} ({step.source})")
