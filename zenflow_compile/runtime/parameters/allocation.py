"""Memory and threads of an engine: arenas, state files, staging rings, copy lanes, workers and their kernels."""

from __future__ import annotations

import hashlib
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.checks.validate import user_stacklevel
from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import GRADIENT_RING, UPLOAD_RING, ParamPlan, Plan, pool_packing, pools_of
from zenflow_compile.planning.shared_buffers import overlaps
from zenflow_compile.runtime.device.copy_lanes import CopyLane
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device.staging_ring import StagingRing
from zenflow_compile.runtime.device.stream_flags import make_flags
from zenflow_compile.runtime.device.stream_lane import StreamLane
from zenflow_compile.runtime.device.thread_lane import ThreadLane
from zenflow_compile.runtime.device_updates.streamed_updates import StreamedGroup, StreamedUpdates, arena_bytes
from zenflow_compile.runtime.errors import less_host_memory
from zenflow_compile.runtime.host.arena import HostArena, carved_bytes
from zenflow_compile.runtime.host.cores import local_ranks, may_pin, nodes_of, run_pinned
from zenflow_compile.runtime.host.host_kernel import HostKernel
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.nvme.cache import Cached, NvmeCache
from zenflow_compile.runtime.nvme.chunk import WEIGHTS
from zenflow_compile.runtime.nvme.state_file import ScratchFiles
from zenflow_compile.runtime.parameters.capacity import nvme_cache_bytes, worker_cores
from zenflow_compile.runtime.parameters.given_back_memory import DeviceMemory
from zenflow_compile.runtime.parameters.host_state import HostState
from zenflow_compile.runtime.parameters.state_exchange import ImmediateExchange, StateExchange
from zenflow_compile.runtime.parameters.transport import StreamOrder, Transport
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.state_forms import State


def pools_arena_bytes(params: Sequence[ParamPlan]) -> int:
    """Bytes that ``allocate_pools`` takes."""
    return carved_bytes([((pool_packing(pool).nbytes,), torch.uint8) for pool in pools_of(params)])


def allocate_pools(params: Sequence[ParamPlan], arena: HostArena) -> dict[int, list[Tensor]]:
    """Carve the pools of ``params`` out of ``arena``. Returns the gradient buffers, by index of the parameter."""
    found: dict[int, list[Tensor]] = {}
    for pool in pools_of(params):
        packing = pool_packing(pool)
        memory = arena.take((packing.nbytes,), torch.uint8)
        offsets = iter(packing.offsets)
        for param in pool:
            found[param.index] = [_view(memory, next(offsets), param) for _ in range(param.gradient_buffers.count)]
    return found


def _view(memory: Tensor, offset: int, param: ParamPlan) -> Tensor:
    shape, dtype = param.gradient_buffers.shape, param.gradient_buffers.dtype
    nbytes = prod(shape) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(shape)


def connect(hosts: Mapping[int, HostState]) -> None:
    """Tell each of ``hosts``, by index of its parameter, which buffers of others have memory of its own buffers."""
    for pool in pools_of(host.plan for host in hosts.values()):
        buffers = [(param.index, number) for param in pool for number in range(param.gradient_buffers.count)]
        # No references: the arena's memory is given back with its last tensor, and not when cycles are collected.
        known = {param.index: weakref.ref(hosts[param.index]) for param in pool}
        together = overlaps([each for param in pool for each in param.gradient_buffers.lifetimes], pool_packing(pool))
        for (index, number), others in zip(buffers, together, strict=True):
            sharing = (buffers[other] for other in others)
            hosts[index].sharers[number] = [(known[their_index], their_number) for their_index, their_number in sharing]


class Allocated(NamedTuple):
    """Memory of further parameters; ``hosts``: host state of the offloaded ones, by index."""

    arena: HostArena
    hosts: dict[int, HostState]
    subgroups: list[StreamedGroup]


def make_lane(name: str, device: Device, recorder: Recorder) -> CopyLane:
    """Make the lane ``name`` ("D2H" or "H2D") of ``device``."""
    if device.streams is None:
        return ThreadLane(name, recorder)
    return StreamLane(name, device, device.streams, recorder)


class EngineMemory:
    """Allocates what the parameters of one engine use, and frees it.

    Attributes:
        kernels: host optimizers, by dtype and update interval.
    """

    def __init__(self, options: Options, device: torch.device, recorder: Recorder) -> None:
        cores = worker_cores(options, device)
        self._device = device_of(device)
        to_host, to_device = make_lane("D2H", self._device, recorder), make_lane("H2D", self._device, recorder)
        workers = Workers(len(cores), recorder, cores)
        exchange: ImmediateExchange | StateExchange = ImmediateExchange(recorder)
        if self._device.streams is not None:
            exchange = StateExchange(to_host, to_device, workers, recorder, self._device)
        self.transport = Transport(
            to_host=to_host,
            to_device=to_device,
            down_ring=StagingRing(GRADIENT_RING, 0, device),
            up_ring=StagingRing(UPLOAD_RING, 0, device),
            workers=workers,
            recorder=recorder,
            exchange=exchange,
            device_memory=DeviceMemory(self._device, to_host, to_device, recorder),
            order=None if self._device.streams is None else StreamOrder(self._device.streams),
        )
        if not may_pin():
            warn_once(
                "the system does not let threads choose their cores (sched_setaffinity). Training is as correct, but "
                "host updates are slower where threads move between cores or NUMA nodes"
            )
        self.streamed = StreamedUpdates(self.transport.to_host, self.transport.to_device, recorder, device)
        self.kernels: dict[tuple[torch.dtype, torch.dtype, int], HostKernel] = {}
        self._options = options
        self._arenas: list[HostArena] = []

    def allocate(self, plan: Plan, new: Sequence[ParamPlan], params: Sequence[Parameter], undo: ExitStack) -> Allocated:
        """Allocate for ``params``, whose plans are ``new``, the last of ``plan``. ``keep`` it, or close ``undo``.

        Raises:
            ValueError: ``nvme_path`` cannot hold the state.
            torch.OutOfMemoryError: the device cannot hold rings or buffers.
            RuntimeError: the system does not start a thread.
        """
        in_files = [param for param in new if param.in_file]
        stores, uploads = self._file_stores(plan, in_files, undo), self._file_uploads(plan, in_files, undo)
        on_host = [param for param in new if param.offloaded]
        asynchronous = self._device.streams is not None
        own_bytes = sum(map(HostState.arena_bytes, on_host)) + arena_bytes(new)
        arena = HostArena(own_bytes + pools_arena_bytes(on_host), self._device if asynchronous else None)
        workers = self.transport.workers
        pooled = allocate_pools(on_host, arena)
        hosts = {
            param.index: HostState.allocate(
                param,
                arena,
                self._kernel(param),
                workers.handle,
                workers.count,
                stores.get(param.index),
                pooled.get(param.index),
                uploads.get(param.index, ()),
            )
            for param in on_host
        }
        connect(hosts)
        streamed = [(each, param) for each, param in zip(new, params, strict=True) if each.streamed]
        subgroups = self.streamed.make(streamed, arena)
        self._touch_first(list(hosts.values()))
        if arena.total_bytes and asynchronous:
            warned = any(each.total_bytes and not each.pinned for each in self._arenas)
            arena.pin(self._device, None if warned else less_host_memory(self._options))
        flags = make_flags(len(hosts), self._device)
        if flags is None and asynchronous and hosts:
            warn_once(
                f"the driver of {self._device.name} offers no stream memory operations (on CUDA: install "
                "cuda-bindings). Training is as correct, but each forward waits on the host for updates that are late"
            )
        for number, host in enumerate(hosts.values()):
            # Hazard: a copy from unpinned memory reads it when it is queued, and not when the stream gets there. A wait
            # of the stream for the job that writes it would come too late. Without a flag the host waits.
            weight_files = self.transport.weight_files if host.plan.weight_in_file else None
            pinned = arena.pinned and (weight_files is None or weight_files.pinned)
            if flags is not None and pinned:
                host.flags = flags, number
        staged = [param for param in plan.params if param.offloaded]
        self.transport.up_ring.fit(max((param.upload_bytes for param in staged), default=0))
        # A pending gradient is not copied through the ring.
        copied = [param.upload_bytes for param in staged if not param.has_pending_gradient]
        self.transport.down_ring.fit(max(copied, default=0))
        self.transport.exchange.fit(plan.exchange_buffer_bytes)
        self.streamed.fit(subgroups)
        self._start_threads(on_host, streams_state=bool(subgroups))
        return Allocated(arena, hosts, subgroups)

    def _start_threads(self, on_host: Sequence[ParamPlan], *, streams_state: bool) -> None:
        """Start the threads that will be needed: later, a step would fail half-way where the system starts none.

        Raises:
            RuntimeError: the system does not start a thread.
        """
        if on_host:
            self.transport.workers.start()
        if self.transport.files is not None:
            self.transport.files.files.threads.start()
        if on_host or streams_state:
            self.transport.to_host.start()
            self.transport.to_device.start()

    def keep(self, allocated: Allocated) -> None:
        """Serve the parameters of ``allocated``, and own their memory. Cannot fail."""
        self._arenas.append(allocated.arena)
        self.streamed.add(allocated.subgroups)

    def _file_stores(self, plan: Plan, new: Sequence[ParamPlan], undo: ExitStack) -> dict[int, Cached[State]]:
        """Make files for the state of ``new``; returns their stores, by index."""
        if not new:
            return {}
        assert self._options.nvme_path is not None
        if (files := self.transport.files) is None:
            directory = local_ranks().directory(self._options.nvme_path)
            directory.mkdir(mode=0o700, exist_ok=True)
            scratch = ScratchFiles(directory, self.transport.recorder)
            undo.callback(scratch.close)
            files = self.transport.files = NvmeCache(scratch, self.transport.recorder)
            undo.callback(self._close_files)
        chunks = files.add(new, _fingerprint(plan, new), nvme_cache_bytes(plan, self._options).state)
        undo.callback(files.remove, chunks)
        return {chunk.plan.index: Cached(files, chunk) for chunk in chunks}

    def _file_uploads(self, plan: Plan, new: Sequence[ParamPlan], undo: ExitStack) -> dict[int, list[Cached[Tensor]]]:
        """Make files for buffers of new weights, behind ``_file_stores``; returns the buffers, by index."""
        buffers = [param for param in new if param.weight_in_file for _ in range(param.uploads)]
        if not buffers:
            return {}
        assert self.transport.files is not None
        if (cache := self.transport.weight_files) is None:
            device = None if self._device.streams is None else self._device
            cache = NvmeCache(self.transport.files.files, self.transport.recorder, WEIGHTS, device)
            self.transport.weight_files = cache
        size, remedies = nvme_cache_bytes(plan, self._options).weights, less_host_memory(self._options)
        chunks = cache.add(buffers, _fingerprint(plan, new), size, remedies)
        undo.callback(cache.remove, chunks)
        uploads: dict[int, list[Cached[Tensor]]] = {}
        for chunk in chunks:
            uploads.setdefault(chunk.plan.index, []).append(Cached(cache, chunk))
        return uploads

    def _kernel(self, plan: ParamPlan) -> HostKernel:
        key = (plan.dtype, plan.gradient_buffers.dtype, plan.interval)
        if key not in self.kernels:
            self.kernels[key] = HostKernel(plan.gradient_buffers.dtype, plan.dtype, plan.interval)
        return self.kernels[key]

    def _touch_first(self, hosts: Sequence[HostState]) -> None:
        """Let each worker's core touch the pages that it will serve, before any other core does.

        Linux places a page on the NUMA node of the core that touches it first. This is needed on machines with several
        nodes, and before pinning, which would touch every page on one core. Elsewhere pages cost nothing until used.
        """
        cores = self.transport.workers.cores
        if self._device.streams is None and len(nodes_of(cores)) < 2:
            return

        def touch(worker: int) -> None:
            for host in hosts:
                host.touch(worker)

        with suppress(RuntimeError):  # no thread could be started: pages lie where they are first written
            run_pinned(cores, touch)

    @property
    def staging_bytes(self) -> int:
        """Device bytes of the staging rings, and of buffers for state that changes sides."""
        transport = self.transport
        return transport.down_ring.nbytes + transport.up_ring.nbytes + transport.exchange.nbytes

    @property
    def host_bytes(self) -> int:
        files = sum(cache.nbytes for cache in self.transport.caches if cache is not None)
        memory = self.transport.device_memory.host_bytes
        return sum(arena.total_bytes for arena in self._arenas) + self.transport.exchange.nbytes + files + memory

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory of rings, buffers and streamed state; no exchange may be in flight."""
        self.transport.down_ring.list_memory(found)
        self.transport.up_ring.list_memory(found)
        self.transport.exchange.list_memory(found)
        self.streamed.list_memory(found)

    def runs(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is one of this engine's lanes. Its other threads run no Python."""
        return self.transport.to_host.runs(thread) or self.transport.to_device.runs(thread)

    def abandon(self) -> None:
        """Wait for state in flight and forget it; take back all buffers of the rings."""
        self.streamed.abandon()
        self.transport.exchange.abandon()
        self.transport.down_ring.settle()
        self.transport.up_ring.settle()

    def enter_child(self) -> None:
        """Close the parent's files in a forked child."""
        if self.transport.files is not None:
            self.transport.files.files.directory.close_in_child()

    def stop_threads(self) -> None:
        """Stop workers and lanes, each of them even if another one raises. Idempotent."""
        with ExitStack() as others:
            others.callback(self.transport.to_device.close)
            others.callback(self.transport.to_host.close)
            self.transport.workers.close()

    def free(self) -> None:
        """Remove files and free host memory. Idempotent."""
        with ExitStack() as others:
            others.callback(self.transport.device_memory.free)
            for arena in self._arenas:
                others.callback(arena.close)
            others.callback(self.transport.exchange.free)
            self._close_files()

    def _close_files(self) -> None:
        if (files := self.transport.files) is not None:
            for cache in self.transport.caches:
                if cache is not None:
                    cache.close()
            files.files.close()
            self.transport.files = self.transport.weight_files = None
            assert self._options.nvme_path is not None
            if (directory := local_ranks().directory(self._options.nvme_path)) != Path(self._options.nvme_path):
                with suppress(OSError):  # files of the user's are in it
                    directory.rmdir()


def _fingerprint(plan: Plan, new: Sequence[ParamPlan]) -> str:
    return hashlib.sha256(repr((plan.policy, new)).encode()).hexdigest()


@cache  # warn once per process: engines come and go
def warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=user_stacklevel())
