"""State that the gradients of one engine share: factors, the batch of norms, the recorder."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

import zenflow_compile
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device_updates.column_ops import norms_of_slices
from zenflow_compile.runtime.gradients.factors import Factors
from zenflow_compile.runtime.gradients.gradient_record import GradientRecord, GradientState
from zenflow_compile.runtime.gradients.pending_gradient import Scales
from zenflow_compile.runtime.ranks.rank_group import Call, RankGroup, first_difference
from zenflow_compile.runtime.recorder import Recorder


class Accumulator(Protocol):
    """Takes gradients that autograd adds to one in ``.grad``."""

    def accumulate_grad(self, p: int, record: GradientRecord, grad: Tensor) -> None: ...


class HasIntake(Protocol):
    """An engine."""

    intake: Accumulator


class Shown(Protocol):
    """The gradient of an offloaded parameter as ``.grad`` shows it."""

    @property
    def record(self) -> GradientRecord | None: ...
    @property
    def squared_norms(self) -> Tensor:
        """f32[slices], of the gradient without factors."""
        ...


class HasGradient(Protocol):
    """An offloaded parameter."""

    @property
    def shown(self) -> Shown: ...


class Gradients:
    """State that the gradients of one engine share.

    Attributes:
        visible: gradients are shown in ``.grad``; False for the optimizer in backward, which consumes them there.
        dense: number of gradients that became dense so far.
        process: id of the process that has the host memory of the gradients.
    """

    def __init__(
        self,
        params: Mapping[int, HasGradient],
        engine: weakref.ref[HasIntake],
        recorder: Recorder,
        device: torch.device,
        *,
        visible: bool,
        ranks: RankGroup | None,
    ) -> None:
        self.visible = visible
        self.factors = Factors(device, deferred=device_of(device).streams is not None)
        self.scales = Scales()
        self.dense = 0
        self.engine = engine
        self.process = os.getpid()
        self._params = params
        self._recorder = recorder
        self._ranks = ranks

    def measure(self) -> None:
        """Set the norms of all split gradients that have none yet, with a few operators for all of them."""
        records, squared_norms = [], []
        for param in self._params.values():
            shown = param.shown
            record = shown.record
            if record is not None and record.norm is None and record.state in _IN_PARTS:
                records.append(record)
                squared_norms.append(shown.squared_norms)
        if records:
            norms = norms_of_slices(squared_norms)
            for record, norm, spare in zip(records, torch.stack(norms).unbind(), norms, strict=True):
                record.norm, record.spare = norm, (norm, spare)

    @contextmanager
    def of_all_ranks(self, name: str, state: GradientState) -> Iterator[RankGroup]:
        """All ranks read the gradient of parameter ``name``.

        Raises RankError if not all of them do, and RuntimeError if its sum over ranks is not complete yet.
        """
        assert self._ranks is not None
        if state is GradientState.LOCAL:
            errors.refuse_partial_gradient(name)
        with self._ranks.announcing():
            asked = self._ranks.gather_texts(Call.DENSE, name)
            if (other := first_difference(asked)) is not None:
                raise self._ranks.failure(
                    f"rank 0 reads the values of the gradient of {asked[0]}, and rank {other} those of {asked[other]}; "
                    "with a process_group all ranks read the same gradients in the same order"
                )
            yield self._ranks

    def forget_numbers(self) -> None:
        """Drop cached numbers, which the device has."""
        self.factors.forget()
        self.scales.forget()

    def became_dense(self) -> None:
        """Count a gradient that became dense, and record the line of user code that asked for it."""
        self.dense += 1
        if self._recorder.timeline is not None:
            frame = sys._getframe()
            while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
                frame = frame.f_back
            self._recorder.dense_gradient(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")


_IN_PARTS = (GradientState.PARTS, GradientState.CONSUMED)
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, zenflow_compile))
