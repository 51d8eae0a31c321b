"""Events of a run, measured or simulated, and the timeline that collects them.

Recording appends one tuple to a deque, so that it costs next to nothing; everything else happens on reading.

Lanes and the kinds on them:

===============  =======================================================================================
``compute``      ``forward``, ``backward``, ``update``, ``merge``, ``select``, ``wait`` (the stall), ``rank_wait`` (for
                 other ranks), ``inference`` (a forward without gradients), ``compile``
``D2H`` ``H2D``  ``copy`` (gradients down, weights up), ``state`` (moved by a re-selection, or streamed through the
                 device around its update), ``load`` (offloaded weights), ``write_back`` (those that the device
                 updates); with bytes
``worker N``     ``host_update``, ``state`` of a re-selection (bytes: host memory read and written)
``disk``         ``read``, ``write`` (state in files, in and out of the host's cache); with bytes
``ranks``        what this rank put into a collective, by its kind; with bytes; instantaneous. ``rank_wait``: on another
                 stream than the model's, a collective or a wait for one
``peers``        ``copy`` (collectives among ranks; bytes), in simulations; ``network``: those among nodes
``step``         ``step``: one per optimizer step, from the end of the previous one to its own
``windows``      ``flush`` (an update window was flushed), ``select`` (a selection became current); instantaneous
``gradients``    ``dense``: a gradient took memory of its own; ``param`` is the line that caused it; instantaneous
``memory``       ``forward``, ``backward``, ``update``: bytes of tensors on the device after that phase; ``peak``: most
                 bytes at a time, at the end of a step; instantaneous
``slack``        ``slack``: from the final gradient of a flushed window to the weight's next use
===============  =======================================================================================
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:  # importing torch takes seconds, and simulated events need none of it
    from torch import Tensor

COMPUTE = "compute"
D2H = "D2H"
H2D = "H2D"
DISK = "disk"
STEP = "step"
WINDOWS = "windows"
SLACK = "slack"
GRADIENTS = "gradients"
MEMORY = "memory"
RANKS = "ranks"
WORKER_PREFIX = "worker"

# The last one is called with each new engine. A context variable, so that a profile ends with its `with` block and does
# not record engines that other threads create.
_ATTACH_NEW: ContextVar[tuple[Callable[[object], None], ...]] = ContextVar("zenflow_attach_new", default=())

DRAIN_ABOVE = 2048  # device events waiting to be read before some are read during the run
_DRAIN_BATCH = 256


def worker_lane(index: int) -> str:
    """Name of the lane of worker thread ``index``, counted from 0."""
    return f"{WORKER_PREFIX} {index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One span on one lane, in nanoseconds of ``time.perf_counter_ns``, or of any common clock if simulated."""

    lane: str
    kind: str
    start_ns: int
    end_ns: int
    step: int
    param: str = ""
    bytes: int = 0

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def is_worker(self) -> bool:
        return self.lane.startswith(WORKER_PREFIX)


@dataclass(frozen=True, slots=True)
class AdaptiveWindows:
    """Bounds of the length of adaptive update windows.

    Attributes:
        shortest: in steps; None until the time that decides it has been measured.
        longest: in steps.
        measured: whether measured time decides ``shortest``; otherwise an option does.
    """

    shortest: int | None
    longest: int
    measured: bool


@dataclass(frozen=True, slots=True)
class NormSums:
    """Squared gradient norms, summed over the recorded steps: of the selected slices, and of all."""

    selected: float
    total: float


class DeviceEvent(Protocol):
    """A moment of a device's stream: ``torch.cuda.Event``, or an object with its methods."""

    def record(self, stream: Any) -> None:
        """Queue it behind the work that ``stream`` has now."""

    def query(self) -> bool:
        """Whether it has happened; raises if the device has failed."""

    def synchronize(self) -> None:
        """Block the calling thread, without the GIL, until it has happened; raises if the device has failed."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to ``end``; both are timed and have happened."""


class DeviceClock(Protocol):
    """Tells moments of a device's work, and relates them to the host's clock."""

    def now(self) -> DeviceEvent:
        """This moment of the stream that the calling thread queues work on: a recorded event with timing."""

    def reference(self) -> tuple[DeviceEvent, int]:
        """A timed event that has happened, and the host time (``time.perf_counter_ns``) at which it did."""


_T = TypeVar("_T")
_Row = tuple[str, str, int, int, int, str, int]
_DeviceRow = tuple[DeviceClock, str, str, DeviceEvent, DeviceEvent, int, str, int]


class Timeline:
    """Collects events from any thread; keeps the newest ``max_events``, and ``max_norms`` norms.

    If older ones are dropped, the oldest step of which some are left is, too: a step has all its events or none.

    Attributes:
        replaced: the timeline that recorded before, and does again when this one ends.
    """

    def __init__(self, *, max_events: int = 1_000_000, max_norms: int = 4096) -> None:
        # deque.append and popleft are atomic under the GIL, so recording threads take no lock. A bounded deque drops
        # its oldest entry by itself.
        self._rows: deque[_Row] = deque(maxlen=max_events + 1)  # one more tells that some were dropped
        self._max_events = max_events
        self._device_rows: deque[_DeviceRow] = deque()
        self._norms: deque[tuple[Tensor, Tensor]] = deque(maxlen=max_norms)
        self._reading = threading.Lock()
        self.replaced: Timeline | None = None

    def add(
        self, lane: str, kind: str, start_ns: int, end_ns: int, *, step: int, param: str = "", bytes: int = 0
    ) -> None:
        """Record a span that the host measured with ``time.perf_counter_ns``."""
        self._rows.append((lane, kind, start_ns, end_ns, step, param, bytes))

    def add_device(
        self,
        clock: DeviceClock,
        lane: str,
        kind: str,
        start: DeviceEvent,
        end: DeviceEvent,
        *,
        step: int,
        param: str = "",
        bytes: int = 0,
    ) -> None:
        """Record a span between two recorded timed events of the device that ``clock`` belongs to, and own them."""
        # The times are read later: recording one of the events again (from a pool) would silently move this span.
        self._device_rows.append((clock, lane, kind, start, end, step, param, bytes))
        if len(self._device_rows) > DRAIN_ABOVE:
            self._resolve(wait=False)

    def add_norms(self, selected_squared: Tensor, total_squared: Tensor) -> None:
        """Record squared gradient norms of a step: 0-d tensors, which ``norm_sums`` reads later."""
        # Kept, not copied, so that recording does not wait for the device: the caller must not write them again.
        self._norms.append((selected_squared, total_squared))

    def events(self) -> list[Event]:
        """Return all events by start time. Waits for device events that have not finished."""
        self._resolve(wait=True)
        rows = _snapshot(self._rows)
        return [_event(row) for row in sorted(self._complete(rows, rows), key=_by_time)]

    @property
    def older_dropped(self) -> bool:
        """Whether there were more events than are kept."""
        return len(self._rows) > self._max_events

    def _complete(self, rows: list[_Row], newest: list[_Row]) -> list[_Row]:
        """``newest``, the last of all ``rows``, without a step of which others were dropped."""
        if len(rows) <= self._max_events or len(newest) < len(rows):
            return newest
        # Rows come after the end of what they record, so that those of later steps come after that of the first step.
        cut = next((end for lane, _, _, end, *_ in rows if lane == STEP), 0)
        return [row for row in rows if row[3] > cut]

    def last_events(self, steps: int) -> list[Event]:
        """Return what ended since the beginning of the last ``steps`` steps, of what the device has finished.

        Waits for nothing, and takes time with these steps, not with all that is recorded.
        """
        self._resolve(wait=False, at_most=len(self._device_rows))
        rows = _snapshot(self._rows)
        # Rows are in the order of their recording, which comes after their end.
        first, since, left = len(rows), 0, steps
        for first in range(len(rows) - 1, -1, -1):
            lane, _, start, end, *_ = rows[first]
            if lane == STEP and left:
                since, left = start, left - 1
            elif lane == STEP and end <= since:
                break
        return [_event(row) for row in sorted(self._complete(rows, rows[first:]), key=_by_time) if row[3] > since]

    def norm_sums(self) -> NormSums | None:
        """Sum the recorded norms that are finite; None if none was recorded. Synchronizes with the device."""
        norms = [norm.detach().reshape(()).float() for pair in _snapshot(self._norms) for norm in pair]
        if not norms:
            return None
        import torch

        # One transfer instead of one per tensor.
        values = torch.stack(norms).reshape(-1, 2).tolist()
        finite = [(s, t) for s, t in values if math.isfinite(s) and math.isfinite(t)]
        return NormSums(math.fsum(s for s, _ in finite), math.fsum(t for _, t in finite))

    def _resolve(self, *, wait: bool, at_most: int = _DRAIN_BATCH) -> None:
        """Turn device spans into host-clock rows: all with ``wait``, else the oldest up to an unfinished one."""
        if not self._reading.acquire(blocking=wait):
            return  # another thread is reading, and a recording thread must not wait for it
        try:
            references: dict[DeviceClock, tuple[DeviceEvent, int]] = {}
            for _ in range(len(self._device_rows) if wait else min(at_most, len(self._device_rows))):
                clock, lane, kind, start, end, step, param, size = self._device_rows[0]
                if wait:
                    end.synchronize()
                elif not end.query():
                    return
                # One reference per batch: the two clocks drift, and ``elapsed_time`` is a float32 of milliseconds that
                # loses precision over long distances.
                if clock not in references:
                    references[clock] = clock.reference()
                reference, reference_ns = references[clock]
                start_ns = reference_ns - round(start.elapsed_time(reference) * 1e6)
                end_ns = start_ns + max(0, round(start.elapsed_time(end) * 1e6))
                self._rows.append((lane, kind, start_ns, end_ns, step, param, size))
                self._device_rows.popleft()
        finally:
            self._reading.release()


def record_new_engine(engine: object) -> None:
    """Attach a timeline to ``engine`` inside a ``profile()`` block; called with each complete engine."""
    if attach := _ATTACH_NEW.get():
        attach[-1](engine)


@contextmanager
def attaching_new_engines(attach: Callable[[object], None]) -> Iterator[None]:
    """Call ``attach`` with each engine that is created in this context. Such blocks may end in any order."""
    _ATTACH_NEW.set((*_ATTACH_NEW.get(), attach))
    try:
        yield
    finally:
        _ATTACH_NEW.set(tuple(each for each in _ATTACH_NEW.get() if each is not attach))


def _event(row: _Row) -> Event:
    lane, kind, start, end, step, param, size = row
    return Event(lane=lane, kind=kind, start_ns=start, end_ns=end, step=step, param=param, bytes=size)


def _by_time(row: _Row) -> tuple[int, int]:
    return row[2], row[3]


def _snapshot(rows: deque[_T]) -> list[_T]:
    """Copy a deque that other threads append to."""
    while True:
        try:
            return list(rows)
        except RuntimeError:  # another thread appended meanwhile: recording takes no lock, so the reader retries
            continue
