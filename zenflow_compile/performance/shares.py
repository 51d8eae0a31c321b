"""What a policy does with a model, as shares of its parameters: equations of bytes and times follow from these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from sympy import Expr, S

from zenflow_compile.performance.formula import evaluated, positive_symbols
from zenflow_compile.planning.plan import FP32_BYTES, GRADIENT_RING, STATE_BYTES, STREAM_BUFFERS, ParamPlan, Plan
from zenflow_compile.planning.planners import PlanningOptions, repeated_blocks, stride_weight_bytes

ratio, interleaved, topk_ratio = positive_symbols("ratio interleaved topk_ratio")


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a large model's parameters, as expressions of the policy's knobs.

    Attributes:
        offloaded: state is the host's, which updates it once per window, and the gradient goes there.
        streamed: state is the host's, and passes through the device, which updates it at every step.
        selected: state of selected or fixed lines on the device. resident: state of whole parameters there.
    """

    offloaded: Expr = S.Zero
    streamed: Expr = S.Zero
    selected: Expr = S.Zero
    resident: Expr = S.Zero


_HOSTED = ratio * (1 - interleaved)

SHARES: Mapping[str, Shares] = {
    "resident": Shares(resident=S.One),
    "zero_offload": Shares(offloaded=S.One),
    "twinflow": Shares(offloaded=ratio, resident=1 - ratio),
    "deep_optimizer_states": Shares(offloaded=_HOSTED, streamed=ratio * interleaved, resident=1 - ratio),
    "zenflow": Shares(
        offloaded=(1 - topk_ratio) * (1 - interleaved),
        streamed=interleaved,
        selected=topk_ratio * (1 - interleaved),
    ),
    "zero_infinity": Shares(offloaded=S.One),
}
"""By policy; ``streamed`` is one over the stride, and zero without one. Small parameters, and those that ``zenflow``
keeps whole, are left out: a plan's own shares have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShares:
    """A plan's own numbers, all per element; shares as in ``Shares``.

    Attributes:
        in_files: of what is offloaded, the share whose state lives in files.
        kept_in_window: of that, the share that stays in the window of files until it is needed again.
        prefetched: of what is streamed, the share whose state comes in while the backward runs.
        copied_first: share of the gradients that are copied before the backward can end: the last ones fill a ring.
        buffer_bytes: of a gradient as it goes to the host, per offloaded element.
        summed: of these bytes, the share that goes once per window instead of at every step.
        slots: gradients of that size that the host keeps.
        held_bytes: what the device keeps of an offloaded element's gradients beyond the step.
        stride_weight_bytes: of a weight that the stride is chosen for; see ``policies``.
    """

    offloaded: float
    streamed: float
    selected: float
    resident: float
    in_files: float
    kept_in_window: float
    prefetched: float
    copied_first: float
    buffer_bytes: float
    summed: float
    slots: float
    held_bytes: float
    stride_weight_bytes: float

    @classmethod
    def of(cls, plan: Plan) -> PlanShares:
        """The shares of a plan of at least one parameter."""
        total = sum(param.numel for param in plan.params)
        split = [param for param in plan.params if param.offloaded]
        rest = sum(param.deferred * param.length for param in split)
        selected = sum(param.k * param.length for param in split)
        streamed = sum(param.numel for param in plan.params if param.streamed)
        buffer_bytes = sum(param.buffer_bytes for param in split)
        held = sum(param.device_bytes - param.k * param.length * STATE_BYTES for param in split)
        return cls(
            offloaded=rest / total,
            streamed=streamed / total,
            selected=selected / total,
            resident=(total - rest - selected - streamed) / total,
            in_files=_over(plan.file_bytes, rest * STATE_BYTES),
            kept_in_window=_over(plan.file_window_bytes, plan.file_bytes),
            prefetched=_prefetched(plan.params),
            copied_first=_copied_first(plan.params),
            buffer_bytes=_over(buffer_bytes, rest),
            summed=_over(sum(param.buffer_bytes for param in split if param.summed), buffer_bytes),
            slots=_over(sum(param.gradient_buffers * param.buffer_bytes for param in split), buffer_bytes),
            held_bytes=_over(held, rest),
            stride_weight_bytes=stride_weight_bytes(plan.params),
        )


def _prefetched(params: Sequence[ParamPlan]) -> float:
    sizes: dict[int | None, int] = {}
    for param in params:
        if param.streamed:
            sizes[param.subgroup] = sizes.get(param.subgroup, 0) + param.numel
    return _over(sum(list(sizes.values())[:STREAM_BUFFERS]), sum(sizes.values()))


def _copied_first(params: Sequence[ParamPlan]) -> float:
    """What is held goes down after the backward; so may the two largest blocks, in whatever order blocks come."""
    sent = [param.buffer_bytes if param.offloaded and not param.keeps_gradient else 0 for param in params]
    start, period, stop = repeated_blocks([param.shape for param in params]) or (0, 1, len(params))
    blocks = [range(start), *(range(first, first + period) for first in range(start, stop, period))]
    sizes = sorted(sum(sent[index] for index in block) for block in (*blocks, range(stop, len(params))))
    return _over(sum(sizes[:-GRADIENT_RING]), sum(param.buffer_bytes for param in params if param.offloaded))


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What of a policy's options its equations read; ranges as in ``Options``.

    Attributes:
        stride: every so many subgroups one is streamed through the device; None: none is.
        in_files: state of what is offloaded lives in files.
        final_at_step: gradients are final only after the whole backward.
        overlap: windows are updated beside later computation; False: in ``step()``, as the blocking policies' are.
        recompute: activations are computed again in the backward, which costs another forward.
        workers: threads of each device that update on the host; None: the hardware's.
        weight_bytes: of a weight and a gradient.
        plan: its own shares, instead of those that ``ratio``, ``stride``, ``topk_ratio`` and ``in_files`` have in a
            large model.
    """

    policy: str
    ratio: float = 1.0
    stride: int | None = None
    topk_ratio: float = 0.1
    update_interval: int = 4
    staleness: int = 0
    in_files: bool = False
    final_at_step: bool = False
    overlap: bool = True
    recompute: bool = False
    workers: int | None = None
    weight_bytes: float = 2
    plan: PlanShares | None = None

    @classmethod
    def of(
        cls,
        options: PlanningOptions,
        plan: Plan | None = None,
        *,
        final_at_step: bool = False,
        recompute: bool = False,
        workers: int | None = None,
        weight_bytes: float = 2,
    ) -> Knobs:
        """The knobs of checked options.

        Args:
            plan: made with these options; its dtypes count, and ``weight_bytes`` does not.
        """
        if plan is not None:
            size = sum(param.numel * param.dtype.itemsize for param in plan.params)
            weight_bytes = size / sum(param.numel for param in plan.params)
        return cls(
            policy=options.policy,
            ratio=options.ratio,
            stride=options.stride,
            topk_ratio=options.topk_ratio,
            update_interval=options.longest_window,
            staleness=options.staleness,
            in_files=options.policy == "zero_infinity" or options.offload_device == "nvme",
            final_at_step=final_at_step,
            overlap=options.overlap_step,
            recompute=recompute,
            workers=workers,
            weight_bytes=weight_bytes,
            plan=None if plan is None else PlanShares.of(plan),
        )

    @property
    def windowed(self) -> bool:
        """Whether updates run beside later computation instead of in ``step()``."""
        return self.policy == "zenflow" and self.overlap

    @property
    def window(self) -> int:
        """Steps per host update."""
        return self.update_interval if self.policy == "zenflow" else 1

    def values(self) -> dict[str, float]:
        """By symbol."""
        shares = self._large_model() if self.plan is None else self.plan
        return {
            **{each.name: float(getattr(shares, each.name)) for each in fields(PlanShares)},
            "update_interval": self.window,
            "uploads_kept": 1 + (self.staleness if self.policy == "zenflow" else 0),
            "weight_bytes": self.weight_bytes,
            "whole_state": STATE_BYTES - (FP32_BYTES if self.weight_bytes == FP32_BYTES else 0),
        }

    def _large_model(self) -> PlanShares:
        knobs = {
            "ratio": self.ratio,
            "interleaved": 0.0 if self.stride is None else 1.0 / self.stride,
            "topk_ratio": self.topk_ratio,
        }
        shares = SHARES[self.policy]
        return PlanShares(
            **{each.name: evaluated(getattr(shares, each.name), knobs) for each in fields(Shares)},
            in_files=float(self.in_files or self.policy == "zero_infinity"),
            kept_in_window=0.0,
            prefetched=0.0,
            copied_first=1.0,
            buffer_bytes=self.weight_bytes,
            summed=0.0,
            slots=self.window + (self.staleness if self.policy == "zenflow" else 0),
            held_bytes=0.0,
            stride_weight_bytes=self.weight_bytes,
        )
