"""The copy lane of a device with streams: a stream that lives as long as the engine."""

from __future__ import annotations

import threading
import time
from collections import deque

from torch import Tensor

from zenflow_compile.native.library import COUNTER
from zenflow_compile.runtime.device.copy_lanes import Gate, HostWork, Ticket, Users
from zenflow_compile.runtime.device.device import Device, Stream, Streams
from zenflow_compile.runtime.device.stream_flags import Flag, HostFlags
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline import DeviceEvent

_POLL_EVENT_SECONDS = 1.0


class StreamTicket:
    """A copy on a stream.

    Args:
        end: recorded after the copy.
        tensors: source and target.
        free: where ``end`` goes when nothing can ask for the copy any more; None if another owner keeps it.
    """

    def __init__(
        self,
        streams: Streams,
        end: DeviceEvent,
        tensors: tuple[Tensor, Tensor] | None,
        flag: Flag,
        free: deque[DeviceEvent] | None,
    ) -> None:
        self.completed = False
        self._streams = streams
        self._end = end
        self._free = free
        self._tensors = tensors  # keeps both buffers alive while the copy is in flight
        self._flag = flag
        self._ask_device_at = time.monotonic() + _POLL_EVENT_SECONDS

    def __del__(self) -> None:
        if self._free is not None:
            self._free.append(self._end)

    @property
    def error(self) -> BaseException | None:
        """None: the device reports a failed copy itself, from the next call that waits."""
        return None

    def done(self) -> bool:
        """As :meth:`Ticket.done`; a device that has died, which is asked from time to time, raises ``RuntimeError``."""
        if self.completed or self._flag.reached():
            self.completed = True
            return True
        if (now := time.monotonic()) >= self._ask_device_at:
            self._ask_device_at = now + _POLL_EVENT_SECONDS
            self._end.query()  # raises if the device died: then the flag is never raised
        return False

    def wait(self) -> None:
        while not self._flag.wait(_POLL_EVENT_SECONDS):
            self._end.query()  # raises if the device died: then the flag is never raised
        self._tensors = None

    def settle(self) -> None:
        self._end.synchronize()

    def gate(self) -> Gate:
        return Gate(self._flag.address, self._flag.value, COUNTER, self)

    settled_gate = gate  # the device reports a failed copy itself

    @property
    def is_settled(self) -> bool:
        return self.done()

    def wait_on_device(self) -> None:
        self._streams.current().wait_event(self._end)


class StreamLane:
    """A lane of a device with streams: one stream, in which copies run.

    The stream raises a flag after every copy, so that workers need no call of the driver to see that it is done. Where
    the driver has stream memory operations, it waits for the flags of jobs itself.
    """

    def __init__(self, name: str, device: Device, streams: Streams, recorder: Recorder) -> None:
        self._name = name
        self._streams = streams
        # Uploads wait for jobs, which wait for downloads: the two need different priorities, or the waiting stream may
        # stall the other one. See [Note: progress] in stream_flags.
        self._urgent = name == "H2D"
        self.stream = streams.acquire(urgent=self._urgent)
        self._recorder = recorder
        self._flags = HostFlags(1, device)
        self._copies = 0
        self._counting = threading.RLock()  # a signal handler may save a checkpoint inside of it
        self._events: deque[DeviceEvent] = deque()  # untimed ones, to be recorded again: making one calls the driver
        self._closed = False

    def start(self) -> None:
        """Nothing to do: the device makes the copies."""

    def submit(
        self,
        target: Tensor,
        source: Tensor,
        *,
        step: int,
        param: str,
        kind: str = "copy",
        after: HostWork | None = None,
        behind: Ticket | None = None,
        users: Users | None = None,
    ) -> StreamTicket:
        streams, stream, timeline = self._streams, self.stream, self._recorder.timeline
        start = None if timeline is None else streams.event(timed=True)
        end = self._event() if timeline is None else streams.event(timed=True)
        # Backwards run on autograd's own thread: the producing stream is the current one here, not the creator's.
        self._wait_for(streams.current())
        if after is not None and not after.done():
            assert after.flag is not None, "ask can_wait_for first"
            after.flag.wait_on(streams, stream)
        for job in () if users is None else users.jobs:
            if not job.done():
                assert job.flag is not None, "ask can_wait_for first"
                job.flag.wait_on(streams, stream)
        with streams.use(stream):
            if behind is not None:
                behind.wait_on_device()  # the current stream is the lane's here
            for copy in () if users is None else users.copies:
                copy.wait_on_device()
            if start is not None:
                start.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        if timeline is not None and start is not None:
            timeline.add_device(streams, self._name, kind, start, end, step=step, param=param, bytes=source.nbytes)
        free = self._events if timeline is None else None
        return StreamTicket(streams, end, (target, source), self._raise_flag(), free)

    @property
    def failed(self) -> bool:
        """False: the device reports a failed copy itself, from the next call that waits."""
        return False

    def can_wait_for(self, work: HostWork) -> bool:
        """Whether the work raises a flag when it is done."""
        return work.flag is not None

    def settle(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        if not self._closed:
            self.stream.synchronize()  # raises on a dead device, whose stream no other lane should get
            self._closed = True
            self._streams.release(self.stream, urgent=self._urgent)

    def runs(self, thread: threading.Thread) -> bool:
        """Always False: a stream is no thread."""
        return False

    def _event(self) -> DeviceEvent:
        try:
            return self._events.pop()  # one call, since several threads submit copies
        except IndexError:
            return self._streams.event()

    def _wait_for(self, other: Stream) -> None:
        """Queue a wait for the work that ``other`` has now."""
        event = self._event()
        event.record(other)
        self.stream.wait_event(event)
        self._events.append(event)  # a wait is for what was recorded when it was queued

    def _raise_flag(self) -> Flag:
        # Hazard: of two threads that submit copies, the one with the lower number must not write last: who waits for
        # the higher one would wait until the next copy.
        with self._counting:
            self._copies += 1
            flag = Flag(self._flags, 0, self._copies)
            # Queued after the copy, and the stream keeps the order: a thread that sees the value sees the copied bytes.
            flag.write_from(self._streams, self.stream)
        return flag
