"""Collectives of device memory for ranks on the fake GPU, in the order that NCCL gives them.

Like NCCL's they run on a stream of their own, after the work that the caller's stream has: the host waits for nothing,
and ``wait()`` lets the caller's stream wait. What they send goes through host memory and gloo. NCCL itself needs GPUs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zenflow_compile.runtime.device import cuda_driver

BACKEND = "staged"
"""Its name, once ``register`` was called."""

Combine = Callable[[Tensor], Tensor]
"""From what the ranks have sent [ranks, n] to what this one gets."""


def register() -> None:
    dist.Backend.register_backend(BACKEND, Collectives, devices=["cpu", "cuda"])


class Started(dist.Work):
    """A collective that is queued; it keeps its tensors, as NCCL's work does."""

    def __init__(self, done: torch.cuda.Event | None, kept: Sequence[Tensor]) -> None:
        super().__init__()
        self._done, self._kept = done, kept

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._done is not None:
            torch.cuda.current_stream(self._kept[0].device).wait_event(self._done)
        return True


@dataclass(frozen=True)
class _Job:
    """What the host does between the copies of a collective: ``sent`` is valid once ``arrived`` is reached."""

    arrived: torch.cuda.Event
    sent: Tensor
    received: Tensor
    combine: Combine
    number: int


class Collectives(dist.ProcessGroup):
    """The process group that ``torch.distributed`` makes for the backend."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._size = size
        # Two, so that what a thread sends does not mix with what the caller sends.
        self._of_host, self._of_device = (
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout) for name in ("host", "device")
        )
        self._stream: torch.cuda.Stream | None = None
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._kept: deque[_Job] = deque()
        self._taken = 0  # number of the job that the thread works on: it holds no earlier one
        self._reached: Tensor | None = None  # the number of the last job that is done, in memory that the stream reads
        self._number = 0

    def getBackendName(self) -> str:  # noqa: N802, the name is PyTorch's
        return BACKEND

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _get_backend(self, device: torch.device) -> Any:
        return self._of_host

    # The collectives that the product, FSDP2 and DTensor use.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (values,) = tensors
        reduced = _reduction(opts)
        return self._start(values, values, reduced)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return [self.allreduce([each], opts) for each in tensors][-1]

    def _allgather_base(self, out: Tensor, block: Tensor, opts: Any = None) -> dist.Work:
        return self._start(block, out, lambda rows: rows)

    def allgather_into_tensor_coalesced(self, outs: list[Tensor], blocks: list[Tensor], opts: Any = None) -> dist.Work:
        return [self._allgather_base(out, block) for out, block in zip(outs, blocks, strict=True)][-1]

    def _reduce_scatter_base(self, out: Tensor, packed: Tensor, opts: Any = None) -> dist.Work:
        reduced, rank = _reduction(opts), self.rank()
        return self._start(packed, out, lambda rows: reduced(rows).view(self._size, -1)[rank])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (values,) = tensors
        root = 0 if opts is None else opts.rootRank
        return self._start(values, values, lambda rows: rows[root])

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.allreduce([torch.zeros(1)])

    def _start(self, values: Tensor, out: Tensor, combine: Combine) -> dist.Work:
        assert values.is_contiguous()
        assert out.is_contiguous()
        if values.device.type == "cpu":
            out.copy_(combine(self._gathered(self._of_host, values)).view(out.shape))
            return Started(None, (values, out))
        if self._stream is None:
            self._stream = torch.cuda.Stream(values.device)
            self._reached = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            threading.Thread(target=self._serve, daemon=True).start()
        # Hazard: the thread must free no page-locked memory. PyTorch then records events in the stream, which waits
        # where the queue is full, and the thread alone makes room.
        while self._kept and self._kept[0].number < self._taken:
            self._kept.popleft()
        self._number += 1
        sent = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        received = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        arrived, done = torch.cuda.Event(), torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(self._stream):
            sent.copy_(values, non_blocking=True)
            arrived.record(self._stream)
            # Before the rest is queued, which may wait for room: the others wait for this rank.
            self._kept.append(_Job(arrived, sent, received, combine, self._number))
            self._jobs.put(self._kept[-1])
            cuda_driver.wait_value(self._stream.cuda_stream, self._reached.data_ptr(), self._number)
            out.copy_(received, non_blocking=True)
            done.record(self._stream)
        return Started(done, (values, out, sent, received))

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            self._taken = job.number
            job.arrived.synchronize()
            rows = self._gathered(self._of_device, job.sent)
            job.received.copy_(job.combine(rows).view(job.received.shape))
            self._reached.fill_(job.number)

    def _gathered(self, gloo: Any, values: Tensor) -> Tensor:
        """What each rank has sent: [ranks, elements]."""
        rows = torch.empty((self._size, values.numel()), dtype=values.dtype)
        gloo._allgather_base(rows.view(-1).view(torch.uint8), values.reshape(-1).view(torch.uint8)).wait()
        return rows


def _reduction(opts: Any) -> Combine:
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    if not any(op == each for each in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):  # ``in`` would ask the constant
        raise NotImplementedError(f"{op} of ranks on the fake GPU: they have sums and means")

    def reduced(rows: Tensor) -> Tensor:
        wide = rows.double() if rows.dtype.is_floating_point else rows
        return (wide.mean(0) if op == dist.ReduceOp.AVG else wide.sum(0)).to(rows.dtype)

    return reduced
