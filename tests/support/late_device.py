"""The CPU as a device with streams, in this process: operators run at once, and copies of lanes as late as they may.

A copy runs when a thread waits for it, a few polls later, or 2 ms later. The simulated accelerator
(``tests/simulated``) makes all operators late. This one is for tests that look into the training process.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zenflow_compile.runtime.device.device import Streams
from zenflow_compile.runtime.device.devices import CpuDevice, device_of, register_device

CPU = torch.device("cpu")
_LOCK = threading.RLock()  # of all queues
_POLLS = 3
_LATE_SECONDS = 2e-3


class LateStream:
    """A queue of copies. The compute stream's is always empty."""

    def __init__(self) -> None:
        self.items: list[Callable[[], object]] = []
        self.ran = 0
        self.recorded = 0  # events
        self.happened = 0  # of them: all up to this one

    def queue(self, item: Callable[[], object]) -> None:
        with _LOCK:
            self.items.append(item)

    def run_to(self, count: int) -> None:
        with _LOCK:
            while self.ran < count:
                self.items[self.ran]()
                self.items[self.ran] = lambda: None  # the item keeps its tensors alive
                self.ran += 1

    def wait_stream(self, stream: LateStream) -> None:
        assert not stream.items, "lanes wait for the compute stream only"

    def wait_event(self, event: LateEvent) -> None:
        """A lane may be early. The compute stream has nothing to wait for, and the host sees no event of it sooner."""
        if not event.is_of_compute:
            event.happen()

    def synchronize(self) -> None:
        self.run_to(len(self.items))


class LateEvent:
    """An event of a lane, or of the compute stream; ``waits`` collects the threads that blocked for one."""

    def __init__(self, streams: LateStreams) -> None:
        self._streams = streams
        self._stream = streams.compute
        self._count = 0
        self._number = 0
        self._polls = 0

    def record(self, stream: LateStream) -> None:
        self._stream, self._count = stream, len(stream.items)
        stream.recorded += 1
        self._number, self._polls = stream.recorded, 0
        if stream is self._streams.compute and not self._streams.compute_is_late:
            self.happen()

    @property
    def is_of_compute(self) -> bool:
        return self._stream is self._streams.compute

    @property
    def has_happened(self) -> bool:
        return self._stream.happened >= self._number

    def happen(self) -> None:
        self._stream.run_to(self._count)
        self._stream.happened = max(self._stream.happened, self._number)

    def query(self) -> bool:
        self._polls += 1
        if self._polls > _POLLS:
            self.happen()
        return self.has_happened

    def synchronize(self) -> None:
        self._streams.waits.append(threading.current_thread())
        self.happen()

    def elapsed_time(self, end: Any) -> float:
        raise NotImplementedError


class _Queued(TorchDispatchMode):
    """Queues the copies of a block on a stream."""

    def __init__(self, streams: LateStreams, stream: LateStream) -> None:
        super().__init__()
        self._streams = streams
        self._stream = stream

    def __enter__(self) -> Any:
        self._streams.here.current = self._stream
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._streams.here.current = self._streams.compute
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._stream.queue(lambda: func(*args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))


class LateStreams(Streams):
    """See :class:`Streams`.

    Attributes:
        compute_is_late: events of the compute stream have not happened before a thread waits for them.
        waits: the threads that waited for events.
    """

    has_values = False

    def __init__(self) -> None:
        self.compute = LateStream()
        self.here = threading.local()
        self.compute_is_late = False
        self.waits: list[threading.Thread] = []

    def current(self) -> LateStream:
        stream: LateStream = getattr(self.here, "current", self.compute)
        return stream

    def acquire(self, *, urgent: bool) -> LateStream:
        return LateStream()

    def release(self, stream: Any, *, urgent: bool) -> None:
        pass

    def use(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext() if stream is self.compute else _Queued(self, stream)

    def event(self, *, timed: bool = False, blocking: bool = False) -> LateEvent:
        return LateEvent(self)

    def record_use(self, tensor: torch.Tensor) -> None:
        pass  # the memory is the host's

    def write_value(self, stream: Any, address: int, value: int) -> None:
        raise NotImplementedError

    def write_by_host(self, stream: LateStream, address: int, value: int) -> None:
        word = ctypes.c_uint32.from_address(address)
        stream.queue(lambda: setattr(word, "value", value))
        # Workers wait for the word without asking the device.
        threading.Timer(_LATE_SECONDS, stream.run_to, (len(stream.items),)).start()

    def wait_value(self, stream: Any, address: int, value: int) -> None:
        raise NotImplementedError

    def reference(self) -> tuple[LateEvent, int]:
        raise NotImplementedError


class LateDevice(CpuDevice):
    """See the module."""

    streams: LateStreams  # type: ignore[assignment]

    def __init__(self, torch_device: torch.device = CPU) -> None:
        super().__init__(torch_device)
        self.streams = LateStreams()

    def host_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # Not zeros: a number that is read before its copy has run must be a wrong one.
        return super().host_zeros(shape, dtype).add_(3)


@contextmanager
def served(implementation: type[LateDevice] = LateDevice) -> Iterator[LateDevice]:
    """Serve the CPU as a device with streams inside of the block; engines that are made there keep theirs."""
    register_device("cpu", implementation)
    try:
        device = device_of(CPU)
        assert isinstance(device, implementation)
        yield device
    finally:
        register_device("cpu", CpuDevice)
