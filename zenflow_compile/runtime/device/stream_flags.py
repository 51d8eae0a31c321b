"""Flags in host memory by which threads and streams of a device wait for each other; no thread waits for a stream.

An event cannot say that a worker thread will be done: a stream passes an event that was not recorded yet at once. A
counter in pinned memory can: a stream stops at ``wait_on`` until a thread has raised the counter, and a thread sees in
it what a stream has written. Both are operations of the stream (on CUDA ``cuStreamWaitValue32`` and
``cuStreamWriteValue32``), so that the thread that queues them goes on. Where the driver has no such operations, a
thread of its own writes, and threads wait in place of streams.

[Note: host functions] That thread of the driver may run the functions of all streams, one after another. So ours never
wait: one that waited for a job would keep back the write that the job waits for.

[Note: progress] A stream that waits may stall the streams that share its hardware queue. So a stream that waits for a
thread has another priority than the stream whose copies that thread needs.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time

import torch

from zenflow_compile.runtime.device.device import Device, Stream, Streams

_POLL_SECONDS = 20e-6


class HostFlags:
    """Counters (32 bit, modulo 2**32) in memory that the device can access; they only grow.

    Attributes:
        awaitable: streams can wait for them, and write them without a thread of the driver.
    """

    def __init__(self, count: int, device: Device) -> None:
        self._memory = device.host_zeros((max(1, count),), torch.int32).zero_()
        self._address = self._memory.data_ptr()
        self.fence = threading.Lock()
        streams = device.streams
        self.awaitable = streams is not None and streams.has_values
        if streams is not None and self.awaitable:
            self.awaitable = self._work_with(streams)

    def _work_with(self, streams: Streams) -> bool:
        stream = streams.acquire(urgent=False)
        try:
            one = Flag(self, 0, 1)
            Flag(self, 0, 0).wait_on(streams, stream)
            one.write_from(streams, stream)
            stream.synchronize()
        except (RuntimeError, ImportError, AttributeError):  # no such driver, or bindings of another version
            return False
        finally:
            streams.release(stream, urgent=False)
            reached = one.reached()
            # Back to zero: users count from 1, and their first value would count as reached.
            Flag(self, 0, 0).raise_it()
        return reached

    def address(self, counter: int) -> int:
        """Where counter number ``counter`` is in host memory."""
        return self._address + 4 * counter


class Flag:
    """One value of one counter, to be reached one time.

    Native workers raise it by its address and value (native/pool.h).

    Attributes:
        address: of the counter.
        value: modulo 2**32.
    """

    __slots__ = ("_flags", "_word", "address", "value")

    def __init__(self, flags: HostFlags, counter: int, value: int) -> None:
        self._flags = flags  # keeps the memory alive
        self.address = flags.address(counter)
        self.value = value & 0xFFFFFFFF
        self._word = ctypes.c_uint32.from_address(self.address)

    def raise_it(self) -> None:
        """Set the counter to the value. A thread that sees it sees all earlier writes of the calling thread."""
        # Orders memory; a plain store would do so on x86 alone. Twice: the first release orders all earlier writes
        # before the second acquire, which comes before the store.
        with self._flags.fence:
            pass
        with self._flags.fence:
            self._word.value = self.value

    def reached(self) -> bool:
        """Whether the counter is at the value or beyond."""
        return (self._word.value - self.value) & 0xFFFFFFFF < 1 << 31

    def wait(self, seconds: float = math.inf) -> bool:
        """Block the calling thread until the value is reached; no call of the driver, and no GIL while it sleeps.

        Returns whether it was reached within ``seconds``.
        """
        end = time.monotonic() + seconds
        while not self.reached():
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def write_from(self, streams: Streams, stream: Stream) -> None:
        """Make ``stream`` set the counter to the value when it gets there."""
        write = streams.write_value if self._flags.awaitable else streams.write_by_host
        write(stream, self.address, self.value)

    def wait_on(self, streams: Streams, stream: Stream) -> None:
        """Make ``stream`` wait at this place until the value is reached."""
        streams.wait_value(stream, self.address, self.value)


def make_flags(count: int, device: Device) -> HostFlags | None:
    """Make flags that streams of ``device`` can wait for; None where threads must wait instead."""
    flags = HostFlags(count, device)
    return flags if flags.awaitable else None
