"""The lanes, rings, threads and order of work that the offloaded parameters of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

from zenflow_compile.runtime.device.copy_lanes import CopyLane, Ticket
from zenflow_compile.runtime.device.device import Stream, Streams
from zenflow_compile.runtime.device.staging_ring import StagingRing
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.nvme.cache import NvmeCache
from zenflow_compile.runtime.parameters.given_back_memory import DeviceMemory
from zenflow_compile.runtime.parameters.state_exchange import ImmediateExchange, StateExchange
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline import DeviceEvent


class StreamOrder:
    """Makes the work of an engine run in the order of its calls, whatever the stream of each call.

    PyTorch joins the streams of a backward with that of its caller where it accumulates gradients, but gradients that a
    graph offloads never get there. Engine memory (selected slices, norms, staging buffers, the accumulator) passes from
    one call to the next, so each call on another stream first waits for the stream of the last one.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._last: Stream | None = None
        self._step: tuple[Stream, DeviceEvent] | None = None  # of the last call, if that was an optimizer step

    def follow(self) -> None:
        """Call it before the calling thread queues work on engine memory."""
        current, last = self._streams.current(), self._last
        if last is not None and last != current:
            current.wait_stream(last)
        self._last, self._step = current, None

    def end_step(self) -> None:
        """An optimizer step has queued all of its work."""
        current = self._streams.current()
        event = self._streams.event()
        event.record(current)
        self._last, self._step = current, (current, event)

    def follow_step(self) -> None:
        """Call it instead of ``follow`` where the stream must not wait for what others queued behind the last step.

        FSDP2 reads shards in a stream that runs ahead of the model's forward.
        """
        current, last, step = self._streams.current(), self._last, self._step
        if step is None or last not in (current, step[0]):
            self.follow()
            return
        if last != current:
            current.wait_event(step[1])
        self._last = current


@dataclass(slots=True)
class Transport:
    """What the offloaded parameters of an engine share.

    Attributes:
        to_host: copies gradients. Its own lane, so that no gradient waits behind an upload.
        to_device: copies updated weights, ahead of their first uses.
        down_ring: buffers that gradients are split into.
        up_ring: buffers that uploads arrive in, until they are merged into the weights.
        device_memory: of the engine, which may be given back: ``bring_back`` before a use.
        order: of calls on several streams; None where operators are complete when they return.
        exchange: moves state that changes sides.
        files, weight_files: state, and new weights, in files, each with its own memory: see
            ``planning.cached_state.weight_window_bytes``. None without such.
    """

    to_host: CopyLane
    to_device: CopyLane
    down_ring: StagingRing
    up_ring: StagingRing
    workers: Workers
    recorder: Recorder
    device_memory: DeviceMemory
    exchange: ImmediateExchange | StateExchange
    order: StreamOrder | None = None
    files: NvmeCache | None = None
    weight_files: NvmeCache | None = None
    interrupted: bool = False

    @property
    def caches(self) -> tuple[NvmeCache | None, NvmeCache | None]:
        """Of state and of weights in files."""
        return self.files, self.weight_files

    def wait_on_device(self, ticket: Ticket, name: str) -> None:
        """Make the device wait for a copy of the parameter ``name``, or this thread where a device cannot."""
        with self.recorder.stall(True, param=name):
            ticket.wait_on_device()

    @property
    def may_have_failed(self) -> bool:
        """Whether a step has to look for what failed before it begins."""
        lanes = self.to_host.failed or self.to_device.failed
        in_files = self.files is not None and self.files.files.threads.failed
        return lanes or self.workers.failed or in_files or self.interrupted

    def land(self) -> None:
        """Record the jobs that have ended since."""
        self.workers.land()
        if self.files is not None:
            self.files.files.threads.land()
