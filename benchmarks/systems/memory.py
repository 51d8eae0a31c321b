"""Measures plain copies: the bandwidth of the host's memory by number of threads."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from zenflow_compile.runtime.host.cores import physical_cores
from zenflow_compile.torch_internals import torch_private

COPY_BYTES_PER_ELEMENT = 8
"""Of an fp32 copy: read and written once. What a cache fetches only to overwrite it (write-allocate) is not counted,
here as for every kernel that this is compared with."""


class PinnedThreads:
    """Threads pinned to one core each, with one intra-op thread each, that work at once; a context manager."""

    def __init__(self, count: int) -> None:
        """
        Args:
            count: of threads, at most the physical cores that this process may use.
        """
        cores = [core.logical for core in physical_cores()][:count]
        if len(cores) < count:
            raise ValueError(f"threads={count} must be at most {len(cores)}, the physical cores of this process")
        self._pools = [ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, {core})) for core in cores]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools:
            pool.shutdown()

    def seconds(self, work: Callable[[int], None]) -> float:
        """Seconds until ``work(0)``, ``work(1)``, ..., one thread each, are all done."""
        begin = time.perf_counter()
        futures = [pool.submit(_alone, work, number) for number, pool in enumerate(self._pools)]
        for future in futures:
            future.result()
        return time.perf_counter() - begin


def _alone(work: Callable[[int], None], number: int) -> None:
    with torch_private.one_intra_op_thread():
        work(number)


def copy_gb_per_s(threads: int, mib_each: int = 256, repeats: int = 7) -> float:
    """Median bandwidth of ``Tensor.copy_`` by this many threads at once, in 1e9 bytes read and written per second."""
    numel = mib_each * 2**20 // 4
    sources = [torch.ones(numel) for _ in range(threads)]
    destinations = [torch.empty(numel) for _ in range(threads)]

    def copy(number: int) -> None:
        destinations[number].copy_(sources[number])

    with PinnedThreads(threads) as pool:
        seconds = [pool.seconds(copy) for _ in range(repeats + 1)][1:]  # the first touches pages
    return threads * numel * COPY_BYTES_PER_ELEMENT / statistics.median(seconds) / 1e9
