"""Proves the comparisons of ranks: with a defect in what ranks send each other, one of them fails."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from torch import Tensor

from tests.ranks.models import ALL_POLICIES, WINDOWED, difference, train
from tests.support.rank_processes import RankProcesses
from zenflow_compile.planning.plan import Share
from zenflow_compile.runtime.device.readback import Readback
from zenflow_compile.runtime.device_updates import selection_groups
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.step.gradient_reduction import GradientReduction
from zenflow_compile.runtime.step.weight_gather import Changed, WeightGather

pytestmark = pytest.mark.timeout(120)


def _own_norms(self: GradientReduction) -> None:
    """Each rank clips by the norm of its own shares."""
    for offloaded in self._registry.offloaded.values():
        if offloaded.record is not None and offloaded.record.state.away:
            offloaded.record.norm = offloaded.squared_norm().sqrt()


def _first_selection(self: WeightGather, offloaded: OffloadedParam) -> bool:
    """A selection is sent once, and never again."""
    return offloaded.plan.index not in self._known


def _not_sent(self: WeightGather, changed: list[Changed], apply: Any = lambda offloaded: None) -> None:
    """Each rank applies its own updates alone."""
    for each in changed:
        if each.whole:
            apply(each.offloaded)
            each.offloaded.merged = False


def _selected_only(self: WeightGather, changed: list[Changed], apply: Any = lambda offloaded: None) -> None:
    """Of an applied window, only the selected slices reach the other ranks."""
    _not_sent(self, changed, apply)
    _GATHER(self, [Changed(each.offloaded, whole=False) for each in changed if each.offloaded.plan.k])


def _swaps_of_a_share(self: DeviceState, margin: float, swaps: int, step: int) -> Tensor:
    """Swaps are divided over the groups of the share, and not over those of the parameter."""
    at_most = selection_groups.swaps_per_group(swaps, self.plan.groups, step, self.score.device)
    return selection_groups.better_slices(self.score, self.selection.mask, self.plan.k, margin, at_most)


def _not_summed(self: Readback, *arguments: Any, **keywords: Any) -> None:
    """Each rank decides from the norms of its own shares."""
    _READBACK(self, *arguments, **keywords)
    self._ranks = None


_GATHER, _READBACK = WeightGather.gather, Readback.__init__


class Mutant(NamedTuple):
    """A defect, and a training that notices it.

    Attributes:
        diverges: ranks send other collectives than each other, which ends them.
    """

    owner: Any
    name: str
    defect: Any
    options: dict[str, Any]
    keywords: dict[str, Any]
    diverges: bool = False


ZENFLOW, RESELECTING = ALL_POLICIES["zenflow"], WINDOWED["re-selecting"]
MUTANTS = {
    "norms are not summed": Mutant(GradientReduction, "_measure", _own_norms, ZENFLOW, {"clip": 0.1}),
    "resident gradients are not averaged": Mutant(GradientReduction, "_reduce_on_device", lambda *_: None, ZENFLOW, {}),
    "selections are not sent again": Mutant(WeightGather, "_is_new", _first_selection, RESELECTING, {}),
    "deferred slices are not gathered": Mutant(WeightGather, "gather", _selected_only, ZENFLOW, {}),
    "weights are not gathered": Mutant(WeightGather, "gather", _not_sent, ZENFLOW, {}),
    "streamed weights are not gathered": Mutant(
        WeightGather, "gather_flat", lambda *_: None, ALL_POLICIES["deep_optimizer_states"], {}
    ),
    "swaps are divided over a share": Mutant(
        DeviceState, "better_slices", _swaps_of_a_share, WINDOWED["drifting"], {"steps": 60}
    ),
    "scheduling inputs are not summed": Mutant(
        Readback, "__init__", _not_summed, WINDOWED["adaptive"], {}, diverges=True
    ),
    "further contributions are dropped": Mutant(
        OffloadedParam, "_receive_more", lambda *_, **__: None, ZENFLOW, {"backwards": 2}
    ),
    "ranks take the same part": Mutant(Share, "part", property(lambda share: 0), ZENFLOW, {}),
}


def with_defect(rank: int, name: str | None, options: dict[str, Any], keywords: dict[str, Any]) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            patch.setattr(MUTANTS[name].owner, MUTANTS[name].name, MUTANTS[name].defect)
        return train(options, rank, 2, **keywords)


def is_right(ranks: RankProcesses, name: str | None, mutant: Mutant) -> bool:
    """Whether two ranks train as one process does."""
    keywords = {"steps": 24, **mutant.keywords}
    results = ranks.outcomes(with_defect, name, mutant.options, keywords, timeout=60)
    if any(isinstance(each, BaseException) for each in results):
        assert name is not None, results
        assert mutant.diverges, results
        return False
    first, second = results
    return difference(first, second) == 0 and difference(first, train(mutant.options, **keywords)) < 1e-6


@pytest.mark.parametrize("name", MUTANTS)
def test_defects_between_ranks_are_found(two_ranks: RankProcesses, name: str) -> None:
    assert is_right(two_ranks, None, MUTANTS[name])
    assert not is_right(two_ranks, name, MUTANTS[name])
