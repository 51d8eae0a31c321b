"""The simulated machine without its device: time, copy lanes, workers, disk and collectives, each with its queue."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

from zenflow_compile.performance.hardware import HOST_PASS_BYTES, Hardware
from zenflow_compile.planning.plan import STREAM_BUFFERS, UPLOAD_RING
from zenflow_compile.prediction.transfers import FileTurn, FileTurns, WeightLoads
from zenflow_compile.prediction.workload import Flush, Load, Part, Subgroup
from zenflow_compile.timeline import D2H, DISK, H2D

_ZERO_S = 1e-12  # a span with less than this left has ended, up to rounding


@dataclass(slots=True)
class Span:
    """One piece of work of a lane.

    Attributes:
        seconds: remaining, at full speed.
        host_rate: bytes of host memory per second, read and written, that it takes at full speed.
        done: called at its end.
        begin: time of its start.
        cores: shared cores that it keeps busy.
    """

    seconds: float
    host_rate: float
    done: Callable[[], None]
    begin: float = 0.0
    cores: float = 0.0


class Clock:
    """Runs spans in parallel, one per lane, from one end of a span to the next.

    Attributes:
        now: seconds since the start.
    """

    def __init__(self, host_bandwidth: float, cores: float = math.inf) -> None:
        """``host_bandwidth``: bytes/s of host memory that spans share; ``cores`` likewise."""
        self.now = 0.0
        self._host_bandwidth = host_bandwidth
        self._cores = cores
        self._running: dict[str, Span] = {}

    def idle(self, lane: str) -> bool:
        """Whether ``lane`` is free to start something."""
        return lane not in self._running

    def start(self, lane: str, span: Span) -> None:
        """Start ``span`` on ``lane``, which is idle."""
        assert lane not in self._running, lane
        span.begin = self.now
        self._running[lane] = span

    def stop(self, lane: str) -> Span:
        """Interrupt the span of ``lane``; its ``seconds`` are the remaining ones."""
        return self._running.pop(lane)

    def advance(self) -> bool:
        """Advance to the next end of a span; False if no lane is busy."""
        running = self._running
        if not running:
            return False
        spans, speeds = running.values(), self._speeds() or repeat(1.0)
        passed = min([span.seconds / speed for span, speed in zip(spans, speeds, strict=False)])
        self.now += passed
        for span, speed in zip(spans, speeds, strict=False):
            span.seconds -= passed * speed
        ended = [lane for lane, span in running.items() if span.seconds <= _ZERO_S]
        for span in [running.pop(lane) for lane in ended]:
            span.done()
        return True

    def _speeds(self) -> list[float]:
        """The share of its full speed at which each span runs; empty if all run at full speed."""
        spans = self._running.values()
        asked = busy = 0.0
        for span in spans:
            asked += span.host_rate
            busy += span.cores
        if asked <= self._host_bandwidth and busy <= self._cores:
            return []
        memory = self._host_bandwidth / asked if asked > self._host_bandwidth else 1.0
        cores = self._cores / busy if busy > self._cores else 1.0
        return [min(memory if span.host_rate else 1.0, cores if span.cores else 1.0) for span in spans]


PEERS = "peers"
NETWORK = "network"
POOL = "workers"  # all workers together; they become a lane each when events are made

COPY_TOUCHES = 3  # of a copy within host memory: read, written, and fetched before it is overwritten
CHECKSUM_RATE = 5e9  # bytes per second and core of the checksums of state in files (measured on an EPYC: 4.9e9)


class Row(NamedTuple):
    """An event in seconds; ``step`` and ``param`` as in ``Event``."""

    lane: str
    kind: str
    begin: float
    end: float
    step: int
    param: str
    size: int


@dataclass(slots=True)
class HostUpdate:
    """The update of a part's update window that ``step`` flushes: gradients down, host update, weights up, merge.

    Attributes:
        position: of the block in the forward.
        copies: copies of its gradients in flight.
        final: when its gradient became final; None before.
        seconds: of host update at full speed; remaining: of them; reported: bytes that are in the timeline.
        turn: of its state, if that is read from a file.
        updated: the host update is done. here: the new weights are on the device, and gathered from other devices, or
            they are where the next load reads them.
    """

    step: int
    position: int
    name: str
    part: Part
    window: Flush
    copies: int = 0
    final: float | None = None
    seconds: float = 0.0
    remaining: float = 0.0
    reported: int = 0
    turn: FileTurn | None = None
    updated: bool = False
    here: bool = False

    def __lt__(self, other: HostUpdate) -> bool:
        """Earliest step first, then earliest use."""
        return (self.step, self.position) < (other.step, other.position)


@dataclass(slots=True)
class _Transfer:
    """Bytes for a lane, at ``rate`` bytes/s unless a shared resource slows them down."""

    kind: str
    size: int
    rate: float
    step: int
    name: str
    done: Callable[[], None]


class Lanes:
    """Serves each lane's queue in its order; ``dispatch`` starts every transfer and update that can start.

    Attributes:
        rows: the timeline so far.
        step: the device's current step.
        files: the cache of state in files.
        weights: the loads of offloaded weights.
        pool_rate: bytes of host memory per second that all workers of the device read and write at full speed.
    """

    def __init__(self, hardware: Hardware, workers: int, files: FileTurns, weights: WeightLoads) -> None:
        self._on_host = hardware.device_cores is not None
        self._workers = workers
        self.clock = Clock(hardware.host_bandwidth / hardware.devices, hardware.cores if self._on_host else math.inf)
        self.rows: list[Row] = []
        self.step = 0
        self.files = files
        self.weights = weights
        self._hardware = hardware
        self.pool_rate = workers * hardware.adam_per_core * HOST_PASS_BYTES
        self._down: deque[_Transfer] = deque()
        self._peers: deque[_Transfer] = deque()
        self._network: deque[_Transfer] = deque()
        self._state_in: deque[_Transfer] = deque()
        self._uploads: list[tuple[int, HostUpdate]] = []  # heap, by the step whose forward needs them
        self._ready: list[HostUpdate] = []  # heap of host updates
        self._updating: HostUpdate | None = None
        self._in_upload_ring = 0
        self._in_stream_buffers = 0
        self._flushing: set[str] = set()  # subgroups whose state is being written back

    def copy_down(self, kind: str, size: int, step: int, name: str, done: Callable[[], None]) -> None:
        """Queue a copy from device to host."""
        self._down.append(_Transfer(kind, size, self._hardware.link_to_host, step, name, done))

    def exchange(self, size: int, step: int, name: str, done: Callable[[], None]) -> None:
        """Queue a collective in which this device sends ``size`` bytes; call ``done`` at once if there are none."""
        self._send(self._peers, self._hardware.peer_bandwidth, size, step, name, done)

    def exchange_across(self, size: int, step: int, name: str, done: Callable[[], None]) -> None:
        """Likewise with devices of other nodes."""
        self._send(self._network, self._hardware.network_bandwidth, size, step, name, done)

    def _send(
        self,
        queue: deque[_Transfer],
        rate: float | None,
        size: int,
        step: int,
        name: str,
        done: Callable[[], None],
    ) -> None:
        if not size:
            done()
            return
        assert rate is not None
        queue.append(_Transfer("copy", size, rate, step, name, done))

    def stream_in(self, group: Subgroup, step: int, done: Callable[[], None]) -> None:
        """Queue the copy of a subgroup's state into the next free buffer."""
        rate = self._hardware.link_to_device
        self._state_in.append(_Transfer("state", group.state, rate, step, group.name, done))

    def stream_out(self, group: Subgroup, step: int) -> None:
        """Queue the copy of a subgroup's state back to the host, which frees its buffer."""

        def flushed() -> None:
            self._in_stream_buffers -= 1
            self._flushing.remove(group.name)

        self._flushing.add(group.name)
        self.copy_down("state", group.state, step, group.name, flushed)

    def write_back(self, load: Load, step: int) -> None:
        """Queue the copy of an updated weight back to the host, which frees its space in the ring."""

        def written() -> None:
            self.weights.being_written[load.name] -= 1
            self.weights.release(load.weight)

        self.weights.being_written[load.name] += 1
        self.copy_down("write_back", load.size, step, load.name, written)

    def submit(self, job: HostUpdate) -> None:
        """Queue the host update of a job whose gradients are final and in host memory."""
        if job.window.file:
            begin = partial(self._begin_update, job)
            job.turn = self.files.need(job.step, job.position, job.window.params, begin)
        else:
            self._begin_update(job)

    def queue_upload(self, job: HostUpdate, needed: int) -> None:
        """Queue an upload of new weights, if there are any to upload.

        They go up in the order of their use, also if a later job is done first.

        ``needed``: the step whose forward needs them first; the job's own, if the step itself waits.
        """
        if job.window.upload:
            heapq.heappush(self._uploads, (needed, job))

    def merged(self, job: HostUpdate) -> None:
        """The upload of a job was merged into its weights, which frees its buffer in the ring."""
        self._in_upload_ring -= job.window.upload > 0

    def dispatch(self) -> None:
        """Start every transfer and update that can start now."""
        if self._down and self.clock.idle(D2H):
            self._start(D2H, self._down.popleft())
        for lane, queue in ((PEERS, self._peers), (NETWORK, self._network)):
            if queue and self.clock.idle(lane):
                self._start(lane, queue.popleft())
        if self.clock.idle(H2D):
            self._dispatch_to_device()
        if self.clock.idle(DISK) and (found := self.files.next_transfer()) is not None:
            self._move(*found)
        self._dispatch_workers()

    def _dispatch_to_device(self) -> None:
        """State first: the device waits for it, while uploads of a blocking step come last in any case.

        Then what is used first, an upload or a load.
        """
        state = self._state_in[0] if self._state_in else None
        if state and state.name not in self._flushing and self._in_stream_buffers < STREAM_BUFFERS:
            self._in_stream_buffers += 1
            self._start(H2D, self._state_in.popleft())
            return
        rate = self._hardware.link_to_device
        upload = self._next_upload()
        request = self.weights.next_request(self._in_upload_ring, shared=bool(self._uploads or self._in_upload_ring))
        if request is not None and (upload is None or request.deadline <= upload):
            load = request.load
            self.weights.begin()
            self._start(
                H2D, _Transfer("load", load.size, rate, request.step, load.name, lambda: self.weights.copied(load))
            )
        elif upload is not None:
            _, job = heapq.heappop(self._uploads)
            self._in_upload_ring += 1
            self._start(H2D, _Transfer("copy", job.window.upload, rate, job.step, job.name, lambda: self._gather(job)))

    def _next_upload(self) -> tuple[int, float] | None:
        """Step and position that need the next upload; None if it cannot begin."""
        if not self._uploads or not self._uploads[0][1].updated:
            return None
        loads = self.weights.in_staging
        # One buffer is left to loads: the device may wait for a weight that is read before the uploaded ones. Loads
        # leave one to uploads, too, so that neither waits for the other in a circle.
        most = UPLOAD_RING - self.weights.expects_loads
        if self._in_upload_ring >= most or self._in_upload_ring + loads >= UPLOAD_RING:
            return None
        needed, job = self._uploads[0]
        return needed, job.position

    def _gather(self, job: HostUpdate) -> None:
        def here() -> None:
            job.here = True

        self.exchange(job.window.upload * (self._hardware.devices - 1), job.step, job.name, here)

    def _dispatch_workers(self) -> None:
        """All workers take the job with the earliest deadline, and interrupt a later one for it: tasks are small."""
        if not self._ready:
            return
        if (running := self._updating) is not None:
            if not self._ready[0] < running:
                return
            span = self.clock.stop(POOL)
            self._report(running, span.begin, span.seconds)
            running.remaining = span.seconds
            heapq.heappush(self._ready, running)
        job = self._updating = heapq.heappop(self._ready)
        rate = job.window.host / job.seconds if job.seconds else 0.0
        span = Span(job.remaining, rate, lambda: self._updated(job, span.begin), cores=self._workers)
        self.clock.start(POOL, span)

    def _updated(self, job: HostUpdate, begin: float) -> None:
        self._updating = None
        self._report(job, begin, 0.0)
        job.updated = True
        job.here = job.here or not job.window.upload
        if job.turn is not None:
            self.files.changed(job.turn)

    def _report(self, job: HostUpdate, begin: float, remaining: float) -> None:
        done = round(job.window.host * (1.0 - remaining / job.seconds)) if job.seconds else job.window.host
        if self.clock.now > begin:
            size = done - job.reported
            self.rows.append(Row(POOL, "host_update", begin, self.clock.now, job.step, job.name, size))
            job.reported = done

    def _begin_update(self, job: HostUpdate) -> None:
        job.seconds = max(job.window.host / self.pool_rate, job.window.converting / self._workers)
        job.remaining = job.seconds
        heapq.heappush(self._ready, job)

    def _move(self, kind: str, turn: FileTurn) -> None:
        rate = self._hardware.disk_read if kind == "read" else self._hardware.disk_write
        assert rate is not None
        moved = partial(self.files.was_read if kind == "read" else self.files.was_written, turn)
        self._start(DISK, _Transfer(kind, turn.size, rate / self._hardware.devices, self.step, turn.name, moved))

    def _start(self, lane: str, transfer: _Transfer) -> None:
        def done() -> None:
            row = Row(lane, transfer.kind, span.begin, self.clock.now, transfer.step, transfer.name, transfer.size)
            self.rows.append(row)
            transfer.done()

        host_rate = (
            0.0 if lane in (PEERS, NETWORK) else transfer.rate * (COPY_TOUCHES if self._copies_within(lane) else 1)
        )
        span = Span(transfer.size / transfer.rate, host_rate, done, cores=self._cores_of(lane, transfer))
        self.clock.start(lane, span)

    def _cores_of(self, lane: str, transfer: _Transfer) -> float:
        """Cores that a transfer takes from a device that computes on them: a copy runs in one thread."""
        if lane == DISK:
            return transfer.rate / CHECKSUM_RATE
        return float(self._copies_within(lane))

    def _copies_within(self, lane: str) -> bool:
        """Whether a copy has both ends in host memory."""
        return self._on_host and lane in (D2H, H2D)
