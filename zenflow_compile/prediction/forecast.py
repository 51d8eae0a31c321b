"""Predicts one policy on given hardware: memory, time of a step, and traffic."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from zenflow_compile.options.options import Options
from zenflow_compile.options.unread import unread
from zenflow_compile.performance.memory import Needs, needs_of
from zenflow_compile.planning.plan import Plan
from zenflow_compile.planning.planners import make_plan
from zenflow_compile.prediction.scenario import Scenario
from zenflow_compile.simulator.simulate import steady_step

_S_PER_HOUR = 3600.0


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
        traffic: gradients and weights over the link per step, in model sizes; state: streamed state, likewise.
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


def node_plan(options: Options, scenario: Scenario) -> Plan:
    """The plan of all devices together: each of them has ``spare_device_bytes`` for its share."""
    spare = options.spare_device_bytes * scenario.hardware.devices
    return make_plan(scenario.model.params, replace(options, spare_device_bytes=spare))


def needs(options: Options, scenario: Scenario) -> Needs:
    """The memory that a run with ``options`` takes."""
    return needs_of(
        node_plan(options, scenario),
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
    needed = needs(options, scenario)
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
        disk_bytes=step.disk * hardware.devices,
        tokens_per_s=rate,
        hours=None if scenario.epoch_tokens is None else scenario.epoch_tokens / rate / _S_PER_HOUR,
    )


def changed(options: Options) -> dict[str, Any]:
    """The policy, and every option that it reads and that is not at its default."""
    values = {each.name: getattr(options, each.name) for each in fields(Options)}
    defaults = {each.name: each.default for each in fields(Options)}
    left_out = {name for name, value in values.items() if value == defaults[name]} | set(unread(options))
    return {name: value for name, value in values.items() if name == "policy" or name not in left_out}
