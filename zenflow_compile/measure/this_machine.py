"""Measures this machine for the performance model, when an optimizer leaves choices to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zenflow_compile.measure.bandwidth import matmul_flops, rates, resident_rate
from zenflow_compile.measure.disk import disk_rates
from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import HOST_PASS_BYTES, LEFT_FREE, Hardware
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.planning.planners import OFFLOADABLE_DTYPES
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.host.arena import available_host_memory
from zenflow_compile.runtime.host.cores import physical_cores
from zenflow_compile.runtime.host.host_kernel import HostKernel
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.parameters.capacity import free_device_bytes, worker_cores
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.host_rate import host_rate


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
    kernel = HostKernel(dtype, dtype, steps)
    workers = Workers(len(cores), Recorder(), cores)
    try:
        return host_rate(kernel, plan, workers)
    finally:
        workers.close()
