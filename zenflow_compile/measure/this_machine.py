"""Measures this machine for the performance model, when an optimizer leaves choices to it, and disks for the doctor.

A disk is measured below a directory, with reads and writes as the NVMe cache makes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor, uint8

from zenflow_compile.measure.bandwidth import matmul_flops, rates, resident_rate
from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import HOST_PASS_BYTES, LEFT_FREE, Hardware
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.planning.planners import OFFLOADABLE_DTYPES
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.host.arena import HostArena, available_host_memory
from zenflow_compile.runtime.host.cores import physical_cores
from zenflow_compile.runtime.host.host_adam import HostAdam
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.nvme.state_file import FILE_THREADS, PIECE_BYTES, ScratchDirectory
from zenflow_compile.runtime.parameters.capacity import free_device_bytes, worker_cores
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.host_rate import host_rate

_MOST_PIECES = 64  # and at most half of the free space, but at least one
_BUDGET_SECONDS = 0.5  # each way: no further piece begins after it


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes per second read and written, one direction at a time, with checksums and as many threads as the cache has,
    and the free space of the file system."""

    read: float
    write: float
    free_bytes: int


def disk_rates(directory: str) -> DiskRates:
    """Measure in about a second, past the page cache where the file system allows it; removes its file.

    Raises:
        ValueError: it cannot be used, see ``ScratchDirectory``; or a read or write failed.
    """
    arena = HostArena(FILE_THREADS * PIECE_BYTES)
    buffers = [arena.take((PIECE_BYTES,), uint8).fill_(1) for _ in range(FILE_THREADS)]
    scratch = ScratchDirectory(directory)
    try:
        free = scratch.free_bytes()
        pieces = max(1, min(_MOST_PIECES, free // 2 // PIECE_BYTES))
        file = scratch.create(
            pieces * PIECE_BYTES,
            {"holds": "nothing: a measurement"},
            purpose="to measure its rates",
            otherwise="leave nvme_path out, so that no state goes to files",
        )
        written, write_seconds = _move(file.write, buffers, pieces)
        read, read_seconds = _move(file.read, buffers, written)
    except OSError as error:
        raise scratch.unusable(error) from error
    finally:
        scratch.close()
    return DiskRates(read * PIECE_BYTES / read_seconds, written * PIECE_BYTES / write_seconds, free)


def _move(transfer: Callable[[int, Tensor], int], buffers: list[Tensor], pieces: int) -> tuple[int, float]:
    """Move up to ``pieces`` pieces until the time is over. Returns their number and the seconds."""
    numbers = count()
    begin = time.perf_counter()

    def run(buffer: Tensor) -> int:
        moved = 0
        while (number := next(numbers)) < pieces and time.perf_counter() - begin < _BUDGET_SECONDS:
            transfer(number * PIECE_BYTES, buffer)
            moved += 1
        return moved

    with ThreadPoolExecutor(len(buffers)) as pool:
        moved = sum(pool.map(run, buffers))
    return moved, time.perf_counter() - begin


def measured_hardware(options: Options, params: Sequence[Tensor]) -> Hardware:
    """Measure this machine with one device, in about a second, with the optimizer's own kernels and threads.

    The numbers mean the same as those of ``doctor``, which measures longer (``hardware_of``). ``utilization`` is 1:
    forward and backward are assumed to be as fast as a large product of matrices in the weights' dtype. They are
    slower, so that more host work is hidden than predicted, never less. ``device_bytes`` is the free memory of the
    device, and the memory of ``params`` there. If the device is the CPU, both memories are the same one.

    Args:
        options: workers, update window and ``nvme_path``; without a path no disk is measured.
        params: of the optimizer, all on one device.

    Raises:
        ValueError: ``nvme_path`` cannot be used.
    """
    largest = max(params, key=lambda param: (param.dtype in OFFLOADABLE_DTYPES, param.numel()))
    dtype = largest.dtype if largest.dtype in OFFLOADABLE_DTYPES else torch.float32
    device = largest.device
    cores = worker_cores(options, device)
    free = free_device_bytes(device) + device_of(device).unused_bytes()
    memory = rates(device, tuple(core.logical for core in physical_cores()))
    per_worker = _host_rate(options, dtype, device, cores) / len(cores)
    path = options.nvme_path if options.policy == "auto" or options.in_files else None
    disk = None if path is None else disk_rates(path)
    return Hardware(
        name="this machine",
        device_flops=matmul_flops(device, dtype),
        utilization=1.0,
        device_bytes=free + sum(param.numel() * param.dtype.itemsize for param in params),
        device_bandwidth=resident_rate(device, dtype, free).bytes,
        link_to_host=memory.to_host,
        link_to_device=memory.to_device,
        host_bytes=available_host_memory()[0],
        host_bandwidth=max(memory.host, per_worker * len(cores)),  # an update mostly reads, and may be faster
        cores=len(cores) + LEFT_FREE,
        device_cores=device_of(device).compute_threads,
        adam_per_core=per_worker / HOST_PASS_BYTES,
        disk_read=None if disk is None else disk.read,
        disk_write=None if disk is None else disk.write,
        disk_bytes=None if disk is None else disk.free_bytes,
        sources={},
    )


def _host_rate(options: Options, dtype: torch.dtype, device: torch.device, cores: Sequence[int]) -> float:
    """Bytes per second that all workers read and write, with update windows as long as the optimizer's."""
    if options.policy == "auto":
        # The others have no update windows, and nearly the same rate. What stays resident does not matter.
        options = replace(options, policy="zenflow", device_share=0.0)
    steps = options.longest_window
    plan = ParamPlan(
        index=0, name="", shape=(1, 1), dtype=dtype, placement=Placement.HOST, slices=1, length=1, interval=steps
    )
    kernel = HostAdam(dtype, dtype, steps)
    workers = Workers(len(cores), Recorder(), cores)
    try:
        return host_rate(kernel, plan, workers)
    finally:
        workers.close()
