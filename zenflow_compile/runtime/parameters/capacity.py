"""What a plan needs of the machine, checked before anything is allocated: host memory, staging buffers, cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import Plan, host_bytes_of
from zenflow_compile.planning.planners import ParamSpec, extend_plan
from zenflow_compile.rules.rule import Rule
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.errors import less_host_memory
from zenflow_compile.runtime.host.arena import available_host_memory, require_host_memory
from zenflow_compile.runtime.host.cgroups import cpu_quota
from zenflow_compile.runtime.host.cores import (
    PCI_DEVICES,
    LocalRanks,
    bound_by_launcher,
    choose_cores,
    local_ranks,
    node_of_device,
    physical_cores,
    worker_count,
)
from zenflow_compile.runtime.nvme.cache import NO_CACHES, CacheBytes, cache_bytes
from zenflow_compile.runtime.parameters.shared_memory import refuse_overlap
from zenflow_compile.runtime.sharding import planned_shape, sharded_by


def checked_plan(
    plan: Plan,
    params: Sequence[Tensor],
    new: Sequence[ParamSpec],
    options: Options,
    *,
    allocated: int = 0,
    freed: int = 0,
    caches: CacheBytes = NO_CACHES,
    exchanges: bool = False,
    processes: int = 1,
) -> Plan:
    """Extend ``plan`` by ``new`` parameters, the last of ``params``, and check that the machine can hold them.

    Allocates nothing.

    Args:
        allocated: number of parameters whose memory is allocated already.
        freed: host memory that is in use now, and freed before this plan allocates.
        caches: host memory that the caches of files have already.
        exchanges: state that changes sides goes through buffers.
        processes: on this machine that are about to allocate as much.

    Raises:
        ValueError: more host memory is needed than the machine has, the state of a parameter, and its weight if that is
            in a file, are larger than ``host_window_bytes``, or the memory of an offloaded parameter overlaps that of
            another one.
    """
    exchange_bytes = plan.exchange_bytes
    plan = extend_plan(plan, new, options)
    refuse_overlap(plan.params, params)
    needed = host_bytes_of(plan.params[allocated:])
    if exchanges:
        needed += plan.exchange_bytes - exchange_bytes
    for size, allocated_bytes in zip(nvme_cache_bytes(plan, options), caches, strict=True):
        if size > allocated_bytes:
            needed += size
    require_host_memory(needed - freed, less_host_memory(options), processes)
    return plan


def specs_of(groups: Sequence[Sequence[tuple[str, Parameter]]], rules: Sequence[Rule]) -> list[ParamSpec]:
    """What planning reads of the parameters of groups, each of which has a rule."""
    return [
        ParamSpec(name, planned_shape(p), p.dtype, p.requires_grad and p.is_contiguous(), sharded_by(p), rule=rule)
        for named, rule in zip(groups, rules, strict=True)
        for name, p in named
    ]


def nvme_cache_bytes(plan: Plan, options: Options) -> CacheBytes:
    """Host memory of the caches of files; 0 without any."""
    in_file = [param for param in plan.params if param.in_file]
    return cache_bytes(in_file, options.host_window_bytes) if in_file else NO_CACHES


def free_device_bytes(device: torch.device) -> int:
    """Free memory of a device; free host memory where the device has none of its own."""
    free = device_of(device).free_bytes()
    return available_host_memory()[0] if free is None else free


def worker_cores(options: Options, device: torch.device | None = None) -> tuple[int, ...]:
    """The logical core of each worker: the option's, or those with the fewest workers of other engines.

    Args:
        device: several processes on a machine divide its cores, each near its device. None: it is not known yet.

    Raises:
        ValueError: more workers are wanted than there are cores.
    """
    if isinstance(options.workers, tuple):
        return options.workers
    ranks = LocalRanks(0, 1) if bound_by_launcher() else local_ranks()
    nodes = None if device is None else nodes_of_ranks(ranks, device_of(device))
    cores = ranks.cores(physical_cores(), nodes)
    count = worker_count(len(cores), cpu_quota(), options.threads(len(cores)))
    in_use = Counter(core for engine in ops.live_engines() for core in engine.worker_cores)
    return choose_cores(cores, count, in_use)


def nodes_of_ranks(ranks: LocalRanks, device: Device, devices: Path = PCI_DEVICES) -> list[int] | None:
    """NUMA nodes of the devices of ``ranks``, if rank i has device i, as launchers have it; None if it is not known.

    Hazard: ranks that answer differently would have the same cores. So there must be as many devices as ranks: of more,
    each rank might have another one.
    """
    addresses = device.pci_addresses()
    if ranks.size == 1 or len(addresses) != ranks.size or device.torch_device.index != ranks.rank:
        return None
    nodes = [node_of_device(address, devices) for address in addresses]
    known = [node for node in nodes if node is not None]
    return known if len(known) == ranks.size else None
