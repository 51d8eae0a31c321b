"""What a policy would do on given hardware: whether it fits, how long a step takes, what it moves."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from zenflow_compile.options.options import Options
from zenflow_compile.options.unread import unread
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.memory import Needs, needs_of
from zenflow_compile.performance.models import ModelShape
from zenflow_compile.planning.plan import Plan
from zenflow_compile.planning.planners import make_plan
from zenflow_compile.simulator.simulate import steady_step

_S_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted numbers of one policy with its knobs.

    Attributes:
        label: the policy, and what is mixed in; ``title`` adds the numbers that were chosen for it.
        options: the policy, and what it reads and differs from the defaults: the block to paste.
        needs: bytes by item; shortages: bytes that are missing, by memory; empty where it fits.
        step_s, stall_s: a step, and the time in it that the device waits, in seconds.
        host_update_s: seconds per step in which the host's workers update. They work together and count once: the
            summary of a recording, which adds up its workers, has as many times that as there are workers.
        traffic: gradients and weights that cross per step, in model sizes; state: likewise what is streamed.
        disk_bytes: read and written per step by the node.
        tokens_per_s: of all devices. hours: for an epoch; None where its length was not given.
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
        """What all memories together lack. Where nothing fits, the forecast that lacks least comes nearest."""
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


def node_plan(options: Options, hardware: Hardware, model: ModelShape) -> Plan:
    """The plan of all devices together: ``spare_device_bytes`` is what each of them spares for its share."""
    spare = options.spare_device_bytes * hardware.devices
    return make_plan(model.params, replace(options, spare_device_bytes=spare))


def forecast(
    options: Options,
    hardware: Hardware,
    model: ModelShape,
    *,
    tokens: int,
    recompute: bool = False,
    implicit: bool = False,
    epoch_tokens: float | None = None,
    label: str | None = None,
) -> Forecast:
    """Predict a run.

    Args:
        options: with ``update_stride`` resolved, see ``auto.resolve_stride``.
        tokens: per device and step.
        recompute: activations are computed again in the backward.
        implicit: updates run in the backward, as they do without an optimizer object; not where something is clipped.
        epoch_tokens: of an epoch, over all devices.
        label: what to call it; None takes the policy.

    Raises:
        ValueError: ``hardware`` lacks a number that the policy needs, or has fewer cores than ``options.workers``.
    """
    plan = node_plan(options, hardware, model)
    step = steady_step(
        plan,
        hardware,
        model,
        tokens=tokens,
        final_at_step=final_at_step(options, implicit=implicit),
        overlap=options.overlap_step,
        recompute=recompute,
        workers=options.workers,
    )
    needs = needs_of(
        plan,
        model,
        devices=hardware.devices,
        tokens=tokens,
        recompute=recompute,
        staging_bytes=options.staging_bytes,
    )
    size = sum(param.numel * param.dtype.itemsize for param in plan.params) / hardware.devices or 1.0
    rate = tokens * hardware.devices / step.seconds if step.seconds else math.inf  # nothing to do without an element
    return Forecast(
        label=label or options.policy,
        policy=options.policy,
        options=changed(options),
        needs=needs,
        shortages=needs.shortages(hardware),
        step_s=step.seconds,
        stall_s=step.stall,
        host_update_s=step.host_update,
        traffic=(step.to_host + step.to_device) / size,
        state=step.state / size,
        disk_bytes=step.disk * hardware.devices,
        tokens_per_s=rate,
        hours=None if epoch_tokens is None else epoch_tokens / rate / _S_PER_HOUR,
    )


def final_at_step(options: Options, *, implicit: bool) -> bool:
    """Whether gradients are final only after the whole backward: for an optimizer object, and for a global norm."""
    return not implicit or options.max_grad_norm is not None


def changed(options: Options) -> dict[str, Any]:
    """The policy, and every option that it reads and that is not at its default."""
    values = {each.name: getattr(options, each.name) for each in fields(Options)}
    defaults = {each.name: each.default for each in fields(Options)}
    left_out = {name for name, value in values.items() if value == defaults[name]} | set(unread(options))
    return {name: value for name, value in values.items() if name == "policy" or name not in left_out}
