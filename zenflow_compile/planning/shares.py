"""What every policy does with a model, as shares of its parameters: equations of bytes and times follow from these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from sympy import Expr

from zenflow_compile.planning.formula import positive_symbols
from zenflow_compile.planning.plan import FP32_BYTES, STATE_TENSORS
from zenflow_compile.planning.policies import PlanningOptions

STATE_BYTES = STATE_TENSORS * FP32_BYTES
"""fp32 master, exp_avg and exp_avg_sq of a parameter."""

ratio, interleaved, topk_ratio, update_interval = positive_symbols("ratio interleaved topk_ratio update_interval")


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a device's parameters, as expressions of the policy's knobs.

    Attributes:
        offloaded: state is the host's, and the gradient goes there at every step.
        closing: updated on the host in one step, on average.
        streamed: state is the host's, and passes through the device, which updates it at every step.
        selected: state of selected or fixed lines on the device. resident: state of whole parameters there.
    """

    offloaded: Expr = sympy.S.Zero
    closing: Expr = sympy.S.Zero
    streamed: Expr = sympy.S.Zero
    selected: Expr = sympy.S.Zero
    resident: Expr = sympy.S.Zero

    @property
    def on_device(self) -> Expr:
        """Updated by the device in one step."""
        return self.streamed + self.selected + self.resident


_ALL = sympy.S.One
_OFFLOADED = Shares(offloaded=_ALL, closing=_ALL)
_HOSTED = ratio * (1 - interleaved)
_REST = (1 - topk_ratio) * (1 - interleaved)

SHARES: Mapping[str, Shares] = {
    "resident": Shares(resident=_ALL),
    "zero_offload": _OFFLOADED,
    "twinflow": Shares(offloaded=ratio, closing=ratio, resident=1 - ratio),
    "deep_optimizer_states": Shares(
        offloaded=_HOSTED, closing=_HOSTED, streamed=ratio * interleaved, resident=1 - ratio
    ),
    "zenflow": Shares(
        offloaded=_REST,
        closing=_REST / update_interval,
        streamed=interleaved,
        selected=topk_ratio * (1 - interleaved),
    ),
    "zero_infinity": _OFFLOADED,
}
"""By policy; ``interleaved`` is one over the stride, and zero without one. Small parameters, which stay on the device
under every policy, are left out: they are a thousandth of a large model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What of a policy's options its equations read; ranges as in ``Options``.

    Attributes:
        stride: every so many subgroups one is streamed through the device; None: none is.
        in_files: state of what is offloaded lives in files.
        final_at_step: gradients are final only after the whole backward.
        weight_bytes: of a weight and a gradient.
    """

    policy: str
    ratio: float = 1.0
    stride: int | None = None
    topk_ratio: float = 0.1
    update_interval: int = 4
    staleness: int = 0
    in_files: bool = False
    final_at_step: bool = False
    weight_bytes: int = 2

    @classmethod
    def of(cls, options: PlanningOptions, *, final_at_step: bool = False, weight_bytes: int = 2) -> Knobs:
        """The knobs of checked options."""
        return cls(
            policy=options.policy,
            ratio=options.ratio,
            stride=options.stride,
            topk_ratio=options.topk_ratio,
            update_interval=options.longest_window,
            staleness=options.staleness,
            in_files=options.policy == "zero_infinity" or options.offload_device == "nvme",
            final_at_step=final_at_step,
            weight_bytes=weight_bytes,
        )

    @property
    def windowed(self) -> bool:
        """Whether updates run beside later computation instead of in ``step()``."""
        return self.policy == "zenflow"

    def values(self) -> dict[str, float]:
        """By symbol."""
        return {
            "ratio": self.ratio,
            "interleaved": 0.0 if self.stride is None else 1.0 / self.stride,
            "topk_ratio": self.topk_ratio,
            "update_interval": self.update_interval if self.windowed else 1,
            "staleness": self.staleness if self.windowed else 0,
            "in_files": float(self.in_files or self.policy == "zero_infinity"),
            "weight_bytes": self.weight_bytes,
            "whole_state": STATE_BYTES - (FP32_BYTES if self.weight_bytes == 4 else 0),
        }
