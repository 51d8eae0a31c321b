"""The weights of one offloaded parameter, and whose they are: ours, somebody else's, or yet to be compared."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.column_ops import Selection
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.host_state import HostState
from zenflow_compile.runtime.parameters.version_counter import VersionCounter, WriteMark, bump_versions


class Weights:
    """A parameter as the 2-D matrix that plans speak of, and whether others wrote it.

    Attributes:
        counter: the parameter's version counter, which other parameters may share.
        to_be_compared: a state was loaded whose weights may come before or after it: its masters stay as they are until
            the first use.
    """

    def __init__(self, plan: ParamPlan, param: Parameter, counter: VersionCounter | None = None) -> None:
        self.counter = VersionCounter() if counter is None else counter
        self.unverified = False
        self._plan = plan
        self._param = param
        self._view: Tensor | None = None
        self._mark: WriteMark | None = None
        self._shown: Tensor | None = None

    @property
    def matrix(self) -> Tensor:
        """The parameter's own memory, [rows, columns]; operators that write it do not move the parameter's version."""
        view = self._view
        if view is None or view.data_ptr() != self._param.data_ptr():  # its storage was replaced
            if self._param.dtype != self._plan.dtype:
                errors.refuse_other_dtype(self._plan.name, self._param.dtype, self._plan.dtype)
            view = self._view = self._param.data.view(self._param.shape[0], -1)
        return view

    def of(self, slices: Tensor) -> Tensor:
        """A copy of the weights of ``slices``, [n, length]."""
        weights = self.matrix.index_select(self._plan.dim, slices)
        return weights if self._plan.dim == 0 else weights.t()

    def written(self) -> None:
        """Bump the version after an own write to the slices of the host."""
        bump_versions([self._param], [self.counter])
        self._shown = None

    def remember(self, selection: Selection) -> None:
        """Copy the weights of the deferred slices, which an update in flight leaves behind their masters.

        Only where the version counter may be shared: if the version moves, the copy tells whether these weights were
        written or only others that share the counter.
        """
        if self.counter.shared or self.counter.exposed:
            self._shown = self.of(selection.deferred).cpu()

    @property
    def written_by_others(self) -> bool:
        """Whether someone else may have written the weights since they were accepted: the version moved without us,
        their memory was replaced (``param.data = ...``), or they are to be compared.

        A write to another parameter that shares the version counter reads the same.
        """
        param, mark = self._param, self._mark
        if self.unverified or mark is None or param._version - self.counter.own_bumps != mark.bumps:
            return True
        return not mark.memory.matches(param)

    def expect(self, shown: Tensor | None) -> None:
        """Compare weights and masters at the first use: a checkpoint may be loaded in any order.

        Args:
            shown: [deferred, length] on the host, the deferred weights, where an update that has not landed puts
                them behind their masters.
        """
        self.unverified, self._shown = True, shown

    def shown(self, selection: Selection) -> Tensor:
        """The weights of the deferred slices that belong to the state as it is, [deferred, length] on the host."""
        if self._shown is not None:
            return self._shown.clone()
        return self.of(selection.deferred).cpu().contiguous()

    def are_as_expected(self, device: DeviceState) -> bool:
        """Whether they are those that were remembered, or saved in a checkpoint, behind the masters of the host."""
        if self._shown is None or not torch.equal(self.of(device.selection.deferred).cpu(), self._shown):
            return False
        return torch.equal(self.of(device.selection.selected), device.master.to(self._plan.dtype))

    def accept(self) -> None:
        """The weights as they are now belong to the state."""
        self.unverified = False
        self._mark = self.counter.mark(self._param)

    def reseed(self, device: DeviceState, host: HostState) -> bool:
        """Take the fp32 masters of both sides from the weights where they do not agree with them.

        A master whose cast equals the weight is kept, so that loading a checkpoint's weights after (or before) its
        optimizer state loses no precision.

        Returns:
            Whether any of them did not.
        """
        selection = device.selection
        self._shown = None
        differs = False
        if selection.selected.numel():
            differs = _follow(device.master, self.of(selection.selected))
        if selection.deferred.numel():
            # Before the state is borrowed: the device may be waiting for jobs that wait for the space which that takes.
            weights = self.of(selection.deferred).cpu()
            with host.acquire(write=True) as state:
                differs = _follow(state.master, weights) or differs
        self.accept()
        return differs


def _follow(master: Tensor, weights: Tensor) -> bool:
    """Take ``weights`` into ``master`` where it is not what casts to them; whether there is such a place."""
    same = master.to(weights.dtype) == weights
    if bool(same.all()):
        return False
    master.copy_(torch.where(same, master, weights.float()))
    return True
