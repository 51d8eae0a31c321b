"""Collectives of device memory in the order that NCCL gives them, for devices that have none of their own.

Like NCCL's they run on a stream of the group's own, after the work of the caller's stream: the host waits for nothing,
and ``wait()`` makes the caller's stream wait. A thread sends the bytes through host memory and gloo.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zenflow_compile.runtime.device.device import Device, Streams
from zenflow_compile.runtime.device.stream_flags import Flag, HostFlags
from zenflow_compile.timeline import DeviceEvent

THREAD = "collectives of streams"
_SENT, _COME = 0, 1  # counters of a group

Combine = Callable[[Tensor], Tensor]
"""From what the ranks have sent, [ranks, ...], to what this one gets."""


class _Exchange(NamedTuple):
    """What the thread of a group does for one collective."""

    number: int
    sent: Tensor
    come: Tensor
    combine: Combine


class _Work(dist.Work):
    """A collective under way, of a device if ``event`` is given; keeps its tensors, as long as the caller keeps it."""

    def __init__(self, group: StreamGroup, event: DeviceEvent | None, *kept: Tensor) -> None:
        super().__init__()
        self._group = group
        self._event = event
        self._kept = kept

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait for it."""
        if self._group.error is not None:
            raise RuntimeError(f"a collective failed: {self._group.error}")
        if self._event is not None:
            self._group.streams.current().wait_event(self._event)
        return True


class StreamGroup(dist.ProcessGroup):
    """A process group for tensors of one device, and for those of the host, whose collectives block.

    Args:
        backend: its name.

    Attributes:
        stream: of the collectives.
        error: why a collective failed.
    """

    def __init__(self, backend: str, device: Device, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        assert device.streams is not None
        self.streams: Streams = device.streams
        self.stream: Any = self.streams.acquire(urgent=False)
        self.error: BaseException | None = None
        self._backend = backend
        self._rank, self._size, self._timeout = rank, size, timeout
        # Two, so that what the thread sends does not mix with what the caller sends.
        self._of_host, self._of_device = (
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout=timeout)  # type: ignore[call-overload]
            for name in ("host", "device")
        )
        self._flags = HostFlags(2, device)
        self._number = 0
        self._taken = 0  # number of the exchange that the thread works on: it holds no earlier one
        self._kept: deque[_Exchange] = deque()
        self._queue: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=THREAD, daemon=True).start()

    # The collectives that the package, FSDP2 and DTensor use.

    def all_gather_single(self, out: Tensor, block: Tensor, opts: Any = None) -> _Work:
        return self._start(block, out, lambda rows: rows)

    def reduce_scatter_single(self, out: Tensor, packed: Tensor, opts: Any = None) -> _Work:
        return self._start(
            packed, out, lambda rows: _reduced(rows.view(self._size, self._size, -1)[:, self._rank], opts)
        )

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        (values,) = tensors
        return self._start(values, values, lambda rows: _reduced(rows, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        (values,) = tensors
        root = 0 if opts is None else opts.rootRank
        return self._start(values, values, lambda rows: rows[root])

    def barrier(self, opts: Any = None) -> _Work:
        return self.allreduce([torch.zeros(1, device="cpu")])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        return [self.allreduce([each], opts) for each in tensors][-1]

    def allgather_into_tensor_coalesced(self, outs: list[Tensor], blocks: list[Tensor], opts: Any = None) -> _Work:
        return [self.all_gather_single(out, block) for out, block in zip(outs, blocks, strict=True)][-1]

    # Their names in torch 2.11.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _start(self, source: Tensor, target: Tensor, combine: Combine) -> _Work:
        if source.device.type == "cpu":
            target.copy_(combine(self._gathered(self._of_host, source)).view(target.shape))
            return _Work(self, None, source, target)
        # Hazard: the thread must free no page-locked memory. PyTorch then records events in the stream, which waits
        # where the queue is full, and the thread alone makes room.
        while self._kept and self._kept[0].number < self._taken:
            self._kept.popleft()
        self.stream.wait_stream(self.streams.current())
        self._number += 1
        with self.streams.use(self.stream):
            sent = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            come = torch.empty(target.shape, dtype=target.dtype, device="cpu", pin_memory=True)
            sent.copy_(source, non_blocking=True)
            self.write_value(self._flags.address(_SENT), self._number)
            # Before the rest is queued, which may wait for room: the other ranks wait for this one.
            self._kept.append(_Exchange(self._number, sent, come, combine))
            self._queue.put(self._kept[-1])
            self.wait_value(self._flags.address(_COME), self._number)
            target.copy_(come, non_blocking=True)
            event = self.streams.event()
            event.record(self.stream)
        return _Work(self, event, source, target, sent, come)

    def write_value(self, address: int, value: int) -> None:
        """Make the group's stream write ``value`` to host memory."""
        self.streams.write_value(self.stream, address, value)

    def wait_value(self, address: int, value: int) -> None:
        """Make the group's stream wait until the number in host memory reaches ``value``."""
        self.streams.wait_value(self.stream, address, value)

    def _serve(self) -> None:
        while (exchange := self._queue.get()) is not None:
            self._taken = exchange.number
            Flag(self._flags, _SENT, exchange.number).wait()
            try:
                rows = self._gathered(self._of_device, exchange.sent)
                exchange.come.copy_(exchange.combine(rows).view(exchange.come.shape))
            except BaseException as error:
                self.error = error
            Flag(self._flags, _COME, exchange.number).raise_it()

    def _gathered(self, gloo: Any, values: Tensor) -> Tensor:
        rows = [torch.empty_like(values) for _ in range(self._size)]
        gloo.allgather([rows], [values.contiguous()]).wait()
        return torch.stack(rows)

    # What PyTorch, and the package, ask of a group.

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def options(self) -> Any:
        return self

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        return self._backend

    def shutdown(self) -> None:
        self._queue.put(None)

    abort = shutdown


def _reduced(rows: Tensor, opts: Any) -> Tensor:
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    wide = torch.promote_types(rows.dtype, torch.float32) if rows.is_floating_point() else rows.dtype
    if op == dist.ReduceOp.AVG:
        return rows.mean(0, dtype=wide).to(rows.dtype)
    if op == dist.ReduceOp.SUM:
        return rows.sum(0, dtype=wide).to(rows.dtype)
    raise NotImplementedError(f"{op}: these collectives have sums and means")
