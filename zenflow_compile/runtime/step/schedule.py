"""When windows close and selections move: functions of the step, the options and gradient values alone.

Values of the device decide at a fixed lag, when they have long crossed to the host (``readback.py``): norms one step
after they were computed, the drift of a selection one window after. Measured time has its say once, as the shortest
window that ``update_interval="auto"`` may choose (``time_bound.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import STATE_BYTES, ParamPlan
from zenflow_compile.runtime.checkpoint.format import NONE
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.transfer.readback import Readback
from zenflow_compile.timeline.events import AdaptiveWindows

RESELECT_BELOW = 0.8
"""A selection has drifted when a smaller share of its slices than this would be selected again."""
ENTRY_MARGIN = 0.25
"""A slice enters only if its score exceeds that of the slice it replaces by this share of it. Source of both numbers:
docs/convergence.md, "When to re-select": a third of the moved state and of the re-selections, for less than a point
of the gradient's norm."""

STATE_BUDGET = 0.01
"""Bytes of state that re-selections may move per step, both ways, as a share of the parameter's own."""

_SELECTED, _TOTAL, _LEAVING = range(3)


@dataclass(slots=True)
class AdaptiveWindow:
    """Zen-auto's bookkeeping of one parameter: is what waits as large as what is updated at once?

    Attributes:
        attempted: steps since the last close.
        waiting: sum over the window's steps of the RMS slice norm of the deferred gradient.
        selected: sum over the same steps of the RMS slice norm of the selected gradient; ``seen``: how many steps.
        latest: (selected, waiting) of the step before, not taken in yet.
    """

    attempted: int = 0
    waiting: float = 0.0
    selected: float = 0.0
    seen: int = 0
    latest: tuple[float, float] | None = None

    def take_latest(self) -> None:
        """Take in the values of the step before."""
        if self.latest is not None:
            selected, waiting = self.latest
            self.selected += selected
            self.waiting += waiting
            self.seen += 1
            self.latest = None

    def reached(self, auto_ratio: float) -> bool:
        """Whether the norm of what waits reaches ``auto_ratio`` times the average norm of what is selected."""
        return self.seen > 0 and self.waiting >= auto_ratio * self.selected / self.seen


def swaps_paid_for(plan: ParamPlan, steps: int) -> int:
    """Swaps of a slice of the device for one of the host, after ``steps`` steps without any: what the budget allows.

    ``DeviceState.better_lines`` divides them over the groups of slices.
    """
    bytes_per_swap = 2 * STATE_BYTES * plan.length
    return int(STATE_BUDGET * steps * plan.numel * plan.dtype.itemsize / bytes_per_swap)


class Schedule:
    """Decides closes and re-selections for all parameters of an engine.

    Attributes:
        shortest_window: least length, in steps, of windows that adapt; None until it is known, and they may be of any
            length then.
    """

    def __init__(self, options: Options, device: torch.device, recorder: Recorder) -> None:
        self._options = options
        self._adaptive = options.adaptive
        self._measured = self._adaptive and options.min_update_interval is None and options.longest_window > 1
        self.shortest_window = None if self._measured else options.min_update_interval or 1
        self._windows: dict[int, AdaptiveWindow] = {}
        self._leaving: dict[int, float] = {}
        self._units: dict[int, tuple[ParamPlan, float]] = {}
        self._readback = Readback(3, device, recorder)

    def make_room(self, params: int) -> None:
        """``params`` parameters are planned from here on; call it between steps."""
        self._arrive()
        self._readback.grow(params)

    def warming_up(self, step: int) -> bool:
        """Whether every window closes at ``step`` and is visible to the next forward: synchronous, exact AdamW."""
        return step < self._options.full_warm_up_rounds

    def flushes(self, plan: ParamPlan, device: DeviceState, step: int, *, present: bool, unscale: float) -> bool:
        """Whether the parameter's window closes with step ``step`` (from 0).

        Args:
            present: the parameter has a gradient in this step; ``unscale``: one over the loss scale of it.
        """
        self._arrive()
        if self.warming_up(step):
            return True
        if not self._adaptive:
            return step % plan.interval == plan.phase
        window = self.window(plan.index)
        window.attempted += 1
        window.take_latest()
        grown = window.attempted >= (self.shortest_window or 1) and window.reached(self._options.auto_ratio)
        if grown or window.attempted >= plan.interval:
            self._windows[plan.index] = AdaptiveWindow()
            return True
        if present and plan.selects:
            self._units[plan.index] = plan, unscale
            device.selected_norm(out=self._readback.cell(plan.index, _SELECTED))
            torch.sum(device.norms, 0, out=self._readback.cell(plan.index, _TOTAL))
        return False

    def selection(self, plan: ParamPlan, device: DeviceState, step: int) -> Tensor | None:
        """The slices to select from a close at ``step`` on, i32[k] on the device; None where the selection stays.

        The first close selects. Later ones do so after every interval that the user gave; under ``"auto"`` only if
        enough steps have passed and, at the close before, too small a share of the selected slices would have stayed.
        Then no more slices change sides than the steps since the last time have paid for.
        """
        if not plan.selects:
            return None
        if device.selected_at is None:
            return device.best_slices()
        waited = step - device.selected_at
        least = self._options.resolved_select_interval(plan.interval)
        if self._options.select_interval != "auto":
            return device.best_slices() if waited >= least else None
        kept = 1.0 - self._leaving.pop(plan.index, 0.0) / plan.k
        if waited >= least and kept < RESELECT_BELOW and (swaps := swaps_paid_for(plan, waited)):
            return device.better_slices(ENTRY_MARGIN, swaps, step)
        if waited + plan.interval >= least:  # the next close may re-select
            device.count_leaving(ENTRY_MARGIN, self._readback.cell(plan.index, _LEAVING))
        return None

    def continue_with(self, shortest_window: int | None) -> None:
        """Take over the shortest window of the run that goes on here, unless the options say it."""
        if self._measured:
            self.shortest_window = shortest_window

    def end_step(self) -> None:
        """The step is over: its values set off for the host."""
        self._arrive()
        self._readback.start()

    def restart_windows(self) -> None:
        """All windows are empty; call it between steps."""
        self._arrive()
        self._windows.clear()

    def window(self, index: int) -> AdaptiveWindow:
        """The adaptive bookkeeping of parameter ``index``."""
        return self._windows.setdefault(index, AdaptiveWindow())

    def state(self, index: int) -> list[float]:
        """What decides about parameter ``index``, between steps: the numbers of ``checkpoint_format.SCHEDULE``."""
        self._arrive()
        window = self._windows.get(index, AdaptiveWindow())
        latest = (NONE, NONE) if window.latest is None else window.latest
        leaving = self._leaving.get(index, NONE)
        return [window.attempted, window.seen, window.waiting, window.selected, *latest, leaving]

    def forget(self) -> None:
        """Drop all that was gathered: a state is about to be loaded."""
        self._readback.forget()
        self._windows.clear()
        self._leaving.clear()
        self._units.clear()

    def restore(self, index: int, state: Sequence[float]) -> None:
        """Put back what ``state`` returned."""
        attempted, seen, waiting, selected, *latest, leaving = state
        if self._adaptive:
            self._windows[index] = AdaptiveWindow(
                attempted=int(attempted),
                waiting=waiting,
                selected=selected,
                seen=int(seen),
                latest=None if latest[0] == NONE else (latest[0], latest[1]),
            )
        if leaving != NONE:
            self._leaving[index] = leaving

    @property
    def adaptive_windows(self) -> AdaptiveWindows | None:
        """Between which lengths windows adapt; None where they are of fixed length."""
        if not self._adaptive:
            return None
        return AdaptiveWindows(self.shortest_window, self._options.longest_window, self._measured)

    def _arrive(self) -> None:
        """Take over what the step before computed."""
        values = self._readback.take()
        for (index, column), value in values.items():
            if column == _LEAVING:
                self._leaving[index] = value
            elif column == _SELECTED:
                plan, unscale = self._units.pop(index)
                remaining = max(values[index, _TOTAL] - value, 0.0)
                self.window(index).latest = (
                    unscale * (value / plan.k) ** 0.5,
                    unscale * (remaining / plan.deferred) ** 0.5,
                )
