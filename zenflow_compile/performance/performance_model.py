"""The performance model: the equations with the numbers of a plan, a model and a machine put in."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sympy import Symbol

from zenflow_compile.performance import equations
from zenflow_compile.performance.formula import Formula, evaluated
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.roofline import shortest_window
from zenflow_compile.performance.step_settings import StepSettings
from zenflow_compile.performance.workload import DEVICE_UPDATE_BYTES
from zenflow_compile.planning.plan import FP32_BYTES, STATE_BYTES

NEVER = 2**31 - 1
"""A stride larger than any number of subgroups: nothing is streamed."""


def update_stride(*, cpu_update: float, gpu_update: float, link: float, cpu_downscale: float) -> float:
    """Subgroups that the CPU updates for each one of the GPU, before rounding: Deep Optimizer States, Equation 1.

    Args:
        cpu_update: parameters/s that the CPU updates (the paper's U_c), for one device.
        gpu_update: parameters/s that the GPU updates (U_g).
        link: fp32 parameters/s over the link in one direction (B): bytes/s divided by 4.
        cpu_downscale: parameters/s that the CPU casts from fp32 to 16 bits (D_c); ``math.inf`` if the update casts.

    Returns:
        The ratio; ``math.inf`` if the link needs longer for a subgroup's 16-bit weights than the CPU for its update:
        then no update on the GPU makes the step shorter.

    Raises:
        ValueError: a rate is not above zero.
    """
    rates = {
        equations.cpu_update: cpu_update,
        equations.gpu_update: gpu_update,
        equations.link: link,
        equations.cpu_downscale: cpu_downscale,
    }
    for name, rate in rates.items():
        if not rate > 0.0:
            raise ValueError(f"{name}={rate!r} must be a rate > 0 in parameters per second; measure it again")
    if 1 / cpu_update + 1 / cpu_downscale <= 1 / (2 * link):
        return math.inf
    return equations.STRIDE_RATIO.evaluate(rates)


def stride_of(cpu_to_gpu: float) -> int:
    """One of this many subgroups is updated on the device: one plus the ratio, rounded, at least 1.

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


def stride_rates(
    hardware: Hardware, *, weight_bytes: float = 2, window: int = 1, state_bytes: float = STATE_BYTES
) -> dict[str, float]:
    """The arguments of ``update_stride`` for a machine, per device.

    The slower of its workers and its memory limits the host's update, which also casts. Its one pass over an update
    window counts as ``window`` updates, since the device would update in each of these steps; it reads as many
    gradients.
    """
    host_bytes = 2 * state_bytes + 2 * weight_bytes  # state both ways, a gradient read, a weight written
    cores = hardware.devices * hardware.workers * hardware.adam_per_core
    node = min(cores, hardware.host_bandwidth / host_bytes)
    updates_per_pass = window * host_bytes / (host_bytes + (window - 1) * weight_bytes)
    return {
        "cpu_update": updates_per_pass * node / hardware.devices,
        "gpu_update": hardware.device_bandwidth / DEVICE_UPDATE_BYTES,
        # State goes both ways. Equation 1 counts it in fp32.
        "link": min(hardware.link_to_host, hardware.link_to_device) / FP32_BYTES * STATE_BYTES / state_bytes,
        "cpu_downscale": math.inf,
    }


def traffic(topk_ratio: float, update_interval: float) -> float:
    """Bytes over the link per step, both directions together, in units of the model's size in its own dtype.

    Args:
        topk_ratio: share of the model, in [0, 1], whose state is on the device.
        update_interval: steps per update window, >= 1.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0.0 <= topk_ratio <= 1.0:
        raise ValueError(f"topk_ratio={topk_ratio!r} must be a number in [0, 1]")
    if not update_interval >= 1.0:
        raise ValueError(f"update_interval={update_interval!r} must be a number >= 1")
    return equations.TRAFFIC.evaluate({equations.topk_ratio: topk_ratio, equations.update_interval: update_interval})


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        seconds: from step to step.
        device: the device's own work, without waiting for its host.
    """

    seconds: float
    device: float

    @property
    def stall(self) -> float:
        """Seconds in which the device waits for its host."""
        return max(0.0, self.seconds - self.device)


def step_time(settings: StepSettings, hardware: Hardware, *, flops: float) -> StepTime:
    """The time of a step: a lower bound of the one that ``simulate`` finds.

    Args:
        flops: of a forward and backward on one device without recomputation; the backward takes two thirds.

    Raises:
        ValueError: the hardware lacks a number that the plan needs.
    """
    values = bindings(settings, hardware, flops=flops)
    return StepTime(step_formula(settings).evaluate(values), values[equations.DEVICE_TIME.symbol])


def step_formula(settings: StepSettings) -> Formula:
    """The equation of a step: blocking or overlapped, with updates from the step on or from the backward on."""
    if not settings.overlapped:
        return equations.BLOCKING_STEP if settings.final_at_step else equations.BLOCKING_IN_BACKWARD_STEP
    return equations.FINAL_AT_STEP_TIME if settings.host_waits_for_backward else equations.OVERLAPPED_STEP


def bindings(settings: StepSettings, hardware: Hardware, *, flops: float) -> dict[Symbol, float]:
    """A value for every symbol of ``formulas``, the results of lanes included.

    Raises:
        ValueError: the hardware lacks a number that the plan needs.
    """
    compute = flops / (hardware.device_flops * hardware.utilization)
    traffic = settings.traffic
    hardware.check_rates(in_files=traffic.files_per_window > 0)
    exchange = _collective_seconds(hardware, settings.model_bytes)
    on_device = settings.numel - settings.deferred
    flushed = 0.0 if settings.overlapped else settings.deferred / settings.update_interval
    workers = hardware.workers if settings.workers is None else settings.workers
    rates = stride_rates(hardware, weight_bytes=settings.stride_weight_bytes)
    values = {
        equations.gradients_per_step: traffic.host_per_gradient,
        equations.gradients_per_window: traffic.gradients_per_window,
        equations.uploads_per_window: traffic.upload_per_window,
        equations.updates_per_window: traffic.host_per_window,
        equations.files_per_window: traffic.files_per_window,
        equations.forward_loads: traffic.forward_loads,
        equations.backward_loads: traffic.backward_loads,
        equations.rewritten: traffic.rewritten,
        equations.loaded_ahead: settings.loaded_ahead,
        equations.state: traffic.state,
        equations.update_interval: settings.update_interval,
        equations.model_bytes: settings.model_bytes,
        equations.updated_on_device: on_device,
        equations.prefetched: settings.prefetched,
        equations.copied_first: settings.copied_first,
        equations.devices: hardware.devices,
        equations.forward: compute / 3,
        equations.backward: compute if settings.recompute else compute * 2 / 3,
        equations.collectives: exchange,
        equations.gathers: exchange * (on_device + flushed) / settings.numel,
        equations.link_to_host: hardware.link_to_host,
        equations.link_to_device: hardware.link_to_device,
        equations.device_bandwidth: hardware.device_bandwidth,
        equations.host_bandwidth: hardware.host_bandwidth,
        equations.core_rate: hardware.devices * workers * hardware.adam_per_core,
        equations.disk_read_byte: 1 / hardware.disk_read if hardware.disk_read else 0.0,
        equations.disk_write_byte: 1 / hardware.disk_write if hardware.disk_write else 0.0,
        equations.cpu_update: rates["cpu_update"],
        equations.gpu_update: rates["gpu_update"],
        equations.link: rates["link"],
        equations.cpu_downscale: rates["cpu_downscale"],
    }
    for formula in (*equations.LANES, equations.DEVICE_TIME, equations.FORWARD_TIME):
        values[formula.symbol] = formula.evaluate(values)
    return values


def _collective_seconds(hardware: Hardware, model_bytes: int) -> float:
    """Seconds of a ring's reduce-scatter of all gradients, or all-gather of all weights: each device sends (n-1)/n."""
    if hardware.peer_bandwidth is None:
        return 0.0
    return model_bytes * (hardware.devices - 1) / hardware.devices / hardware.peer_bandwidth


def smallest_interval(settings: StepSettings, hardware: Hardware, *, flops: float) -> int | None:
    """The smallest ``update_interval`` of ``zenflow`` at which the device never waits for its host, by the equations.

    The interval in ``settings`` is not read. Their plan counts: one that was made for update windows of one step sums
    no gradients in longer ones. Arguments as for ``step_time``.

    Returns:
        Steps per update window; None where no window is long enough, because the work of every step takes longer than
        a step. Then a larger ``topk_ratio``, or more tokens per step, helps.

    Raises:
        ValueError: as ``step_time``; or host updates do not overlap, so that the step waits for every window.
    """
    if not settings.overlapped:
        raise ValueError(
            f"policy={settings.policy!r} with overlap={settings.overlap} must be 'zenflow' with overlap=True: "
            "otherwise the step waits for its updates at any update_interval; use step_time for what they take"
        )
    values = bindings(settings, hardware, flops=flops)
    hidden = (
        (equations.LATE_STATE.symbol, equations.DEVICE_UPDATE.symbol),
        (equations.REWRITES.symbol, equations.DEVICE_UPDATE.symbol),
        (equations.FORWARD_LOADS.symbol, equations.forward),
        (equations.BACKWARD_LOADS.symbol, equations.backward),
    )
    if any(values[lane] > values[time] for lane, time in hidden):
        return None
    waits = settings.host_waits_for_backward
    copied = settings.copied_first * max(values[equations.GRADIENTS.symbol], values[equations.GRADIENT_MEMORY.symbol])
    if waits and copied > max(values[equations.backward], values[equations.collectives]):
        return None
    return shortest_window(
        (evaluated(lane.per_window, values), evaluated(lane.per_step, values), values[lane.time])
        for lane in equations.window_lanes(host_waits_for_backward=waits)
    )


def formulas(settings: StepSettings) -> tuple[Formula, ...]:
    """Every equation that a step rests on, in the order in which they build on each other."""
    step = (*equations.LANES, equations.DEVICE_TIME, step_formula(settings))
    if settings.overlapped:
        lanes = equations.window_lanes(host_waits_for_backward=settings.host_waits_for_backward)
        hidden = (equations.FORWARD_TIME,) if settings.host_waits_for_backward else ()
        return (equations.PLAN_TRAFFIC, *step, *hidden, *(lane.interval for lane in lanes))
    stride = (equations.STRIDE_RATIO,) if settings.policy == "deep_optimizer_states" else ()
    return (*stride, equations.PLAN_TRAFFIC, *step[:-1], equations.BLOCKING_UPDATE, step[-1])


def explain(settings: StepSettings, hardware: Hardware, *, flops: float) -> tuple[str, ...]:
    """Every equation of a step with its numbers, one per line, without those whose value is zero.

    Arguments as for ``step_time``.
    """
    values = bindings(settings, hardware, flops=flops)
    explained = formulas(settings)
    if not math.isfinite(update_stride(**stride_rates(hardware, weight_bytes=settings.stride_weight_bytes))):
        explained = tuple(formula for formula in explained if formula != equations.STRIDE_RATIO)
    lines = [formula.explain(values) for formula in explained if formula.evaluate(values) != 0.0]
    times = step_time(settings, hardware, flops=flops)
    if times.stall:
        lines.append(f"stall [s] = step - device = {times.seconds:.4g} - {times.device:.4g} = {times.stall:.4g}")
    step = step_formula(settings)
    return (*lines, f"step: {step.meaning} ({step.source})")
