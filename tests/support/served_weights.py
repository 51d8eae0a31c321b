"""An engine that really loads and unloads weights, for tests of compiled graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tests.support.recording import RecordingEngine
from zenflow_compile.planning.weight_memory import OffloadedWeights
from zenflow_compile.torch_internals.torch_private import outside_of_transforms


class Serving(RecordingEngine):
    """Really loads and unloads: parameters have no memory, or NaN, outside of their uses.

    Attributes:
        peak_bytes: of loaded weights; kept: reasons by parameter; loads: by parameter.
    """

    def __init__(self, model: nn.Module, budget_bytes: int = 0, *, poisons: bool = False, **keywords: Any) -> None:
        super().__init__(model.named_parameters(), **keywords)
        self.home = {p: param.detach().clone() for p, param in enumerate(self.params)}
        self.budget_bytes, self.poisons = budget_bytes, poisons
        self.present = set(self.home)
        self.peak_bytes = 0
        self.loads: Counter[int] = Counter()
        self.kept: dict[int, str] = {}
        for p in self.home:
            self.unload_weight_(p)

    @property
    def offloaded_weights(self) -> OffloadedWeights | None:  # type: ignore[override]
        return OffloadedWeights(frozenset(self.home), self.budget_bytes)

    def keep_weights(self, reasons: Mapping[int, str]) -> None:
        for p, reason in reasons.items():
            with outside_of_transforms():
                self.load_weight_(p, [self.params[p]])
            self.kept[p] = reason
            del self.home[p]
            self.present.discard(p)

    def load_weight_(self, p: int, inputs: Sequence[Tensor]) -> None:
        own = self.params[p].untyped_storage()
        assert all(each.untyped_storage()._cdata == own._cdata for each in inputs), "other memory"
        self._note("load_weight_", p)
        if p in self.home and p not in self.present:
            own.resize_(self.home[p].nbytes)
            self.params[p].data.copy_(self.home[p])
            self.present.add(p)
            self.loads[p] += 1
            self.peak_bytes = max(self.peak_bytes, sum(self.home[each].nbytes for each in self.present))

    def unload_weight_(self, p: int) -> None:
        if p in self.present:
            self.present.discard(p)
            if self.poisons:
                self.params[p].data.fill_(float("nan"))
            else:
                self.params[p].untyped_storage().resize_(0)

    def restore(self) -> None:
        for p in self.home:
            self.load_weight_(p, [self.params[p]])
