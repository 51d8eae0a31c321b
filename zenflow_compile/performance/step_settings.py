"""The numbers of a plan that the equations of a step read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zenflow_compile.options.options import Options
from zenflow_compile.performance.memory import largest_staged_bytes
from zenflow_compile.performance.traffic import Traffic, traffic_of
from zenflow_compile.planning.model_blocks import repeated_blocks
from zenflow_compile.planning.plan import GRADIENT_RING, STREAM_BUFFERS, ParamPlan, Plan
from zenflow_compile.planning.planners import stride_weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """A plan and the options of its step; elements and bytes of all devices together.

    Attributes:
        numel: elements of all parameters; deferred: elements that the host updates.
        model_bytes: bytes of all weights.
        stride_weight_bytes: bytes of a weight that the stride is chosen for, see ``stride_weight_bytes``.
        prefetched: share of the streamed state that comes in while the backward runs.
        loaded_ahead: bytes of offloaded weights that can be on the device when a forward or a backward begins; the sum
            over micro-batches.
        copied_first: share of the gradients that is copied before the backward can end: the last ones fill a ring.
        update_interval: steps per host update.
        overlap: host updates run during later computation; False: in ``step()``, as those of blocking policies.
        final_at_step: gradients are final only after the whole backward.
        recompute: activations are computed again in the backward, which costs another forward.
        workers: threads of each device that update on the host; None: the hardware's.
    """

    policy: str
    traffic: Traffic
    numel: int
    deferred: int
    model_bytes: int
    stride_weight_bytes: int
    prefetched: float
    loaded_ahead: int
    copied_first: float
    update_interval: int
    staleness: int
    overlap: bool
    final_at_step: bool
    recompute: bool
    workers: int | None

    @classmethod
    def of(cls, options: Options, plan: Plan, *, final_at_step: bool = False, recompute: bool = False) -> StepSettings:
        """The settings of a plan of at least one parameter that was made with ``options``."""
        return cls(
            policy=options.policy,
            traffic=traffic_of(plan) or Traffic(),
            numel=sum(param.numel for param in plan.params),
            deferred=sum(param.deferred_numel for param in plan.params if param.offloaded),
            model_bytes=plan.model_bytes,
            stride_weight_bytes=stride_weight_bytes(plan.params),
            prefetched=_prefetched(plan),
            loaded_ahead=_loaded_ahead(plan),
            copied_first=_copied_first(plan.params),
            update_interval=options.longest_window,
            staleness=options.staleness,
            overlap=options.overlap_step,
            final_at_step=final_at_step,
            recompute=recompute,
            workers=options.workers,
        )

    @property
    def overlapped(self) -> bool:
        """Whether host updates run during later computation instead of in ``step()``."""
        return self.policy == "zenflow" and self.overlap

    @property
    def host_waits_for_backward(self) -> bool:
        """Whether only the next forward hides host updates. A step of staleness gives them a whole step again."""
        return self.overlapped and self.final_at_step and self.staleness == 0


def _prefetched(plan: Plan) -> float:
    sizes = [sum(param.numel for param in group) for group in plan.streamed_subgroups.values()]
    return _share(sum(sizes[:STREAM_BUFFERS]), sum(sizes))


def _loaded_ahead(plan: Plan) -> int:
    """The ring and the staging buffers hold weights before the first of them is used."""
    if plan.weights is None:
        return 0
    held = plan.weights.ring_bytes + plan.weights.staging_buffers * largest_staged_bytes(plan)
    return plan.micro_batches * held


def _copied_first(params: Sequence[ParamPlan]) -> float:
    """Pending gradients go down after the backward; so may the two largest blocks, whatever the order of blocks."""
    sent = [param.buffer_bytes if param.offloaded and not param.keeps_gradient else 0 for param in params]
    start, period, stop = repeated_blocks([param.shape for param in params]) or (0, 1, len(params))
    blocks = [range(start), *(range(first, first + period) for first in range(start, stop, period))]
    sizes = sorted(sum(sent[index] for index in block) for block in (*blocks, range(stop, len(params))))
    return _share(sum(sizes[:-GRADIENT_RING]), sum(param.buffer_bytes for param in params if param.offloaded))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
