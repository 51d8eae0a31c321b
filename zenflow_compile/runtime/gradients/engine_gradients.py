"""What the gradients of one engine's offloaded parameters share: norms in one batch, factors, the recorder."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

import zenflow_compile
from zenflow_compile.runtime.gradients.gradient_record import Factors, GradientRecord, GradientState
from zenflow_compile.runtime.recorder import Recorder

if TYPE_CHECKING:
    from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam


class Accumulator(Protocol):
    """An engine, which decides what becomes of a gradient that autograd adds to one in ``.grad``."""

    def accumulate_grad(self, p: int, record: GradientRecord, grad: Tensor) -> None: ...


class Gradients:
    """Shared by the offloaded parameters of an engine.

    Attributes:
        visible: gradients are shown in ``.grad``; False for the optimizer-in-backward form, which consumes them inside
            the backward.
        factors: of all of them.
        dense: how many took memory of their own so far.
        engine: decides what becomes of what autograd adds to a gradient.
        process: the one whose host memory they are in.
    """

    def __init__(
        self,
        params: Mapping[int, OffloadedParam],
        engine: weakref.ref[Accumulator],
        recorder: Recorder,
        device: torch.device,
        *,
        visible: bool,
    ) -> None:
        self.visible = visible
        self.factors = Factors(device, deferred=device.type != "cpu")
        self.dense = 0
        self.engine = engine
        self.process = os.getpid()
        self._params = params
        self._recorder = recorder

    def measure(self) -> None:
        """Set the norms of all gradients in parts that have none yet: a few operators for all of them."""
        records, line_norms = [], []
        for param in self._params.values():
            record = param.record
            if record is not None and record.norm is None and record.state in _IN_PARTS:
                records.append(record)
                line_norms.append(param.device.norms)
        if records:
            norms = torch._foreach_norm(line_norms, 1)  # of squares, which are not negative: their sum
            torch._foreach_sqrt_(norms)
            for record, norm, spare in zip(records, torch.stack(norms).unbind(), norms, strict=True):
                record.norm, record.spare = norm, (norm, spare)

    def became_dense(self) -> None:
        """Count a gradient that took memory of its own, and record the line of user code that asked for it."""
        self.dense += 1
        if self._recorder.timeline is not None:
            self._recorder.dense_gradient(_line_outside())


_IN_PARTS = (GradientState.PARTS, GradientState.CONSUMED)
_NOT_THE_USERS = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, zenflow_compile))


def _line_outside() -> str:
    """``file:line`` of the innermost frame outside of PyTorch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
