"""The share of the squared gradient norm that is in the selected slices, for a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch

from zenflow_compile.runtime.features.feature import EngineParts, Feature, FeatureCalls
from zenflow_compile.runtime.gradients.gradient_record import GradientState
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.recorder import Recorder


class SelectedNorms(Feature):
    """Records the norms of each step of the parameters ``offloaded``, while there is a profiler."""

    def __init__(self, offloaded: Mapping[int, OffloadedParam], recorder: Recorder) -> None:
        self._offloaded = offloaded
        self._recorder = recorder

    @classmethod
    def of(cls, engine: EngineParts) -> Self:
        return cls(engine.registry.offloaded, engine.recorder)

    def calls(self) -> FeatureCalls:
        return {} if self._recorder.timeline is None else {"final": self.record}

    def record(self) -> None:
        """Record the gradients of a step, which are final and not yet used."""
        used = (GradientState.PARTS, GradientState.CONSUMED)
        sides = [offloaded.device for offloaded in self._offloaded.values() if offloaded.shown.state in used]
        timeline = self._recorder.timeline
        if timeline is not None and sides:
            selected = torch.stack([side.selected_norm() for side in sides]).sum()
            timeline.add_norms(selected, torch.stack([side.norms.sum() for side in sides]).sum())
