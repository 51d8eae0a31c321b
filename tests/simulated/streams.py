"""Streams and events of the simulated device. Their calls release the GIL.

``torch.Stream`` and ``torch.Event`` hold it in ``record``, ``wait_event`` and ``wait_stream``, where a full queue
blocks; ``torch.cuda``'s own classes do not.
"""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType
from typing import Any

import torch

from tests.simulated.library import library

_PRIVATE_USE_1 = 20  # of c10::DeviceType


class Stream(torch.Stream):
    """A stream of the simulated device, with the interface of ``torch.cuda.Stream``.

    PyTorch's functions take it as a ``torch.Stream``, for example ``Tensor.record_stream``.

    Args:
        priority: ignored.
        handle: of an existing stream; without it, a new stream is made.
    """

    def __new__(cls, priority: int = 0, *, handle: int | None = None) -> Stream:
        number = library().ask("make_stream") if handle is None else handle
        made: Stream = super().__new__(cls, stream_id=number, device_index=0, device_type=_PRIVATE_USE_1)
        return made

    def __init__(self, priority: int = 0, *, handle: int | None = None) -> None:
        pass

    @property
    def handle(self) -> int:
        """Number of the stream; the default stream is 0."""
        return int(self.stream_id)

    def wait_event(self, event: Event) -> None:
        """Queue a wait for the last recording of ``event``."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Queue a wait for the work that ``stream`` has now."""
        event = Event()
        event.record(stream)
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, after the work queued so far."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block the calling thread until the work queued so far is done."""
        library().call("synchronize_stream", self.handle)

    def query(self) -> bool:
        """Whether the work queued so far is done."""
        done = ctypes.c_int()
        library().call("query_stream", self.handle, ctypes.byref(done))
        return bool(done.value)

    def __enter__(self) -> Stream:
        _previous().append(library().ask("exchange_stream", self.handle))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        library().ask("exchange_stream", _previous().pop())


class Event:
    """An event of the simulated device, with the interface of ``torch.cuda.Event``.

    Args:
        enable_timing: ``elapsed_time`` can be asked.
        blocking: ignored: a wait never spins.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._pointer: int | None = library().ask("make_event", enable_timing)

    def __del__(self) -> None:
        if getattr(self, "_pointer", None) and callable(library):  # at exit globals may be gone
            library().ask("delete_event", self._pointer)
            self._pointer = None

    def record(self, stream: torch.Stream | None = None) -> None:
        """Record it after the work that ``stream``, or the current one, has now."""
        library().call("record_event", self._pointer, _number(stream))

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make ``stream``, or the current one, wait for the last recording."""
        library().call("wait_event", self._pointer, _number(stream))

    def query(self) -> bool:
        """Whether the last recording has happened, or there was none."""
        done = ctypes.c_int()
        library().call("query_event", self._pointer, ctypes.byref(done))
        return bool(done.value)

    def synchronize(self) -> None:
        """Block the calling thread until the last recording has happened."""
        library().call("synchronize_event", self._pointer)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``; both must have happened."""
        milliseconds = ctypes.c_double()
        library().call("elapsed_ms", self._pointer, end._pointer, ctypes.byref(milliseconds))
        return milliseconds.value


def current_stream(device: Any = None) -> Stream:
    """The stream on which the calling thread queues operators."""
    return Stream(handle=library().ask("current_stream"))


def default_stream(device: Any = None) -> Stream:
    """The stream that a thread has before it chooses one."""
    return Stream(handle=0)


def set_stream(stream: torch.Stream) -> None:
    """Make ``stream`` the calling thread's current one."""
    library().ask("exchange_stream", stream.stream_id)


_local = threading.local()


def _previous() -> list[int]:
    """Handles of the streams to which the ``with`` blocks of this thread return."""
    if not hasattr(_local, "previous"):
        _local.previous = []
    handles: list[int] = _local.previous
    return handles


def _number(stream: torch.Stream | None) -> int:
    return int(library().ask("current_stream") if stream is None else stream.stream_id)
