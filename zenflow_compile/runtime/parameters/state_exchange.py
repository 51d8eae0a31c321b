"""Moves the state of slices that change sides, while training goes on.

[Note: exchange] The device gathers the rows of leaving slices in a buffer, which a lane copies to the host. A worker's
job swaps them with the rows of entering slices there, in place, and the other lane copies these back into the buffer.
The device puts them into its state before the next update of selected slices, or when another exchange needs the
buffer. Nothing else reads that state: forward and backward need the weights and the selection alone. Only streams and
workers wait, as long as the lane itself can wait for a job.

Where the host also keeps the weights of deferred slices, in the model's dtype, the same job casts the masters that it
puts into the host's state, and writes them there. On the way it converts rows from and to the form of the host's state.

How many slices really change sides is known on the device alone, so a bound of it is copied. Rows beyond the real ones
come back as they went.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from zenflow_compile.native.library import DTYPES, EXCHANGE, Exchange, HostJob, Record
from zenflow_compile.planning.plan import EXCHANGE_BUFFERS, FP32_BYTES, ParamPlan
from zenflow_compile.runtime.device.copy_lanes import CopyError, CopyLane, Ticket
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device_updates.selection import Reselection
from zenflow_compile.runtime.host.arena import HostArena, carved_bytes
from zenflow_compile.runtime.host.state_store import UploadBuffer
from zenflow_compile.runtime.host.workers import Bounds, Job, Work, Workers, bounds_of
from zenflow_compile.runtime.parameters.device_state import DeviceState, exchange_rows
from zenflow_compile.runtime.parameters.host_state import HostState
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.state_forms import PLAIN, StateForm


@dataclass(slots=True)
class ExchangeWork(Work):
    """Swaps rows of host state with rows in the host's half of an exchange buffer.

    Attributes:
        state: of the host, as ``form`` stores it.
        blocks: f32[n, length] each.
    """

    kind: ClassVar[str] = "state"
    state: Sequence[Tensor]
    rows: Tensor
    blocks: Sequence[Tensor]
    bounds: Bounds
    weights: Tensor | None = None
    form: StateForm = PLAIN

    def describe(self, memory: HostJob) -> object:
        assert all(each.is_contiguous() for each in (*self.state, self.rows, *self.blocks))
        weights = self.weights
        exchange = Exchange(rows=self.rows.data_ptr(), state=self.form.describe(self.state, weights))
        exchange.state.length = self.blocks[0].shape[1]
        exchange.block = type(exchange.block)(*(each.data_ptr() for each in self.blocks))
        if weights is not None:
            # Native code gets an address alone: another layout would be written out of bounds.
            assert weights.shape == (len(self.state[0]), self.blocks[0].shape[1])
            assert weights.is_contiguous()
            assert weights.is_cpu
            assert weights.dtype.is_floating_point
            exchange.weights, exchange.weights_dtype = weights.data_ptr(), DTYPES[weights.dtype]
        memory.kind = EXCHANGE
        memory.exchange = ctypes.pointer(exchange)
        return self.state, self.rows, self.blocks, weights, exchange

    def touched_bytes(self, task: int, record: Record) -> int:
        """Both places of a row are read and written."""
        rows: int = record.rows
        per_element = 2 * (sum(each.itemsize for each in self.state) + len(self.blocks) * FP32_BYTES)
        if self.weights is not None:
            per_element += self.weights.itemsize
        return rows * self.blocks[0].shape[1] * per_element


@dataclass(slots=True)
class _Buffer:
    """f32 memory of equal size on both sides: rows of master and moments, and behind them the rows' numbers, as i32."""

    on_device: Tensor
    on_host: Tensor


@dataclass(slots=True)
class _Chunk:
    """Rows of one parameter that are in a buffer.

    Attributes:
        rows: i64[n] of the device's state.
        job: swaps them on the host.
        ticket: the copy back to the device; None before it is queued.
    """

    buffer: _Buffer
    device: DeviceState
    rows: Tensor
    job: Job
    ticket: Ticket | None = None


class ImmediateExchange:
    """Moves rows of state in the calling thread: where the device is the CPU, and copies cost this thread no wait."""

    overlaps: Literal[False] = False
    nbytes: ClassVar[int] = 0

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def start(
        self,
        device: DeviceState,
        host: HostState,
        change: Reselection,
        *,
        step: int,
        deadline: int,
        weights: UploadBuffer | None = None,
        reads: Ticket | None = None,
    ) -> None:
        """Swap rows of ``device`` and ``host``: see ``StateExchange.start``. Waits for all jobs of ``host``."""
        host.wait()
        if reads is not None:
            reads.settle()
        begin = time.perf_counter_ns()
        host_rows = device_of(change.host_rows.device).to_host(change.host_rows, "selection")
        of_weights = nullcontext() if weights is None else weights.acquire(write=True)
        with host.acquire(write=True) as state, of_weights as rows:
            moved = exchange_rows(device.rows, replace(state, weights=rows), change.device_rows, host_rows)
        self._recorder.moved_state(moved, begin, param=device.plan.name)

    def fit(self, buffer_bytes: int) -> None:
        """It needs no buffers."""

    def finish(self) -> None:
        """Nothing is in flight."""

    def abandon(self) -> None:
        """Nothing is in flight."""

    def free(self) -> None:
        """It has no memory."""

    def list_memory(self, found: MemoryList) -> None:
        """It has no memory."""


@dataclass(eq=False)
class StateExchange:
    """Moves rows of state between the sides; see [Note: exchange].

    A few buffers take turns, so that memory is bounded: an exchange that finds none free makes the device wait for the
    oldest one.
    """

    overlaps: Literal[True] = field(default=True, init=False)

    _to_host: CopyLane
    _to_device: CopyLane
    _workers: Workers
    _recorder: Recorder
    _device: Device
    _arena: HostArena | None = None
    _pinned: bool = False
    _buffers: list[_Buffer] = field(default_factory=list)
    # Oldest first, and the only record of which buffers are in use: it changes in one assignment, so that an interrupt
    # leaves no buffer with two users.
    _in_flight: tuple[_Chunk, ...] = ()

    # Memory.

    def fit(self, buffer_bytes: int) -> None:
        """Have buffers of at least ``buffer_bytes``. Finishes exchanges in flight if they are too small.

        Raises:
            torch.OutOfMemoryError: the device has too little memory. The old buffers stay in use.
        """
        elements = buffer_bytes // FP32_BYTES
        if elements <= (self._buffers[0].on_device.numel() if self._buffers else 0):
            return
        self.finish()
        # First: the allocator does not know of copies on a lane's stream, and would reuse the old memory.
        self._to_host.settle()
        self._to_device.settle()
        shape = (EXCHANGE_BUFFERS, elements)
        on_device = torch.empty(shape, dtype=torch.float32, device=self._device.torch_device)
        arena = HostArena(carved_bytes([(shape, torch.float32)]), self._device)
        on_host = arena.take(shape, torch.float32)
        self._pinned = arena.pin(self._device)
        self.free()
        self._arena = arena
        self._buffers = [_Buffer(*halves) for halves in zip(on_device, on_host, strict=True)]

    @property
    def nbytes(self) -> int:
        """Memory on either side."""
        return sum(buffer.on_device.nbytes for buffer in self._buffers)

    def free(self) -> None:
        """Free the host's memory, when no copy is in flight. Idempotent."""
        self._buffers = []
        if self._arena is not None:
            self._arena.close()

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory; no exchange may be in flight."""
        assert not self._in_flight
        found.scratch(*(buffer.on_device for buffer in self._buffers))

    # An exchange.

    def start(
        self,
        device: DeviceState,
        host: HostState,
        change: Reselection,
        *,
        step: int,
        deadline: int,
        weights: UploadBuffer | None = None,
        reads: Ticket | None = None,
    ) -> None:
        """Start to swap rows of ``device`` and ``host``, behind all jobs of ``host``.

        After an interrupt the two sides do not match: the caller marks the update as partially applied.

        Args:
            weights: in the order of the host's state. The jobs cast each master that they put into that state, and
                write it there. None writes no weights.
            reads: a copy that may still read ``weights``, which the jobs wait for. A later copy that reads them goes
                behind ``host.exchanges``.
        """
        plan = device.plan
        at_once = self._buffers[0].on_device.nbytes // plan.swap_bytes
        parts = (torch.split(each, at_once) for each in (change.device_rows, change.host_rows))
        pairs = list(zip(*parts, strict=True))
        for number, (rows, host_rows) in enumerate(pairs, start=1):
            last = number == len(pairs)
            self._send(device, host, rows, host_rows, weights, reads, last=last, step=step, deadline=deadline)

    def _send(
        self,
        device: DeviceState,
        host: HostState,
        rows: Tensor,
        host_rows: Tensor,
        weights: UploadBuffer | None,
        reads: Ticket | None,
        *,
        last: bool,
        step: int,
        deadline: int,
    ) -> None:
        if len(self._in_flight) == len(self._buffers):
            self._finish_oldest()
        in_use = [chunk.buffer for chunk in self._in_flight]
        buffer = next(buffer for buffer in self._buffers if all(buffer is not each for each in in_use))
        blocks, of_host = _views(buffer.on_device, len(rows), device.plan)
        if device.form.plain:
            for state, block in zip(device.rows.stored, blocks, strict=True):
                torch.index_select(state, 0, rows, out=block)  # without temporaries
        else:
            for state, block in zip(device.rows.read(rows), blocks, strict=True):
                block.copy_(state)
        of_host.copy_(host_rows)
        used = sum(block.numel() for block in blocks) + len(rows)
        name = device.plan.name
        copied = self._to_host.submit(
            buffer.on_host[:used], buffer.on_device[:used], step=self._recorder.step, param=name, kind="state"
        )
        blocks, of_host = _views(buffer.on_host, len(rows), device.plan)
        inputs = [copied]
        if reads is not None and not reads.done():
            inputs.append(reads)  # it may still read rows of the weights, which the job writes
        deadline, needs = host.prepare(step=step, deadline=deadline)
        written = None
        if weights is not None:
            needs = needs.and_of(weights.prepare(step=step, deadline=deadline, fresh=False))
            written = weights.content()
        size = -(-len(rows) // self._workers.count)
        parts = [slice(first, min(first + size, len(rows))) for first in range(0, len(rows), size)]
        # As for uploads: a lane that waits for a job must copy from pinned memory.
        flag = host.next_flag() if self._pinned else None
        swap = ExchangeWork(host.state(), of_host, blocks, bounds_of(parts), written, host.form)
        job = Job(
            swap, inputs, needs.after, host.pool, behind=needs.behind,
            deadline=deadline, step=step, param=name, flag=flag,
        )  # fmt: skip
        chunk = _Chunk(buffer, device, rows, job)
        host.add_exchange(job, last=last)  # from here on it can be withdrawn
        if weights is not None:
            weights.used_by(job, last=last)
        self._workers.submit(job)
        self._in_flight = (*self._in_flight, chunk)

    def moves(self, device: DeviceState) -> bool:
        """Whether rows of ``device`` are on their way."""
        return any(chunk.device is device for chunk in self._in_flight)

    def start_uploads(self) -> None:
        """Queue the copies back, behind their jobs. Call it when no forward waits for weights on the same lane."""
        for chunk in self._in_flight:
            if chunk.ticket is None and (chunk.job.is_set or self._to_device.can_wait_for(chunk.job)):
                self._start_upload(chunk)

    def _start_upload(self, chunk: _Chunk) -> None:
        # It overwrites what the copy to the host reads: that one is an input of the job. If an interrupt loses the
        # ticket, the copy is repeated behind it on the same lane.
        plan = chunk.device.plan
        used = plan.wide_tensors * len(chunk.rows) * plan.length
        target, source = chunk.buffer.on_device[:used], chunk.buffer.on_host[:used]
        chunk.ticket = self._to_device.submit(
            target, source, step=self._recorder.step, param=plan.name, kind="state", after=chunk.job
        )

    def finish(self) -> None:
        """Order the device's state behind all exchanges. Call it before that state is read or written.

        Raises:
            CopyError: a copy failed.
            RuntimeError: a job failed.
        """
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        chunk = self._in_flight[0]
        job, name = chunk.job, chunk.device.plan.name
        if chunk.ticket is None:
            if job.error is not None or not (job.is_set or self._to_device.can_wait_for(job)):
                with self._recorder.stall(not job.is_set, param=name, on_host=True):
                    job.wait()
            self._start_upload(chunk)
        assert chunk.ticket is not None
        try:
            with self._recorder.stall(not chunk.ticket.done(), param=name):
                chunk.ticket.wait_on_device()
        except CopyError:
            job.wait()  # re-raise the job's error if it failed: it is the root cause
            raise
        # An interrupt below is harmless: the chunk stays in flight, and the rows are put in place again.
        blocks, _ = _views(chunk.buffer.on_device, len(chunk.rows), chunk.device.plan)
        chunk.device.rows.write(blocks, chunk.rows)
        if (streams := self._device.streams) is not None:
            # Hazard: a load in a forward may be the one that needs the state. Its stream may be late, and that of the
            # optimizer step, which the rows were allocated in, would reuse their memory.
            streams.record_use(chunk.rows)
        self._in_flight = self._in_flight[1:]

    def abandon(self) -> None:
        """Forget all exchanges, failed ones too; no thread and no copy uses the buffers afterwards.

        Jobs that were never queued must have been withdrawn.
        """
        for chunk in self._in_flight:
            chunk.job.settle()  # a worker or a lane uses the buffer until then
            if chunk.ticket is not None:
                chunk.ticket.settle()
        self._in_flight = ()


def _views(memory: Tensor, rows: int, plan: ParamPlan) -> tuple[tuple[Tensor, ...], Tensor]:
    """View the first bytes of a half of a buffer as f32[rows, length] for each tensor of the state, and i32[rows]."""
    elements = plan.wide_tensors * rows * plan.length
    blocks = memory[:elements].view(plan.wide_tensors, rows, plan.length).unbind()
    return blocks, memory[elements : elements + rows].view(torch.int32)
