"""What a plan needs of the machine, checked before anything is allocated: host memory, staging buffers, cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import UPLOAD_RING, ParamPlan, Plan, host_bytes_of
from zenflow_compile.planning.planners import ParamSpec, extend_plan
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.errors import less_host_memory, smaller_uploads
from zenflow_compile.runtime.host.arena import available_host_memory, require_host_memory
from zenflow_compile.runtime.host.cgroups import cpu_quota
from zenflow_compile.runtime.host.cores import choose_cores, local_ranks, physical_cores, worker_count
from zenflow_compile.runtime.nvme.cache import NO_CACHES, CacheBytes, cache_bytes
from zenflow_compile.runtime.parameters.shared_memory import refuse_overlap
from zenflow_compile.runtime.sharding import given, sharded_by


def checked_plan(
    plan: Plan,
    params: Sequence[Tensor],
    new: Sequence[tuple[str, Parameter]],
    options: Options,
    *,
    allocated: int = 0,
    freed: int = 0,
    caches: CacheBytes = NO_CACHES,
    exchanges: bool = False,
    processes: int = 1,
) -> Plan:
    """Extend ``plan`` by further parameters, and check that the machine can hold them. Allocates nothing.

    Args:
        params: all parameters, the new ones last.
        new: (name, parameter) pairs of the new ones.
        allocated: number of parameters whose memory is allocated already.
        freed: host memory that is in use now, and freed before this plan allocates.
        caches: host memory that the caches of files have already.
        exchanges: state that changes sides goes through buffers.
        processes: on this machine that are about to allocate as much.

    Raises:
        ValueError: more host memory is needed than the machine has, an upload is larger than ``staging_bytes``, the
            state of a parameter, and its weight if that is in a file, are larger than ``host_window_bytes``, or the
            memory of an offloaded parameter overlaps that of another one.
    """
    exchange_bytes = plan.exchange_bytes
    plan = extend_plan(plan, specs_of(new), options)
    refuse_overlap(plan.params, params)
    needed = host_bytes_of(plan.params[allocated:])
    if exchanges:
        needed += plan.exchange_bytes - exchange_bytes
    for size, allocated_bytes in zip(nvme_cache_bytes(plan, options), caches, strict=True):
        if size > allocated_bytes:
            needed += size
    require_host_memory(needed - freed, less_host_memory(options), processes)
    upload_buffers(plan, options)
    return plan


def specs_of(named: Sequence[tuple[str, Parameter]]) -> list[ParamSpec]:
    """Describe parameters to the planner."""
    return [
        ParamSpec(name, tuple(given(p).shape), p.dtype, p.requires_grad and p.is_contiguous(), sharded_by(p))
        for name, p in named
    ]


def upload_buffers(plan: Plan, options: Options) -> int:
    """Number of buffers of the ring of uploads: at most one for each upload that can be in flight.

    Raises:
        ValueError: ``staging_bytes`` is less than the largest upload.
    """
    staging_bytes, largest = options.staging_bytes, largest_upload_bytes(plan)
    if staging_bytes is None or not largest:
        return UPLOAD_RING
    if staging_bytes < largest:
        name = max((p for p in plan.params if p.offloaded), key=_upload_bytes).name
        raise ValueError(
            f"staging_bytes={staging_bytes} must be at least {largest}, the size of one upload of {name}; raise it, "
            f"{smaller_uploads(options)}or leave it at None for three times that"
        )
    uploads = sum(param.uploads for param in plan.params if param.offloaded)
    return min(staging_bytes // largest, uploads)


def largest_upload_bytes(plan: Plan) -> int:
    """Bytes of the largest upload."""
    return max((_upload_bytes(each) for each in plan.params if each.offloaded), default=0)


def largest_staged_gradient_bytes(plan: Plan) -> int:
    """Bytes of the largest deferred gradient that is copied through the ring: a pending gradient is not."""
    return max((_upload_bytes(each) for each in plan.params if each.offloaded and not each.keeps_gradient), default=0)


def _upload_bytes(plan: ParamPlan) -> int:
    """Bytes of the deferred slices in the model's dtype: of one upload, and of one deferred gradient."""
    return plan.deferred * plan.length * plan.dtype.itemsize


def nvme_cache_bytes(plan: Plan, options: Options) -> CacheBytes:
    """Host memory of the caches of files; 0 without any."""
    in_file = [param for param in plan.params if param.in_file]
    return cache_bytes(in_file, options.host_window_bytes) if in_file else NO_CACHES


def free_device_bytes(device: torch.device) -> int:
    """Free memory of a device; free host memory where the device has none of its own."""
    free = device_of(device).free_bytes()
    return available_host_memory()[0] if free is None else free


def worker_cores(options: Options) -> tuple[int, ...]:
    """The logical core of each worker: the option's, or those with the fewest workers of other engines.

    Raises:
        ValueError: more workers are wanted than there are cores.
    """
    if options.worker_cores is not None:
        return options.worker_cores
    cores = local_ranks().cores(physical_cores())
    count = worker_count(
        len(cores), cpu_quota(), workers=options.workers, reserved_share=options.pt_reserved_cores_perc
    )
    in_use = Counter(core for engine in ops.live_engines() for core in engine.worker_cores)
    return choose_cores(cores, count, in_use)
