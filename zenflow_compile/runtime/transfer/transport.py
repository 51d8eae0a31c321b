"""What all offloaded parameters of an engine share on their way between device and host."""

from __future__ import annotations

from dataclasses import dataclass

from zenflow_compile.runtime.host.workers import WorkerPool
from zenflow_compile.runtime.parameters.host_state import FlushedWindow
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.transfer.copy_lanes import CopyLane, Ticket
from zenflow_compile.runtime.transfer.staging_ring import StagedBlock, StagingRing


@dataclass(frozen=True, slots=True)
class Transport:
    """What all offloaded parameters of an engine share."""

    to_host: CopyLane
    to_device: CopyLane
    down_ring: StagingRing
    up_ring: StagingRing
    workers: WorkerPool
    recorder: Recorder


@dataclass(slots=True)
class Upload:
    """A landed-to-be update on its way to the device."""

    close: FlushedWindow
    block: StagedBlock
    ticket: Ticket
