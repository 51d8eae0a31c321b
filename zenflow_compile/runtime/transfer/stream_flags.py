"""Counters in host memory that threads and CUDA streams wait for on each other, so that no thread waits for a stream.

An event cannot say that a worker thread will be done: a wait for an event that nobody has recorded yet returns at once.
A counter in pinned memory can: a stream stops at ``wait_on`` until a thread has raised it, and a thread sees in it what
a stream has written. Both are operations of the stream (``cuStreamWaitValue32``, ``cuStreamWriteValue32``), so that the
thread that queues them goes on.

[Note: progress] A stream that waits holds up what is queued behind it in the same hardware queue. Whoever waits here
does so on a stream of its own and of another priority than the stream whose copies the awaited thread needs.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from typing import NamedTuple

import torch

from zenflow_compile.torch_internals import torch_private

_POLL_SECONDS = 20e-6


class HostFlags:
    """Counters (32 bit, modulo 2**32) that only grow.

    Args:
        count: how many.
        device: the CUDA device whose streams use them.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        # cudaHostAlloc memory: the device knows it by the host's address.
        self._memory = torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._address = self._memory.data_ptr()
        self._fence = threading.Lock()

    def __len__(self) -> int:
        return self._memory.numel()

    def raise_to(self, index: int, value: int) -> None:
        """What the calling thread wrote before is seen by whoever sees this."""
        with self._fence:  # taking and leaving a lock orders memory; a plain store would do so on x86 alone
            pass
        self._word(index).value = value & 0xFFFFFFFF

    def reached(self, index: int, value: int) -> bool:
        """Whether counter ``index`` is at ``value`` or beyond."""
        return (self._word(index).value - value) & 0xFFFFFFFF < 1 << 31

    def wait(self, index: int, value: int, seconds: float = math.inf) -> bool:
        """Block the calling thread until the counter is at ``value``; no CUDA call, no GIL while it sleeps.

        Returns:
            Whether it got there within ``seconds``.
        """
        end = time.monotonic() + seconds
        while not self.reached(index, value):
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def write_from(self, stream: torch.cuda.Stream, index: int, value: int) -> None:
        """``stream`` raises the counter when it gets there."""
        torch_private.stream_write_value(stream.cuda_stream, self._address + 4 * index, value & 0xFFFFFFFF)

    def wait_on(self, stream: torch.cuda.Stream, index: int, value: int) -> None:
        """``stream`` goes on from here when the counter is at ``value``."""
        torch_private.stream_wait_value(stream.cuda_stream, self._address + 4 * index, value & 0xFFFFFFFF)

    def _word(self, index: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self._address + 4 * index)


class Flag(NamedTuple):
    """One value of one counter, to be reached once."""

    flags: HostFlags
    counter: int
    value: int

    def raise_it(self) -> None:
        """See :meth:`HostFlags.raise_to`."""
        self.flags.raise_to(self.counter, self.value)

    def reached(self) -> bool:
        """See :meth:`HostFlags.reached`."""
        return self.flags.reached(self.counter, self.value)

    def wait(self, seconds: float = math.inf) -> bool:
        """See :meth:`HostFlags.wait`."""
        return self.flags.wait(self.counter, self.value, seconds)

    def write_from(self, stream: torch.cuda.Stream) -> None:
        """See :meth:`HostFlags.write_from`."""
        self.flags.write_from(stream, self.counter, self.value)

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """See :meth:`HostFlags.wait_on`."""
        self.flags.wait_on(stream, self.counter, self.value)


def make_flags(count: int, device: torch.device) -> HostFlags | None:
    """Flags for ``device``; None where its driver has no such operations, and threads must wait themselves."""
    if device.type != "cuda" or not torch_private.has_stream_values():
        return None
    flags = HostFlags(max(1, count), device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        flags.wait_on(stream, 0, 0)
        flags.write_from(stream, 0, 1)
        stream.synchronize()
    except (RuntimeError, ImportError, AttributeError):  # no such driver, or bindings of another version
        return None
    if not flags.reached(0, 1):
        return None
    flags.raise_to(0, 0)
    return flags
