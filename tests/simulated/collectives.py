"""Collectives of the simulated accelerator, as NCCL makes them: on a stream of the group's own, behind the current one.

Between processes the bytes travel through gloo, by a thread. So the host that starts a collective waits for nothing,
and the group's stream is as late as any other one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simulated import device_module
from tests.simulated.simulator import load_simulator
from tests.simulated.streams import Event, Stream, current_stream
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.stream_flags import Flag, HostFlags

BACKEND = "simulated"
THREAD = "simulated collectives"
_STREAMS: list[Stream] = []
_SENT, _COME = 0, 1  # counters of a group


def streams_of_groups() -> list[Stream]:
    """The streams of all groups, in the order in which they were made."""
    return list(_STREAMS)


class _Exchange(NamedTuple):
    """What the thread of a group does for one collective."""

    number: int
    sent: Tensor
    come: Tensor
    combine: Callable[[Tensor], Tensor]


class _Work(dist.Work):
    """A collective under way; keeps its tensors, as long as the caller keeps it."""

    def __init__(self, group: SimulatedGroup, event: Event, *kept: Tensor) -> None:
        super().__init__()
        self._group = group
        self._event = event
        self._kept = kept

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait for it."""
        if self._group.error is not None:
            raise RuntimeError(f"a collective failed: {self._group.error}")
        current_stream().wait_event(self._event)
        return True


class SimulatedGroup(dist.ProcessGroup):
    """A process group for tensors of the simulated device.

    Attributes:
        error: why a collective failed.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.error: BaseException | None = None
        self._rank = rank
        self._timeout = timeout
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)  # type: ignore[call-overload]
        self._stream = Stream()
        _STREAMS.append(self._stream)
        self._flags = HostFlags(2, device_of(load_simulator().device))
        self._number = 0
        self._queue: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=THREAD, daemon=True).start()

    def all_gather_single(self, out: Tensor, block: Tensor, opts: Any = None) -> _Work:
        return self._start(block, out, lambda rows: rows)

    def reduce_scatter_single(self, out: Tensor, packed: Tensor, opts: Any = None) -> _Work:
        def combine(rows: Tensor) -> Tensor:
            of_rank = rows.view(self.size(), self.size(), -1)[:, self._rank]
            return of_rank.mean(0, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)

        assert opts.reduceOp == dist.ReduceOp.AVG
        return self._start(packed, out, combine)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        mean = opts.reduceOp == dist.ReduceOp.AVG
        return self._start(tensors[0], tensors[0], lambda rows: rows.mean(0) if mean else rows.sum(0))

    # Their names in torch 2.11.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _start(self, source: Tensor, target: Tensor, combine: Callable[[Tensor], Tensor]) -> _Work:
        simulator, stream = load_simulator(), self._stream
        stream.wait_stream(current_stream())
        self._number += 1
        with stream:
            sent = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            come = torch.empty(target.shape, dtype=target.dtype, device="cpu", pin_memory=True)
            sent.copy_(source, non_blocking=True)
            simulator.write_value(stream, self._flags.address(_SENT), self._number, inside=True)
            self._queue.put(_Exchange(self._number, sent, come, combine))
            simulator.wait_value(stream, self._flags.address(_COME), self._number, inside=True)
            target.copy_(come, non_blocking=True)
            event = Event()
            event.record(stream)
        return _Work(self, event, source, target, sent, come)

    def _serve(self) -> None:
        while (exchange := self._queue.get()) is not None:
            Flag(self._flags, _SENT, exchange.number).wait()
            try:
                rows = [torch.empty_like(exchange.sent) for _ in range(self.size())]
                self._gloo.allgather([rows], [exchange.sent]).wait()
                exchange.come.copy_(exchange.combine(torch.stack(rows)).view(exchange.come.shape))
            except BaseException as error:
                self.error = error
            Flag(self._flags, _COME, exchange.number).raise_it()

    # What PyTorch, and the package, ask of a group.

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def options(self) -> Any:
        return self

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        return BACKEND

    def shutdown(self) -> None:
        self._queue.put(None)

    abort = shutdown


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(store, rank, size, timeout)


@cache
def group_of_all() -> dist.ProcessGroup:
    """All ranks, with collectives for tensors of the simulated device."""
    dist.Backend.register_backend(BACKEND, _make, devices=[device_module.NAME])
    group: dist.ProcessGroup = dist.new_group(backend=BACKEND)
    return group
