"""Decides when update windows are flushed and selections change, from the step, the options and gradient values alone.

Values of the device are used at a fixed lag, when their copy to the host is long done (``device/readback.py``): norms
two steps after they were computed, the drift of a selection one update window after, and at least two steps. The lag is
the same on every device. Measured time is used one time, for the shortest window that ``update_interval="auto"`` may
choose (``features/measured_window``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import FP32_BYTES, ParamPlan
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device.readback import LAG, Readback, Reading
from zenflow_compile.runtime.device_updates.selection import Selection, Wanted
from zenflow_compile.runtime.parameters.device_state import DeviceState, count_leaving
from zenflow_compile.runtime.ranks.rank_group import RankGroup
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline import AdaptiveWindows

RESELECT_BELOW = 0.8
"""A selection has drifted when a smaller share of its slices than this would be selected again."""
ENTRY_MARGIN = 0.25
"""A slice enters only if its score exceeds that of the slice it replaces by this share of it. Both numbers come from
docs/convergence.md, "When to re-select": a third of the moved state and of the re-selections, for less than a point of
the gradient's norm."""

STATE_BUDGET = 0.01
"""Bytes of state that re-selections may move per step, in both directions, as a share of the parameter's own bytes."""

_SELECTED, _TOTAL, _LEAVING = range(3)  # columns of the readback table


@dataclass(slots=True)
class AdaptiveWindow:
    """Zen-auto's values of one parameter: is the deferred gradient as large as the selected one?

    Attributes:
        steps: since the last flush.
        deferred, selected: sums over the update window's known steps of the gradients' RMS slice norms.
        known: number of those steps.
        latest: (selected, deferred) of the step before last, not added yet.
    """

    steps: int = 0
    deferred: float = 0.0
    selected: float = 0.0
    known: int = 0
    latest: tuple[float, float] | None = None

    def reached(self, auto_ratio: float) -> bool:
        """Whether the deferred norm reaches ``auto_ratio`` times the average selected norm."""
        return self.known > 0 and self.deferred >= auto_ratio * self.selected / self.known


class _Norms(NamedTuple):
    """RMS slice norms of one gradient, and the update window that it joined."""

    window: AdaptiveWindow
    selected: float
    deferred: float


class _Values(NamedTuple):
    """What the device has computed in one step: norms, and numbers of selected slices that would leave."""

    norms: dict[int, _Norms]
    leaving: dict[int, float]


class _Joined(NamedTuple):
    """A gradient that joined an adaptive update window in this step; ``unscale`` is one over its loss scale."""

    plan: ParamPlan
    unscale: Number
    window: AdaptiveWindow


@dataclass(slots=True)
class _Coming:
    """The values of one step, on their way to the host; ``reading`` is None if they have arrived."""

    joined: dict[int, _Joined] = field(default_factory=dict)
    reading: Reading | None = None
    values: _Values = field(default_factory=lambda: _Values({}, {}))

    def arrived(self) -> _Values:
        if self.reading is not None:
            cells, self.reading = self.reading.values(), None
            unscales = {each: float(each) for each in {joined.unscale for joined in self.joined.values()}}
            for (index, column), value in cells.items():
                if column == _LEAVING:
                    self.values.leaving[index] = value
                elif column == _SELECTED:
                    joined = self.joined[index]
                    plan, unscale, window = joined.plan.whole, unscales[joined.unscale], joined.window
                    deferred = max(cells[index, _TOTAL] - value, 0.0)  # rounding may make the difference negative
                    self.values.norms[index] = _Norms(
                        window, unscale * (value / plan.k) ** 0.5, unscale * (deferred / plan.deferred) ** 0.5
                    )
        return self.values


class Schedule:
    """Decides flushes and re-selections for all parameters of an engine.

    Attributes:
        measured: whether the least length of update windows is measured, as of ``update_interval="auto"``.
        shortest_window: least length, in steps, of adaptive update windows. None until it is measured: any length.
    """

    def __init__(
        self, options: Options, device: torch.device, recorder: Recorder, ranks: RankGroup | None = None
    ) -> None:
        self._options = options
        self.adaptive = options.adaptive
        shortest, longest = options.window_bounds if self.adaptive else (1, 1)
        self.measured = shortest is None and longest > 1
        self.shortest_window = None if self.measured else shortest or 1
        self._windows: dict[int, AdaptiveWindow] = {}
        self._leaving: dict[int, float] = {}  # selected slices that would leave, by parameter
        self._drifts: dict[int, tuple[DeviceState, Selection]] = {}  # counted at the end of the step
        self._least_steps: dict[int, int] = {}  # between re-selections, by the plan's interval
        self._joined: dict[int, _Joined] = {}
        self._coming: deque[_Coming] = deque()  # of the last steps, oldest first; at most ``LAG``
        self._readback = Readback(3, device_of(device), recorder, ranks)
        self._first_rank = ranks is None or ranks.message_rank == 0

    def make_room(self, params: int) -> None:
        """Serve ``params`` parameters from here on. Call it between steps."""
        self._readback.grow(params)

    def list_memory(self, found: MemoryList) -> None:
        """Call it between steps."""
        self._readback.list_memory(found)
        for coming in self._coming:
            found.numbers(each.unscale for each in coming.joined.values())

    def warming_up(self, step: int) -> bool:
        """Whether each update window is flushed at ``step`` and applied before the next forward, as in exact AdamW."""
        return step < self._options.full_warm_up_rounds

    def begin_step(self, step: int) -> bool:
        """Take the values of the step before last. Returns whether ``step`` warms up."""
        self._take_values()
        return self.warming_up(step)

    def due(self, params: Sequence[tuple[ParamPlan, DeviceState, Number | None]], step: int) -> list[bool]:
        """Return for each parameter whether its update window is flushed after step ``step`` (from 0).

        A window of a fixed length is flushed at the plan's phase.

        Args:
            params: with one over the loss scale of the parameter's gradient; None: it has no gradient in this step.
        """
        if self.warming_up(step):
            return [True] * len(params)
        if self.adaptive:
            self._take_values()
            return [self._ends(plan, device, unscale) for plan, device, unscale in params]
        return [step % plan.interval == plan.phase for plan, _, _ in params]

    def _ends(self, plan: ParamPlan, device: DeviceState, unscale: Number | None) -> bool:
        """Return whether an adaptive update window ends; else have its norms read, if it has a gradient."""
        window = self.window(plan.index)
        window.steps += 1
        if window.latest is not None:
            selected_norm, deferred_norm = window.latest
            window.selected += selected_norm
            window.deferred += deferred_norm
            window.known += 1
            window.latest = None
        grown = window.steps >= (self.shortest_window or 1) and window.reached(self._options.auto_ratio)
        if grown or window.steps >= plan.interval:
            self._windows[plan.index] = AdaptiveWindow()
            return True
        if unscale is not None and device.selects:
            self._joined[plan.index] = _Joined(plan, unscale, window)
            selected, total = (self._readback.cell(plan.index, column) for column in (_SELECTED, _TOTAL))
            device.selected_norm(out=selected)
            torch.sum(device.norms, 0, out=total)
            if not self._counts(plan):
                torch._foreach_zero_([selected, total])
        return False

    def _counts(self, plan: ParamPlan) -> bool:
        """Whether this rank counts its part of a parameter in sums over ranks, and not another one that has it, too."""
        return plan.counted if plan.share or plan.shard else self._first_rank

    def selection(self, plan: ParamPlan, device: DeviceState, step: int) -> Wanted | None:
        """Return the slices to select from a flush at ``step`` on; None if the selection stays.

        The first flush selects. Later ones select after every interval that the user gave; under ``"auto"`` only if
        enough steps have passed and, at the previous flush, too small a share of the selected slices would have stayed.
        Then no more slices change sides than the steps since the last re-selection have paid for.
        """
        if not device.selects:
            return None
        if device.selected_at is None:
            return Wanted(device.best_slices(), plan.most_swaps)
        steps = step - device.selected_at
        if (least := self._least_steps.get(plan.interval)) is None:
            least = self._least_steps[plan.interval] = self._options.resolved_select_interval(plan.interval)
        if self._options.select_interval != "auto":
            return Wanted(device.best_slices(), plan.most_swaps) if steps >= least else None
        whole = plan.whole
        own = plan if plan.share is None else whole
        kept = 1.0 - self._leaving.pop(plan.index, 0.0) / (whole.k * plan.pieces)
        if steps >= least and kept < RESELECT_BELOW:
            paid_bytes = STATE_BUDGET * steps * own.numel * own.dtype.itemsize
            if swaps := int(paid_bytes / (2 * own.wide_tensors * FP32_BYTES * own.length)):
                return Wanted(device.better_slices(ENTRY_MARGIN, swaps, step), min(swaps, plan.most_swaps))
        if steps + max(plan.interval, LAG) >= least:  # the flush that will know the drift may re-select
            self._drifts[plan.index] = device, device.selection
        return None

    def continue_with(self, shortest_window: int | None) -> None:
        """Use the shortest update window of the resumed run, unless the options set it."""
        if self.measured:
            self.shortest_window = shortest_window

    def end_step(self) -> None:
        """Start the async D2H copy of this step's values."""
        self._take_values()
        if self._drifts:
            self._count_drifts()
        self._coming.append(_Coming(self._joined, self._readback.start()))
        self._joined = {}

    def _count_drifts(self) -> None:
        """Count the slices that would leave, with few operators for all parameters of one shape."""
        together: dict[tuple[int, int, int], list[int]] = {}
        for index, (device, _) in self._drifts.items():
            together.setdefault((device.plan.slices, device.plan.k, device.plan.groups), []).append(index)
        for indices in together.values():
            states, selections = zip(*(self._drifts[index] for index in indices), strict=True)
            counts = count_leaving(states, selections, ENTRY_MARGIN)
            for count, state in zip(counts, states, strict=True):
                if not self._counts(state.plan):
                    count.zero_()
            torch._foreach_copy_([self._readback.cell(index, _LEAVING) for index in indices], counts)
        self._drifts.clear()

    def restart_windows(self) -> None:
        """Begin all update windows anew. Call it between steps."""
        self._take_values()
        self._windows.clear()

    def window(self, index: int) -> AdaptiveWindow:
        return self._windows.setdefault(index, AdaptiveWindow())

    def state(self, index: int) -> list[float | None]:
        """The values that decide about parameter ``index``, in the order of ``checkpoint/format.SCHEDULE``.

        Call it between steps.
        """
        self._take_values()
        window = self._windows.get(index)
        coming = self._coming[-1].arrived() if self._coming else _Values({}, {})
        norms = coming.norms.get(index)
        if norms is None or norms.window is not window:
            norms = None
        shown = window or AdaptiveWindow()
        latest = (None, None) if shown.latest is None else shown.latest
        next_norms = (None, None) if norms is None else (norms.selected, norms.deferred)
        leaving = (self._leaving.get(index), coming.leaving.get(index))
        return [shown.steps, shown.known, shown.deferred, shown.selected, *latest, *next_norms, *leaving]

    def forget(self) -> None:
        """Drop all values: a state is about to be loaded."""
        self._readback.forget()
        self._windows.clear()
        self._leaving.clear()
        self._drifts.clear()
        self._joined.clear()
        self._coming.clear()

    def restore(self, index: int, state: Sequence[float | None]) -> None:
        """Put back what ``state`` returned."""
        steps, known, deferred, selected, *latest, next_selected, next_deferred, leaving, next_leaving = state
        if not self._coming:
            self._coming.append(_Coming())
        coming = self._coming[-1].values
        if self.adaptive:
            window = self._windows[index] = AdaptiveWindow(
                steps=int(steps or 0),
                deferred=deferred or 0.0,
                selected=selected or 0.0,
                known=int(known or 0),
                latest=None if latest[0] is None else (latest[0], latest[1] or 0.0),
            )
            if next_selected is not None:
                coming.norms[index] = _Norms(window, next_selected, next_deferred or 0.0)
        if leaving is not None:
            self._leaving[index] = leaving
        if next_leaving is not None:
            coming.leaving[index] = next_leaving

    @property
    def adaptive_windows(self) -> AdaptiveWindows | None:
        """Bounds of the lengths of adaptive update windows; None where windows are of fixed length."""
        if not self.adaptive:
            return None
        return AdaptiveWindows(self.shortest_window, self._options.longest_window, self.measured)

    def _take_values(self) -> None:
        """Take the values of the step before last, unless they were taken."""
        if len(self._coming) < LAG:
            return
        values = self._coming.popleft().arrived()
        self._leaving.update(values.leaving)
        for norms in values.norms.values():
            # Of the window that the gradient joined, which may have been flushed and replaced in the meantime.
            norms.window.latest = norms.selected, norms.deferred
