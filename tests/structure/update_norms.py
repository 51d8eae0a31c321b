"""How far the weights of each layer move per step, in a report: a feature that ``test_features.py`` adds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from zenflow_compile.runtime.features.feature import EngineParts, Feature, FeatureCalls
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.recorder import Recorder


class UpdateNorms(Feature):
    """Compares weights with those of the step before, while there is a profiler: by then its updates are visible."""

    def __init__(self, registry: ParamRegistry, recorder: Recorder) -> None:
        self._registry = registry
        self._recorder = recorder
        self._before: dict[str, Tensor] = {}
        self._norms: dict[str, list[Tensor]] = defaultdict(list)  # by layer, of each step

    @classmethod
    def of(cls, engine: EngineParts) -> Self:
        return cls(engine.registry, engine.recorder)

    def calls(self) -> FeatureCalls:
        return {} if self._recorder.timeline is None else {"final": self.record, "abandon": self._before.clear}

    def record(self) -> None:
        """Add the norms of the last step's updates."""
        squares: dict[str, list[Tensor]] = defaultdict(list)
        for name, weight in self._weights():
            if (before := self._before.get(name)) is not None:
                squares[layer_of(name)].append((weight - before).float().square().sum())
            self._before[name] = weight.clone()
        for layer, of_layer in squares.items():
            self._norms[layer].append(torch.stack(of_layer).sum().sqrt())

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for plan, param in zip(self._registry.plan.params, self._registry.params, strict=True):
            if param.requires_grad and param.untyped_storage().nbytes():  # else it is in host memory
                yield plan.name, param.detach()

    def rows(self) -> list[tuple[str, str]]:
        means = {layer: torch.stack(norms).mean().item() for layer, norms in self._norms.items()}
        return [(f"update of {layer}", f"{mean:.3g} per step") for layer, mean in means.items()]


def layer_of(name: str) -> str:
    """The name up to its first number, such as ``model.layers.0`` of ``model.layers.0.mlp.up_proj.weight``."""
    found = re.match(r".*?\b\d+(?=\.)", name)
    return found[0] if found else name.rpartition(".")[0]
