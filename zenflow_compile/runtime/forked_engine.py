"""The engine of a process that was forked from the one that trains: it has neither threads nor host memory.

It reads weights that no update is on its way to, and refuses everything else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NoReturn

from torch import Tensor

from zenflow_compile.runtime import errors, ops
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.runtime.engine_core import EngineCore
from zenflow_compile.runtime.gradient_intake import GradientIntake
from zenflow_compile.runtime.in_backward import InBackwardIntake
from zenflow_compile.runtime.weight_access import WeightAccess


class ForkedCore(EngineCore):
    """Refuses what an engine does for training."""

    def check(self) -> NoReturn:
        errors.refuse_in_child()


class ForkedIntake(GradientIntake):
    """Refuses gradients."""

    def begin_backward(self, arrived: int | None = None) -> NoReturn:
        errors.refuse_in_child()

    def accept_grad(self, p: int) -> NoReturn:
        errors.refuse_in_child()


class ForkedInBackwardIntake(ForkedIntake, InBackwardIntake):
    """The same where the optimizer steps in the backward."""


class ForkedAccess(WeightAccess):
    """Reads weights that the parent has made visible before the fork."""

    def _check_weights(self) -> None:
        if any(each.updates.due(self.core.step) or each.arriving is not None for each in self.offloaded.values()):
            errors.refuse_in_child("an update of the weights was on its way when the process was forked")

    def before_load(self) -> None:
        """Nothing is due."""

    def synchronize(self) -> None:
        self._check_weights()

    def apply_due(self, params: Iterable[Tensor] | None = None) -> None:
        self._check_weights()

    def before_unshard(self, sharded: Sequence[Tensor]) -> None:
        self._check_weights()

    def fetch_parameters_(self, ps: Sequence[int], params: Sequence[Tensor]) -> None:
        self._check_weights()

    # Weights in host memory.

    def _check_host_weights(self) -> None:
        if any(each.values.offloaded for each in self.weights.weights.values()):
            errors.refuse_in_child("weights are in host memory, which it does not have")

    def hold_weights(self, params: Iterable[Tensor] | None = None, *, to_write: bool = False) -> None:
        self._check_host_weights()
        super().hold_weights(params, to_write=to_write)

    def weight_on_host(self, param: Tensor) -> Tensor | None:
        home = None if (index := self.registry.index_of(param)) is None else self.weights.weights.get(index)
        if home is not None and not home.is_on_device():
            self._check_host_weights()
        return super().weight_on_host(param)

    def begin_weights(self, graph: int) -> None:
        """The graph's first load raises."""

    def load_weight_(self, p: int, inputs: Sequence[Tensor]) -> NoReturn:
        errors.refuse_in_child("the weights are in memory of its parent")


class ForkedEngine(Engine):
    """What an ``Engine`` becomes in a forked child."""

    @property
    def unapplied(self) -> list[int]:
        """Empty: the parent applies them."""
        return []

    def close(self, *, flush: bool) -> None:
        """Leave threads, files and updates to the parent."""
        self.core.closed = True


def _enter_child() -> None:
    for engine in ops.live_engines():
        if isinstance(engine, Engine):
            # Hazard: methods that were bound before keep their old class, so nothing may keep a bound method of these.
            engine.__class__ = ForkedEngine
            engine.core.__class__ = ForkedCore
            in_backward = isinstance(engine.intake, InBackwardIntake)
            engine.intake.__class__ = ForkedInBackwardIntake if in_backward else ForkedIntake
            engine.access.__class__ = ForkedAccess
            engine.registry.memory.enter_child()


# Without this a child would use memory and wait for threads that it does not have, and its share in the lock on
# ``nvme_path`` would outlive a killed parent.
os.register_at_fork(after_in_child=_enter_child)
