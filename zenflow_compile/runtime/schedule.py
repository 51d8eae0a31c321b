"""When windows close and selections move: functions of the attempted step, the options and gradient values alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow_compile.options import Options
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.columns import DeviceSide


@dataclass(slots=True)
class AdaptiveWindow:
    """Zen-auto's bookkeeping of one parameter: is what waits as large as what is updated at once?

    Values enter one step late, when they have long been computed, so that reading them waits for nothing.

    Attributes:
        attempted: steps since the last close.
        waiting: sum over the window's steps of the RMS line norm of the remaining gradient.
        selected: sum over the same steps of the RMS line norm of the selected gradient; ``seen``: how many steps.
        latest: f32[2], (selected, remaining) of the step before, not taken in yet.
    """

    attempted: int = 0
    waiting: float = 0.0
    selected: float = 0.0
    seen: int = 0
    latest: Tensor | None = None

    def take_latest(self) -> None:
        """Take in the values of the step before."""
        if self.latest is not None:
            selected, waiting = self.latest.tolist()
            self.selected += selected
            self.waiting += waiting
            self.seen += 1
            self.latest = None

    def reached(self, auto_ratio: float) -> bool:
        """Whether the norm of what waits reaches ``auto_ratio`` times the average norm of what is selected."""
        return self.seen > 0 and self.waiting >= auto_ratio * self.selected / self.seen


class Schedule:
    """Decides closes and re-selections for all parameters of an engine."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._adaptive = options.policy == "zenflow" and options.update_interval == "auto"
        self._windows: dict[int, AdaptiveWindow] = {}

    def warming_up(self, step: int) -> bool:
        """Whether every window closes at ``step`` and is visible to the next forward: synchronous, exact AdamW."""
        return step < self._options.full_warm_up_rounds

    def closes(self, plan: ParamPlan, device: DeviceSide, step: int, *, present: bool, unscale: float) -> bool:
        """Whether the parameter's window closes with attempted step ``step`` (from 0).

        Args:
            present: the step is not void for the parameter; ``unscale``: one over its loss scale.
        """
        if self.warming_up(step):
            return True
        if not self._adaptive:
            return step % plan.interval == plan.phase
        window = self.window(plan.index)
        window.attempted += 1
        window.take_latest()
        if window.reached(self._options.auto_ratio) or window.attempted >= plan.interval:
            self._windows[plan.index] = AdaptiveWindow()
            return True
        if present and plan.k and plan.rest:
            window.latest = _line_norms(plan, device) * unscale
        return False

    def reselects(self, plan: ParamPlan, device: DeviceSide, step: int) -> bool:
        """Whether a close at ``step`` also re-selects: the first one does, then the first after every interval."""
        if device.selected_at is None:
            return True
        return step - device.selected_at >= self._options.resolved_select_interval(plan.interval)

    def window(self, index: int) -> AdaptiveWindow:
        """The adaptive bookkeeping of parameter ``index``."""
        return self._windows.setdefault(index, AdaptiveWindow())

    def restore(self, index: int, window: AdaptiveWindow) -> None:
        """Put back what a checkpoint kept."""
        self._windows[index] = window

    @property
    def adaptive(self) -> bool:
        """Whether windows adapt to gradient values."""
        return self._adaptive


def _line_norms(plan: ParamPlan, device: DeviceSide) -> Tensor:
    selected = device.norms.index_select(0, device.selection.selected).sum()
    remaining = device.norms.sum() - selected
    return torch.stack([selected / plan.k, remaining.clamp_min(0) / plan.rest]).sqrt()
