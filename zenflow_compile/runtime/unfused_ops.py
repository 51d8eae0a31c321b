"""The readable form of the nodes, served one by one: see [Note: two forms] in ``runtime.ops``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor

from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.step.optimizer_step import Coefficients


class UnfusedOps(ABC):
    """The parts of an engine's ``offload_gradients``, ``update_parameters`` and ``fetch_parameters_``."""

    offloaded: dict[int, OffloadedParam]

    def column_norms(self, p: int, grad: Tensor) -> Tensor:
        """Squared norms f32[slices] of the gradient that was split last: of this one, unless it accumulates."""
        offloaded = self.offloaded[p]
        if self._takes(p, grad):
            offloaded.receive(grad, split_now=self._split_now)
        return offloaded.device.norms.clone()  # a graph's values are not engine memory

    def select_columns(self, p: int, norms: Tensor) -> Tensor:
        """The selection in force, i32[k]."""
        return self.offloaded[p].device.selection.selected.clone()

    def split_columns(self, p: int, grad: Tensor, selected: Tensor) -> None:  # noqa: B027
        """Nothing: the parts were taken with the norms. The node orders the gradient's last use."""

    def copy_to_host(self, p: int) -> None:
        """Start the copy of what was split last."""
        self.offloaded[p].copy_to_host()

    def adam_columns_(self, p: int, param: Tensor) -> None:
        """Update the selected columns, if the gradient is final now."""
        self._update_columns([self.offloaded[p]], [param], self._in_force())

    def update_on_host(self, p: int) -> None:
        """Put the gradient into its window, if it is final now; close the window if it is due."""
        self._update_on_host([self.offloaded[p]], self._in_force())

    def copy_to_device_(self, p: int, param: Tensor) -> None:
        """``fetch_parameters_`` of one."""
        self.fetch_parameters_([p], [param])

    @property
    @abstractmethod
    def _split_now(self) -> bool: ...
    @abstractmethod
    def _takes(self, p: int, grad: Tensor) -> bool: ...
    @abstractmethod
    def _in_force(self) -> Coefficients: ...
    @abstractmethod
    def _update_columns(
        self, columns: Sequence[OffloadedParam], params: Sequence[Tensor], now: Coefficients
    ) -> None: ...
    @abstractmethod
    def _update_on_host(self, params: Iterable[OffloadedParam], now: Coefficients) -> None: ...
    @abstractmethod
    def fetch_parameters_(self, ps: Sequence[int], params: Sequence[Tensor]) -> None: ...
