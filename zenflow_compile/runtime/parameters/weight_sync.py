"""Keeps the fp32 masters of an offloaded parameter in step with its weights, which other code may write, too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.native.storage_reads import ReadGuard
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device_updates.selection import Selection
from zenflow_compile.runtime.device_updates.version_counter import VersionCounter, WriteMark, bump_versions
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.host_state import HostState
from zenflow_compile.runtime.parameters.host_weight import HostWeight
from zenflow_compile.runtime.parameters.unseen_writes import SampledWeight
from zenflow_compile.runtime.sharding import LocalShard
from zenflow_compile.torch_internals.torch_private import same_storage, storage_identity

_IN_FLIGHT = (
    "an update of {} is in flight, and code outside of the compiled graphs reads or writes the weight: do that by a "
    "call of its module or after optimizer.synchronize(), or create the optimizer with overlap_step=False"
)


class Weights:
    """The 2-D view of one parameter's weights, and what tells an external write from the engine's own.

    Attributes:
        unverified: a state was loaded. Weights may be loaded before or after it, so they are compared with the masters
            at the first step, or at the first use while an update is in flight.
        flushed_at_load: that state was flushed into these weights while it was loaded: others cannot come after it.
        guard: refuses accesses while an update is due that is not applied yet. Whatever applies an update, or drops it,
            calls ``guard.allow()`` before it touches the weight.
        can_be_guarded: it refuses those to this weight alone, because no other tensor is in the storage.
    """

    def __init__(self, plan: ParamPlan, param: Parameter, counter: VersionCounter | None = None) -> None:
        self.counter = VersionCounter() if counter is None else counter
        self.unverified = False
        self.flushed_at_load = False
        self.home: HostWeight | None = None
        self.guard = ReadGuard(_IN_FLIGHT.format(plan.name))
        self.can_be_guarded = False
        self.sample: SampledWeight | None = None
        self._plan = plan
        self._param = param
        self._whole: Tensor | None = None
        self._matrix: Tensor | None = None
        self._mark: WriteMark | None = None
        self._shown: Tensor | None = None  # deferred weights that an update in flight leaves behind their masters

    @property
    def matrix(self) -> Tensor:
        """View the parameter's memory as [rows, columns], or this rank's share of it as [slices, length].

        A write to it does not move the parameter's version. The device must have the weight, if it is offloaded.
        """
        whole, param = self._whole, self._param
        # Its storage was replaced? ``same_memory`` would cost a call for each update.
        if whole is None or not same_storage(whole, param) or whole.storage_offset() != param.storage_offset():
            if whole is not None and (self._param.dtype != whole.dtype or self._param.shape != self._plan.whole.shape):
                errors.refuse_changed(self._param, self._plan, whole.device)
            share = self._plan.share
            try:
                whole = self._param.data.view(self._plan.of_weight.matrix_shape)
            except RuntimeError:
                errors.refuse_reordered(self._plan.name)
            self._whole, self._matrix = whole, whole if share is None else share.view(whole)
        assert self._matrix is not None
        return self._matrix

    @property
    def values(self) -> Tensor:
        """``matrix`` to read from; in host memory, and maybe a copy, where the device does not have the weight."""
        if (home := self.home) is None or home.is_on_device():
            return self.matrix
        return home.values.read().view(self._plan.matrix_shape)

    @property
    def of_all_ranks(self) -> Tensor:
        """View all slices, those of other ranks, too: [slices, length]."""
        assert self.matrix is not None  # follows a replaced storage
        assert self._whole is not None
        assert self._plan.share is not None
        return self._plan.share.by_slice(self._whole)

    def of(self, slices: Tensor) -> Tensor:
        """Copy the weights of ``slices``: [n, length]."""
        values = self.values
        weights = values.index_select(self._plan.dim, slices.to(values.device))
        return weights if self._plan.dim == 0 else weights.t()

    def _on_host(self, slices: Tensor) -> Tensor:
        return device_of(self._param.device).to_host(self.of(slices), "weights")

    def written(self) -> None:
        """Bump the version after the engine wrote the deferred slices."""
        bump_versions([self._param], [self.counter])
        self._shown = None
        if (sample := self.sample) is not None and sample.kept is not None:
            sample.kept.copy_(sample.sample)  # else the next step would take a merge in a forward for an unseen write
        if self.home is not None:
            self.home.written()

    def put_into_slices(self) -> HostWeight | None:
        """The weight in host memory, if the upload buffer and the masters have its values from here on; else None."""
        home = self.home
        return home if home is not None and not self.unverified and home.put_into_slices() else None

    def remember(self, selection: Selection) -> None:
        """Copy the deferred weights before an update is in flight, which leaves them behind their masters.

        Needed only if the version counter is shared, or may be: when the version moves, the copy tells whether these
        weights or only others with the same counter were written.
        """
        self._shown = self._on_host(selection.deferred)

    @property
    def written_by_others(self) -> bool:
        """Whether there may have been an external write since ``accept``.

        True if the version moved without the engine, if the memory was replaced (``param.data = ...``), and for
        unverified weights. A write to another parameter that shares the version counter looks the same.
        """
        param, mark = self._param, self._mark
        if self.unverified or mark is None or param._version - self.counter.own_bumps != mark.bumps:
            return True
        memory = mark.memory  # compared here: every forward and every step asks for every parameter
        if self.home is not None:  # each load brings another address
            return storage_identity(param.untyped_storage()) != memory.storage
        return param.storage_offset() != memory.offset or storage_identity(param.untyped_storage()) != memory.storage

    def expect(self, shown: Tensor | None, *, flushed_at_load: bool) -> None:
        """Compare weights and masters when they are used next: weights and state may be loaded in any order.

        ``shown``: the deferred weights, [deferred, length] on the host, if an update that is not applied yet leaves
        them behind their masters.
        """
        self.unverified, self.flushed_at_load, self._shown = True, flushed_at_load, shown

    def shown(self, selection: Selection) -> Tensor:
        """Copy the deferred weights that belong to the current state: [deferred, length] on the host."""
        if self._shown is not None:
            return self._shown.clone()
        return self._on_host(selection.deferred).contiguous()

    def are_as_expected(self, device: DeviceState) -> bool:
        """Whether the weights equal those of ``remember`` or ``expect``: there was no external write."""
        if self._shown is None or not torch.equal(self._on_host(device.selection.deferred), self._shown):
            return False
        selected = self.of(device.selection.selected).to(device.state.master.device)
        return torch.equal(selected, device.state.master.to(self._plan.dtype))

    def accept(self) -> None:
        """Note that the current weights belong to the state."""
        self.unverified = self.flushed_at_load = False
        param = self._param
        self._mark = self.counter.mark(param)
        self.can_be_guarded = isinstance(param, LocalShard) or param.untyped_storage().nbytes() <= param.nbytes

    def reseed(self, device: DeviceState, host: HostState) -> bool:
        """Overwrite the masters of both sides where their cast differs from the weights. Returns whether any was.

        A master whose cast equals the weight is kept, so that loading a checkpoint's weights before or after its
        optimizer state loses no precision.
        """
        selection = device.selection
        self._shown = None
        if self.home is not None:
            self.home.values.detach_from_state(on_device=self.home.loaded)
        differs = False
        if selection.selected.numel():
            differs = _overwrite(device.state.master, self.of(selection.selected))
        if selection.deferred.numel():
            weights = self._on_host(selection.deferred)
            with host.acquire(write=True) as state:
                master = state.read().master
                if _overwrite(master, weights):
                    state.write_master(master)
                    differs = True
        self.accept()
        return differs


def _overwrite(master: Tensor, weights: Tensor) -> bool:
    """Overwrite master elements whose cast differs from ``weights``; return whether any did."""
    weights = weights.to(master.device)
    same = master.to(weights.dtype) == weights
    if bool(same.all()):
        return False
    master.copy_(torch.where(same, master, weights.float()))
    return True
