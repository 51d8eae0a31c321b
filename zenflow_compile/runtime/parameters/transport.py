"""The lanes, rings and threads that the offloaded parameters of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

from zenflow_compile.runtime.device.copy_lanes import CopyLane
from zenflow_compile.runtime.device.staging_ring import StagingRing
from zenflow_compile.runtime.device.stream_order import StreamOrder
from zenflow_compile.runtime.host.device_memory import DeviceMemory
from zenflow_compile.runtime.host.workers import HostWorkers
from zenflow_compile.runtime.nvme.cache import NvmeCache
from zenflow_compile.runtime.parameters.state_exchange import StateExchange
from zenflow_compile.runtime.recorder import Recorder


@dataclass(slots=True)
class Transport:
    """What the offloaded parameters of an engine share.

    Attributes:
        to_host: copies gradients. Its own lane, so that no gradient waits behind an upload.
        to_device: copies updated weights, ahead of their first uses.
        down_ring: buffers that gradients are split into.
        up_ring: buffers that uploads arrive in, until they are merged into the weights.
        workers: run the host updates.
        device_memory: of the engine, which may be given back: ``bring_back`` before a use.
        order: of calls on several streams; None where operators are complete when they return.
        exchange: moves state that changes sides; None where the training thread does, because copies cost it no wait.
        files: the state in files; None without such state.
        weight_files: likewise, new weights in files. Its own memory: see ``planning.plan.weight_window_bytes``.
        interrupted: an update was interrupted half-way.
    """

    to_host: CopyLane
    to_device: CopyLane
    down_ring: StagingRing
    up_ring: StagingRing
    workers: HostWorkers
    recorder: Recorder
    device_memory: DeviceMemory
    order: StreamOrder | None = None
    exchange: StateExchange | None = None
    files: NvmeCache | None = None
    weight_files: NvmeCache | None = None
    interrupted: bool = False

    @property
    def caches(self) -> tuple[NvmeCache | None, NvmeCache | None]:
        """Of state and of weights in files."""
        return self.files, self.weight_files

    def land(self) -> None:
        """Record the jobs that have ended since."""
        self.workers.land()
        if self.files is not None:
            self.files.files.land()
