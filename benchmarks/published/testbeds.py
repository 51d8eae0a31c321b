"""The machines of the published runs, at the rates that their authors state, and a step on them by phases.

*Stated* machines have the rates of the published system. The machines of ``performance.hardware`` have those of this
project's host kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import Hardware, hardware
from zenflow_compile.performance.models import model
from zenflow_compile.planning.planners import make_plan
from zenflow_compile.prediction.simulate import SteadyStep, simulate, steady_step
from zenflow_compile.timeline import COMPUTE, D2H, STEP

V100_RATES = {"cpu_update": 2e9, "gpu_update": 35e9, "link": 3e9, "cpu_downscale": 8.7e9}
H100_RATES = {"cpu_update": 2e9, "gpu_update": 25e9, "link": 55e9 / 4, "cpu_downscale": 62e9 / 4}
"""Parameters per second and GPU, as Deep Optimizer States states them for its testbeds (text and Table 1)."""

UNPINNED = 2.5e9
"""Bytes/s at which gradients reach the host through an unpinned temporary: Deep Optimizer States, text to Table 1."""

_NS = 1e9


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of a step. The backward ends with the last gradient's copy, and the update is what comes after it."""

    forward: float
    backward: float
    update: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward + self.update


def stated(node: Hardware, rates: dict[str, float], source: str) -> Hardware:
    """``node`` with a published system's update and link rates.

    A separate cast follows the host's update in that system, so the two take their time one after the other, as in
    Deep Optimizer States' Equation 1.
    """
    per_device = 1 / (1 / rates["cpu_update"] + 1 / rates["cpu_downscale"])
    link = 4 * rates["link"]
    return replace(
        with_host_rate(node, per_device, source),
        link_to_host=link,
        link_to_device=link,
        sources={**node.sources, "adam_per_core": source, "link_to_host": source, "link_to_device": source},
    )


def with_host_rate(node: Hardware, per_device: float, source: str) -> Hardware:
    """``node`` whose workers update ``per_device`` parameters/s for each device, unless memory limits them."""
    sources = {**node.sources, "adam_per_core": source}
    return replace(node, adam_per_core=per_device / node.workers, sources=sources)


def with_unpinned_gradients(node: Hardware) -> Hardware:
    """``node`` whose gradients go down as DeepSpeed's ZeRO-3 sends them."""
    sources = {
        **node.sources,
        "link_to_host": "Deep Optimizer States, text to Table 1: flush through an unpinned temporary",
    }
    return replace(node, link_to_host=UNPINNED, sources=sources)


def with_devices(node: Hardware, devices: int) -> Hardware:
    """Return ``node`` with this many devices, each with its share of the cores; they share all of its memory."""
    return replace(node, devices=devices, cores=node.cores // node.devices * devices)


def with_cores(node: Hardware, cores: int) -> Hardware:
    """``node`` with ``cores`` for each device; all of them update, together at their share of the stated rate."""
    whole = node.cores // node.devices
    rate = node.adam_per_core * node.workers / whole
    return replace(node, cores=cores * node.devices, adam_per_core=rate)


V100 = stated(hardware("4xv100-32g"), V100_RATES, "Deep Optimizer States, rates of its V100 testbed")
H100 = stated(hardware("4xh100-80g"), H100_RATES, "Deep Optimizer States, rates of its H100 testbed")


def phases(
    name: str,
    node: Hardware,
    *,
    tokens: int = 2048,
    context: int = 2048,
    final_at_step: bool,
    recompute: bool = True,
    workers: int | None = None,
    **options: Any,
) -> Phases:
    """A simulated step of a policy whose windows are flushed in every step.

    Args:
        name: of a model. options: of the policy.
        tokens: per device, in sequences of ``context``.
        final_at_step: updates begin after the whole backward, as DeepSpeed's do.
        workers: threads per device; by default all its cores but two.
    """
    shape = replace(model(name), context=context)
    plan = make_plan(shape.params, Options(**options))
    recording = simulate(
        plan, node, shape, tokens=tokens, steps=1, final_at_step=final_at_step, recompute=recompute, workers=workers
    )
    (step,) = (event for event in recording.events if event.lane == STEP)
    events = [event for event in recording.events if event.step == step.step]
    backward = [event for event in events if (event.lane, event.kind) == (COMPUTE, "backward")]
    copies = [event for event in events if (event.lane, event.kind) == (D2H, "copy")]
    begin, end = backward[0].start_ns, max(event.end_ns for event in (*backward, *copies))
    return Phases(forward=(begin - step.start_ns) / _NS, backward=(end - begin) / _NS, update=(step.end_ns - end) / _NS)


def steady(
    name: str, node: Hardware, *, tokens: int = 2048, context: int = 2048, final_at_step: bool, **options: Any
) -> SteadyStep:
    """Means over a cycle of windows; arguments as of ``phases``, without recomputation."""
    shape = replace(model(name), context=context)
    plan = make_plan(shape.params, Options(**options))
    return steady_step(plan, node, shape, tokens=tokens, final_at_step=final_at_step)
