"""The parameters of an engine and the memory that serves them."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import GRADIENT_RING, UPLOAD_RING, ParamPlan, Plan
from zenflow_compile.planning.planners import ParamSpec, empty_plan, extend_plan
from zenflow_compile.runtime import errors, ops
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device.resident_adam import ResidentAdam, ResidentState
from zenflow_compile.runtime.device.streamed_adam import StreamedAdam, Subgroup, arena_bytes
from zenflow_compile.runtime.errors import less_host_memory, smaller_uploads
from zenflow_compile.runtime.gradients.engine_gradients import Gradients
from zenflow_compile.runtime.host.arena import HostArena, available_host_memory, require_host_memory
from zenflow_compile.runtime.host.cores import choose_cores, nodes_of, physical_cores, run_pinned, worker_count
from zenflow_compile.runtime.host.host_adam import HostAdam, make_host_adam
from zenflow_compile.runtime.host.workers import WorkerPool
from zenflow_compile.runtime.nvme.cache import NvmeCache, window_bytes
from zenflow_compile.runtime.nvme.cached_state import CachedState
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.host_state import HostState
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.shared_memory import refuse_overlap
from zenflow_compile.runtime.parameters.transport import Transport
from zenflow_compile.runtime.parameters.version_counter import VersionCounter, counters_of
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.param_groups import check_eps, check_groups, coefficients_of
from zenflow_compile.runtime.transfer.make_lane import make_lane
from zenflow_compile.runtime.transfer.staging_ring import StagingRing
from zenflow_compile.runtime.transfer.stream_flags import make_flags


class _Added(NamedTuple):
    """Host memory of further parameters, by index, and the subgroups of those that are interleaved."""

    arena: HostArena
    hosts: dict[int, HostState]
    subgroups: list[Subgroup]


class ParamRegistry:
    """Plan, parameters, arenas, rings, lanes and workers; parameters may be added, none ever leaves.

    Attributes:
        plan: of all parameters, in their order.
        groups: the optimizer's ``param_groups``.
        group_numbers: index of each parameter's group, in the plan's order.
        offloaded: runtime state of the parameters that the host updates, by index.
        gradients: what those of the offloaded parameters share.
        interleaved: state of those that the device updates, whose state is the host's in between.
        resident: state of the others.
        whole: the parameters that the device updates whole, in the plan's order, with their indices.
        counters: version counters of all parameters, in the plan's order.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        options: Options,
        device: torch.device,
        recorder: Recorder,
        engine: weakref.ref[Any],
        *,
        visible_gradients: bool,
    ) -> None:
        cores = worker_cores(options)
        self.groups = groups
        self.plan = empty_plan(options)
        self.params: list[Parameter] = []
        self.counters: list[VersionCounter] = []
        self.whole: list[tuple[int, Parameter]] = []
        self.offloaded: dict[int, OffloadedParam] = {}
        self.gradients = Gradients(self.offloaded, engine, recorder, device, visible=visible_gradients)
        self.resident = ResidentAdam()
        self.transport = Transport(
            to_host=make_lane("D2H", device, recorder),
            to_device=make_lane("H2D", device, recorder),
            down_ring=StagingRing(GRADIENT_RING, 0, device),
            up_ring=StagingRing(UPLOAD_RING, 0, device),
            workers=WorkerPool(len(cores), recorder, cores),
            recorder=recorder,
        )
        self.streamed = StreamedAdam(self.transport.to_host, self.transport.to_device, recorder, device)
        self._engine = engine
        self._options = options
        self._device = device
        self.group_numbers: list[int] = []
        self._index_of: dict[int, int] = {}
        self._arenas: list[HostArena] = []
        self._files: NvmeCache | None = None
        self._kernels: dict[tuple[torch.dtype, int], HostAdam] = {}

    def add(self, groups: Sequence[Sequence[tuple[str, Parameter]]], first_group: int) -> None:
        """Plan and allocate further parameters, by param group; nothing may be in flight.

        Args:
            groups: (name, parameter) pairs of each new group.
            first_group: index of the first of them among the optimizer's.

        Raises:
            ValueError: see ``checked_plan``, or ``nvme_path`` cannot hold the state; nothing has been changed then.
        """
        named = [pair for group in groups for pair in group]
        params = [*self.params, *(param for _, param in named)]
        files = self._files.nbytes if self._files else 0
        plan = checked_plan(self.plan, params, named, self._options, allocated=len(self.params), window=files)
        counters = counters_of(params, self.counters)
        file_window = _file_window_bytes(plan, self._options)
        up_slots = upload_slots(plan, self._options)
        with ExitStack() as undo:
            added = self._allocate(plan, [param for _, param in named], file_window, undo)
            self.transport.down_ring.fit(GRADIENT_RING, largest_block(plan, pending=False))
            self.transport.up_ring.fit(up_slots, largest_block(plan))
            self.streamed.fit(added.subgroups)
            made = {
                index: self._make(plan.params[index], params[index], host, counters[index])
                for index, host in added.hosts.items()
            }
            undo.pop_all()
        # What can fail is behind us.
        self._arenas.append(added.arena)
        self.plan = plan
        self.offloaded.update(made)
        self.streamed.add(added.subgroups)
        self.group_numbers += [first_group + number for number, group in enumerate(groups) for _ in group]
        for _, param in named:
            self._own(param, counters[len(self.params)])

    def _allocate(self, plan: Plan, params: Sequence[Parameter], file_window: int, undo: ExitStack) -> _Added:
        """Host memory for the parameters that ``plan`` has beyond ours.

        Args:
            params: those.
            file_window: host memory that state in files passes through from now on.
            undo: gives back what is not memory.

        Raises:
            ValueError: ``nvme_path`` cannot hold the state.
        """
        new = plan.params[len(self.params) :]
        homes = self._file_homes(plan, [param for param in new if param.in_file], file_window, undo)
        on_host = [param for param in new if param.offloaded]
        arena = HostArena(sum(map(HostState.arena_bytes, on_host)) + arena_bytes(new))
        workers = self.transport.workers.workers
        hosts = {
            param.index: HostState.allocate(param, arena, self._kernel(param), workers, homes.get(param.index))
            for param in on_host
        }
        if (flags := make_flags(len(hosts), self._device)) is not None:
            for number, host in enumerate(hosts.values()):
                host.flags = flags, number
        subgroups = self.streamed.make(
            [(plan, param) for plan, param in zip(new, params, strict=True) if plan.streamed], arena
        )
        self._touch_first(list(hosts.values()))
        if arena.total_bytes and self._device.type == "cuda":
            warned = any(each.total_bytes and not each.pinned for each in self._arenas)
            arena.pin(None if warned else less_host_memory(self._options))
        return _Added(arena, hosts, subgroups)

    def _own(self, param: Parameter, counter: VersionCounter) -> None:
        """The next of the plan's parameters is ours."""
        index = len(self.params)
        self.params.append(param)
        self._index_of[id(param)] = index
        self.counters.append(counter)
        counter.add(index, param)
        if (streamed := self.streamed.params.get(index)) is not None:
            streamed.state.counter = counter
        if index not in self.offloaded:
            self.whole.append((index, param))
            self.resident.counters[param] = counter

    def _file_homes(self, plan: Plan, new: Sequence[ParamPlan], size: int, undo: ExitStack) -> dict[int, CachedState]:
        """Places in files for the state of ``new``, by index.

        Args:
            size: of the window from now on.
            undo: gives them back.
        """
        if not new:
            return {}
        assert self._options.nvme_path is not None
        if self._files is None:
            self._files = NvmeCache(self._options.nvme_path, self.transport.recorder)
            undo.callback(self._close_files)
        fingerprint = hashlib.sha256(repr((plan.policy, new)).encode()).hexdigest()
        homes = self._files.add(new, fingerprint, size)
        undo.callback(self._files.remove, homes.values())
        return homes

    def _close_files(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    def _touch_first(self, hosts: Sequence[HostState]) -> None:
        """Let the workers' cores touch the pages that each will serve, all at once, before anything else does.

        Only where that decides something: on machines with several NUMA nodes, and before pinning, which would touch
        every page on one core. Elsewhere pages cost nothing until they are used.
        """
        cores = self.transport.workers.cores
        if self._device.type != "cuda" and len(nodes_of(cores)) < 2:
            return

        def touch(worker: int) -> None:
            for host in hosts:
                host.touch(worker)

        with suppress(RuntimeError):  # no further thread starts: pages will lie where they are first written
            run_pinned(cores, touch)

    def _make(self, plan: ParamPlan, param: Parameter, host: HostState, counter: VersionCounter) -> OffloadedParam:
        device = DeviceState.allocate(plan, self._device)
        return OffloadedParam(plan, param, host, device, self.transport, self.gradients, counter)

    def _kernel(self, plan: ParamPlan) -> HostAdam:
        gradient_dtype = torch.float32 if plan.compressed else plan.dtype  # it is expanded before the kernel reads it
        key = (plan.dtype, plan.interval)
        if key not in self._kernels:
            self._kernels[key] = make_host_adam(
                self._options.host_kernel, gradient_dtype=gradient_dtype, out_dtype=plan.dtype, max_slots=plan.interval
            )
        return self._kernels[key]

    def index_of(self, param: Tensor) -> int | None:
        """The index of ``param`` in the plan; None if it is not one of these."""
        index = self._index_of.get(id(param))
        return index if index is not None and self.params[index] is param else None

    def changed(self, index: int) -> bool:
        """Whether parameter ``index`` has another dtype, shape or device than planned."""
        param, plan = self.params[index], self.plan.params[index]
        return param.dtype != plan.dtype or param.shape != plan.shape or param.device != self._device

    def group_of(self, index: int) -> dict[str, Any]:
        """The param group of parameter ``index``."""
        return self.groups[self.group_numbers[index]]

    def coefficients(self, index: int, grad_scale: float) -> tuple[StepCoefficients, float]:
        """What is in force now for parameter ``index``, and eps."""
        group = self.group_of(index)
        return coefficients_of(group, grad_scale), float(group["eps"])

    def eps(self, index: int) -> float:
        """The eps of parameter ``index``, for gradients whose coefficients an update window holds.

        Raises:
            ValueError, TypeError: it was set to something that no step can use.
        """
        return check_eps(self.group_of(index)["eps"])

    def residents(self, only: set[int] | None = None) -> list[tuple[Parameter, Tensor, dict[str, Any]]]:
        """Parameters that the device updates whole (of those in ``only``) and that have a gradient: with it and their
        group.
        """
        return [
            (param, grad, self.group_of(index))
            for index, param in self.whole
            if (grad := param.grad) is not None and (only is None or index in only)
        ]

    def check_groups(self) -> None:
        """Check the values that param groups have now.

        Raises:
            ValueError, TypeError: one that no step can use; the message has the group's number.
        """
        check_groups(self.groups)

    def check_gradients(self) -> None:
        """
        Raises:
            TypeError: a gradient is sparse.
            RuntimeError: a gradient was consumed by an earlier optimizer step. Nothing has been changed then.
        """
        for index, param in self.whole:
            if (grad := param.grad) is not None and grad.is_sparse:
                errors.refuse_sparse_grad(param, self.plan.params[index].name)
        for offloaded in self.offloaded.values():
            offloaded.check_gradient()

    def read_factors(self) -> None:
        """Read the factors on all gradients that the optimizer step uses, with one copy to the host."""
        records = [each.record for each in self.offloaded.values() if each.record is not None]
        self.gradients.factors.read(records)

    def drop_grads(self) -> None:
        """Discard what is in ``.grad``, of any parameter."""
        for param in self.params:
            param.grad = None

    def update_residents(self) -> None:
        """One AdamW step on the parameters that the device updates whole and that have a gradient.

        Those that stay on the device come last: their update overlaps what is on its way (Deep Optimizer States,
        section 4.1).
        """
        self.streamed.update(lambda index: self.coefficients(index, 1.0))
        streamed = self.streamed.params
        residents = self.residents({index for index, _ in self.whole if index not in streamed})
        for group in self.groups:
            members = [(param, grad) for param, grad, own in residents if own is group]
            if members:
                params, grads = zip(*members, strict=True)
                self.resident.update(params, grads, coefficients_of(group, 1.0), eps=float(group["eps"]))

    def whole_state(self, index: int) -> ResidentState | None:
        """State of a parameter that the device updates whole, wherever it is; None before its first gradient."""
        if (streamed := self.streamed.params.get(index)) is not None:
            return streamed.state if streamed.ever_updated else None
        return self.resident.states.get(self.params[index])

    def load_whole(self, index: int, state: ResidentState | None) -> None:
        """Put a checkpoint's state of such a parameter back. Raises: see :meth:`ResidentState.load`."""
        if index in self.streamed.params:
            self.streamed.load(index, state)
        elif state is None:
            self.resident.states.pop(self.params[index], None)
        else:
            self.resident.load(self.params[index], state)

    @property
    def model_bytes(self) -> int:
        """Bytes of all parameters, in their own dtype."""
        return sum(param.nbytes for param in self.params)

    @property
    def device_bytes(self) -> int:
        """Device bytes of optimizer state, selection, staging rings and the buffers that state is streamed through."""
        rings = self.transport.down_ring.nbytes + self.transport.up_ring.nbytes
        whole = self.resident.nbytes + self.streamed.device_bytes
        return whole + rings + sum(offloaded.nbytes for offloaded in self.offloaded.values())

    @property
    def host_bytes(self) -> int:
        """Host bytes of optimizer state, gradient windows and upload buffers, and of the window that files have."""
        return sum(arena.total_bytes for arena in self._arenas) + (self._files.nbytes if self._files else 0)

    @property
    def file_bytes(self) -> int:
        """Bytes of optimizer state in files."""
        return self._files.file_bytes if self._files else 0

    def check_storage(self, index: int, param: Tensor) -> None:
        """A graph that reads a copy of the weight would never see an update.

        Raises:
            RuntimeError: ``param`` has not the memory of parameter ``index``.
        """
        if param.data_ptr() != self.params[index].data_ptr():
            raise RuntimeError(
                f"the compiled graph has a copy of {self.plan.params[index].name} instead of the parameter; if the "
                "model was moved or its storage replaced, create the optimizer and compile again, else report this"
            )

    def abandon(self) -> None:
        """Drop everything in flight, failed work too."""
        for offloaded in self.offloaded.values():
            offloaded.abandon()
        self.streamed.abandon()
        for ring in (self.transport.down_ring, self.transport.up_ring):
            ring.settle()

    def runs(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is a worker's or a lane's, or moves blocks of files."""
        lanes = (self.transport.to_host, self.transport.to_device)
        in_files = self._files is not None and self._files.runs(thread)
        return in_files or self.transport.workers.runs(thread) or any(lane.runs(thread) for lane in lanes)

    def enter_child(self) -> None:
        """In a forked child: let go of the parent's files."""
        if self._files is not None:
            self._files.close_in_child()

    def release_gradients(self, *, keep: bool) -> None:
        """Leave no gradient in ``.grad`` that needs the engine.

        Args:
            keep: those that no step has used become dense tensors there; else ``.grad`` is cleared.
        """
        for offloaded in self.offloaded.values():
            offloaded.release_gradient(keep=keep)

    def close(self) -> None:
        """Stop workers and lanes, free host memory, remove files. What was to land has.

        May be repeated after an interrupt.
        """
        self.transport.workers.close()
        self.transport.to_host.close()
        self.transport.to_device.close()
        self.offloaded.clear()
        self._close_files()
        for arena in self._arenas:
            arena.close()


def checked_plan(
    plan: Plan,
    params: Sequence[Tensor],
    new: Sequence[tuple[str, Parameter]],
    options: Options,
    *,
    allocated: int = 0,
    window: int = 0,
) -> Plan:
    """``plan`` with further parameters, which the machine has room for. Allocates nothing.

    Args:
        params: all parameters, the new ones last.
        new: those, with their names.
        allocated: number of parameters that have their memory.
        window: host memory, in bytes, that state in files passes through already.

    Raises:
        ValueError: more host memory is needed than the machine has, a block is larger than ``staging_bytes`` or
            ``host_window_bytes``, or the memory of an offloaded parameter overlaps another one's.
    """
    plan = extend_plan(plan, specs_of(new), options)
    refuse_overlap(plan.params, params)
    needed = sum(param.host_bytes for param in plan.params[allocated:])
    if (file_window := _file_window_bytes(plan, options)) > window:
        needed += file_window
    require_host_memory(needed, less_host_memory(options))
    upload_slots(plan, options)
    return plan


def upload_slots(plan: Plan, options: Options) -> int:
    """How many blocks of uploads may be on the device at once: no more than uploads that can exist.

    Raises:
        ValueError: ``staging_bytes`` is less than the largest block.
    """
    staging_bytes, largest = options.staging_bytes, largest_block(plan)
    if staging_bytes is None or not largest:
        return UPLOAD_RING
    if staging_bytes < largest:
        name = max((p for p in plan.params if p.offloaded), key=block_bytes).name
        raise ValueError(
            f"staging_bytes={staging_bytes} must be at least {largest}, what {name} uploads at once; raise it, "
            f"{smaller_uploads(options)}or leave it at None for three times that"
        )
    uploads = sum(param.uploads for param in plan.params if param.offloaded)
    return min(staging_bytes // largest, uploads)  # each takes one buffer


def _file_window_bytes(plan: Plan, options: Options) -> int:
    """Host memory that state in files passes through."""
    in_file = [param for param in plan.params if param.in_file]
    return window_bytes(in_file, options.host_window_bytes) if in_file else 0


def block_bytes(plan: ParamPlan) -> int:
    """What one gradient or upload of the parameter's deferred slices takes."""
    return plan.deferred * plan.length * plan.dtype.itemsize


def largest_block(plan: Plan, *, pending: bool = True) -> int:
    """Bytes of the largest block, also of those parameters whose gradients are ``held`` and pass through no ring."""
    return max(
        (block_bytes(each) for each in plan.params if each.offloaded and (pending or not each.keeps_gradient)),
        default=0,
    )


def specs_of(named: Sequence[tuple[str, Parameter]]) -> list[ParamSpec]:
    """What planning may know of parameters."""
    return [ParamSpec(name, tuple(p.shape), p.dtype, p.requires_grad and p.is_contiguous()) for name, p in named]


def free_device_bytes(device: torch.device) -> int:
    """Memory that a device has left; of the CPU, which plays the device in tests, that of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_memory()[0]


def worker_cores(options: Options) -> tuple[int, ...]:
    """The logical core of each worker; those that workers of the fewest other engines have, unless they were named.

    Raises:
        ValueError: more workers are wanted than there are cores.
    """
    if options.worker_cores is not None:
        return options.worker_cores
    cores = physical_cores()
    count = worker_count(len(cores), workers=options.workers, reserved_share=options.pt_reserved_cores_perc)
    in_use = Counter(core for engine in ops.live_engines() for core in engine.worker_cores)
    return choose_cores(cores, count, in_use)
