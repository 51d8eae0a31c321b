"""Predicts one policy on given hardware: memory, time of a step, and traffic."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from zenflow_compile.options.options import Options
from zenflow_compile.options.unread import unread
from zenflow_compile.performance.memory import Needs, largest_staged_bytes, needs_of
from zenflow_compile.performance.traffic import Traffic, traffic_of
from zenflow_compile.planning.offloaded_weights import weight_budget
from zenflow_compile.planning.plan import UPLOAD_RING, Plan
from zenflow_compile.planning.planners import make_plan
from zenflow_compile.planning.weight_memory import (
    FEWEST_STAGING_BUFFERS,
    WeightMemory,
    divide_budget,
    offloadable_weights,
    reloaded_weights,
)
from zenflow_compile.prediction.scenario import Scenario
from zenflow_compile.simulator.simulate import SteadyStep, steady_step

_S_PER_HOUR = 3600.0

ROUNDED = "with rounded moments"
"""The departure from AdamW that every weight may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForecast:
    """Weights in host memory, and what crosses the link for them.

    Attributes:
        kept, offloaded: number of weights that stay on the device, and of those that are loaded around their uses.
        offloaded_bytes: of the latter; ring_bytes: device memory for those of them that are loaded.
        micro_batches: forwards and backwards of a step.
        micro_batch_bytes: to the device, in one forward and its backward.
        to_device, to_host: bytes per step; the second are those of weights that the device has updated.
    """

    kept: int
    offloaded: int
    offloaded_bytes: int
    ring_bytes: int
    micro_batches: int
    micro_batch_bytes: int
    to_device: float
    to_host: float

    @property
    def sentence(self) -> str:
        """How often weights cross, and how many bytes."""
        if not self.offloaded:
            return "All weights fit the budget of offload_weights, and stay on the device."
        several = " Weights cross once per micro-batch: fewer and larger ones move less."
        return (
            f"{self.offloaded} weights of {self.offloaded_bytes / 1e9:.1f} GB are loaded in each forward, and again in "
            f"its backward: {self.micro_batch_bytes / 1e9:.1f} GB cross to the device per micro-batch, "
            f"{self.to_device / 1e9:.1f} GB per step.{several if self.micro_batches > 1 else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted numbers of one policy with its options.

    Attributes:
        label: the policy, and the name of a mixture; ``title`` adds the numbers that were chosen for it.
        options: the policy, and the options that it reads and that are not at their defaults: the block to paste.
        needs: bytes by item; shortages: missing bytes by memory; empty if the policy fits.
        step_s, stall_s: a step, and the time in it that the device waits, in seconds.
        host_update_s: seconds per step in which the host's workers update, all at the same time. The summary of a
            recording adds up the workers.
        traffic: gradients and new weights over the link per step, in model sizes; state: streamed state, likewise.
        loads: offloaded weights over the link, likewise; weights: what ``offload_weights`` does, None without it.
        disk_bytes: read and written per step by the node.
        tokens_per_s: of all devices. hours: for an epoch; None if its length was not given.
    """

    label: str
    policy: str
    options: dict[str, Any]
    needs: Needs
    shortages: dict[str, int]
    step_s: float
    stall_s: float
    host_update_s: float
    traffic: float
    state: float
    loads: float
    weights: WeightForecast | None
    disk_bytes: float
    tokens_per_s: float
    hours: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with ``fits``."""
        return {"fits": self.fits} | asdict(self)

    @property
    def fits(self) -> bool:
        """Whether every memory is large enough."""
        return not self.shortages

    @property
    def missing_bytes(self) -> int:
        """Missing bytes of all memories. If no policy fits, the forecast with the fewest comes nearest."""
        return sum(self.shortages.values())

    @property
    def device_bytes(self) -> int:
        """Memory that a device needs."""
        return sum(self.needs.device.values())

    @property
    def host_bytes(self) -> int:
        """Memory that the node needs."""
        return sum(self.needs.host.values())

    @property
    def moves(self) -> float:
        """All that crosses the link per step, in model sizes."""
        return self.traffic + self.state + self.loads

    @property
    def exact(self) -> bool:
        """Whether the numbers are those of AdamW, to rounding."""
        return not self.departures

    @property
    def departures(self) -> dict[str, str]:
        """How the numbers differ from AdamW's, each with the option that makes them equal; empty if they do not."""
        options = Options.from_keywords(**self.options)
        return departures(options) if self.traffic else _rounding(options)

    @property
    def title(self) -> str:
        """The label with ``ratio``, ``update_stride`` and spare GB, where not the default: ``twinflow 0.5``."""
        settings = []
        if self.policy in ("twinflow", "deep_optimizer_states") and "ratio" in self.options:
            settings.append(f"{self.options['ratio']:g}")
        if self.policy in ("zenflow", "deep_optimizer_states") and "update_stride" in self.options:
            settings.append(str(self.options["update_stride"]) if self.state else "none")
        if self.policy == "zenflow" and "spare_device_bytes" in self.options:
            settings.append(f"{self.options['spare_device_bytes'] / 1e9:.3g} GB")
        return " ".join([self.label, ", ".join(settings)]).rstrip()


def departures(options: Options) -> dict[str, str]:
    """How deferred columns differ from AdamW's, each with the option that makes them equal; empty if they do not."""
    if options.policy != "zenflow":
        return _rounding(options)
    most = "up to " if options.update_interval == "auto" else ""
    window = f"once per update window of {most}{options.longest_window} steps"
    found = (
        (options.longest_window > 1, window, "update_interval=1"),
        (options.staleness > 0, "a step late", "staleness=0"),
        (options.gradient_compression is not None, "by rounded gradients", "gradient_compression=None"),
    )
    return {how: remedy for departs, how, remedy in found if departs} | _rounding(options)


def _rounding(options: Options) -> dict[str, str]:
    return {} if options.state_dtype == "fp32" else {ROUNDED: 'state_dtype="fp32"'}


def node_plan(options: Options, scenario: Scenario) -> Plan:
    """The plan of all devices together: each of them has ``spare_device_bytes`` for its share.

    Raises:
        ValueError: ``offload_weights`` has no space for the weights that must be on the device at a time.
    """
    spare = options.spare_device_bytes * scenario.hardware.devices
    plan = make_plan(scenario.model.params, replace(options, spare_device_bytes=spare))
    weights = _weight_memory(plan, options, scenario)
    return replace(plan, weights=weights, micro_batches=micro_batches(options))


def micro_batches(options: Options) -> int:
    """Backwards of a step: one, unless their number is given."""
    return options.gradient_accumulation_steps or 1


def _weight_memory(plan: Plan, options: Options, scenario: Scenario) -> WeightMemory | None:
    if options.offload_weights is False:
        return None
    shapes = [param.shape for param in plan.params]
    sizes = offloadable_weights(shapes, [param.weight_bytes for param in plan.params])
    named = {plan.params[index].name: size for index, size in sizes.items()}
    budget = weight_budget(options.offload_weights, named)
    offloaded, ring = divide_budget(budget, shapes, sizes)
    reloaded = reloaded_weights(shapes, sizes, offloaded, ring) if scenario.recompute else frozenset[int]()
    weights = WeightMemory(offloaded=offloaded, reloaded=reloaded, ring_bytes=ring, staging_buffers=UPLOAD_RING)
    largest = largest_staged_bytes(replace(plan, weights=weights))
    if options.staging_bytes is None or not largest:
        return weights
    return replace(weights, staging_buffers=max(FEWEST_STAGING_BUFFERS, options.staging_bytes // largest))


def needs(options: Options, scenario: Scenario) -> Needs:
    """The memory that a run with ``options`` takes."""
    return _needs(node_plan(options, scenario), options, scenario)


def _needs(plan: Plan, options: Options, scenario: Scenario) -> Needs:
    return needs_of(
        plan,
        scenario.model,
        devices=scenario.hardware.devices,
        tokens=scenario.tokens,
        recompute=scenario.recompute,
        staging_bytes=options.staging_bytes,
    )


def forecast(options: Options, scenario: Scenario, *, label: str | None = None) -> Forecast:
    """Predict a run with ``options`` instead of those of the scenario.

    Args:
        options: with ``update_stride`` resolved, see ``auto_policy.resolve_stride``.
        label: None takes the policy.

    Raises:
        ValueError: the hardware lacks a number that the policy needs, or has fewer cores than ``options.workers``.
    """
    hardware, plan = scenario.hardware, node_plan(options, scenario)
    step = steady_step(
        plan,
        hardware,
        scenario.model,
        tokens=scenario.tokens,
        final_at_step=scenario.final_at_step(options),
        recompute=scenario.recompute,
        workers=options.workers,
    )
    needed = _needs(plan, options, scenario)
    size = plan.model_bytes / hardware.devices or 1.0
    tokens = scenario.tokens * hardware.devices
    rate = tokens / step.seconds if step.seconds else math.inf  # a model without elements takes no time
    return Forecast(
        label=label or options.policy,
        policy=options.policy,
        options=changed(options),
        needs=needed,
        shortages=needed.shortages(hardware),
        step_s=step.seconds,
        stall_s=step.stall,
        host_update_s=step.host_update,
        traffic=(step.to_host + step.to_device) / size,
        state=step.state / size,
        loads=(step.loads + step.written_back) / size,
        weights=_weights(plan, step),
        disk_bytes=step.disk * hardware.devices,
        tokens_per_s=rate,
        hours=None if scenario.epoch_tokens is None else scenario.epoch_tokens / rate / _S_PER_HOUR,
    )


def _weights(plan: Plan, step: SteadyStep) -> WeightForecast | None:
    if plan.weights is None:
        return None
    moved = traffic_of(plan) or Traffic()
    offloaded = len(plan.weights.offloaded)
    return WeightForecast(
        kept=len(plan.params) - offloaded,
        offloaded=offloaded,
        offloaded_bytes=plan.offloaded_weight_bytes,
        ring_bytes=plan.weights.ring_bytes,
        micro_batches=plan.micro_batches,
        micro_batch_bytes=(moved.forward_loads + moved.backward_loads) // plan.micro_batches,
        to_device=step.loads,
        to_host=step.written_back,
    )


def changed(options: Options) -> dict[str, Any]:
    """The policy, and every option that it reads and that is not at its default."""
    values = {each.name: getattr(options, each.name) for each in fields(Options)}
    defaults = {each.name: each.default for each in fields(Options)}
    left_out = {name for name, value in values.items() if value == defaults[name]} | set(unread(options))
    return {name: value for name, value in values.items() if name == "policy" or name not in left_out}
