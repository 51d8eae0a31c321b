"""Proves the comparisons of ranks: with a defect in what ranks send each other, one of them fails."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks.models import ALL_POLICIES, WINDOWED, backward, difference, optimizer_over, train, uneven
from tests.ranks.sharded import across_slices, crosswise, sharded, train_sharded
from tests.ranks.test_sharded_norms import beside, unlike
from tests.support.rank_processes import RankProcesses
from zenflow_compile import lazy_engine
from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import Share
from zenflow_compile.runtime.device.readback import Readback
from zenflow_compile.runtime.device_updates import selection
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.incoming_gradient import IncomingGradient
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.ranks.agreement import agreed
from zenflow_compile.runtime.ranks.rank_group import Pending, RankGroup
from zenflow_compile.runtime.sharding import LocalShard, Sharding
from zenflow_compile.runtime.step.gradient_reduction import GradientReduction
from zenflow_compile.runtime.step.one_rank import total_norm
from zenflow_compile.runtime.step.rank_calls import ShardCalls, StepMessages
from zenflow_compile.runtime.step.schedule import Schedule
from zenflow_compile.runtime.step.weight_gather import Changed, WeightGather

pytestmark = pytest.mark.timeout(120)


def _own_norms(self: GradientReduction) -> None:
    """Each rank clips by the norm of its own shares."""
    for offloaded in self._registry.offloaded.values():
        if offloaded.shown.record is not None and offloaded.shown.record.state.away:
            offloaded.shown.record.norm = offloaded.shown.squared_norms.sum().sqrt()


def _first_selection(self: WeightGather, offloaded: OffloadedParam) -> bool:
    """A selection is sent once, and never again."""
    return offloaded.plan.index not in self._known


def _not_sent(self: WeightGather, changed: list[Changed], apply: Any = lambda offloaded: None) -> None:
    """Each rank applies its own updates alone."""
    for each in changed:
        if each.whole:
            apply(each.offloaded)
            each.offloaded.updates.merged = False


def _selected_only(self: WeightGather, changed: list[Changed], apply: Any = lambda offloaded: None) -> None:
    """Of an applied window, only the selected slices reach the other ranks."""
    _not_sent(self, changed, apply)
    _GATHER(self, [Changed(each.offloaded, whole=False) for each in changed if each.offloaded.plan.k])


def _swaps_of_a_share(self: DeviceState, margin: float, swaps: int, step: int) -> Tensor:
    """Swaps are divided over the groups of the share, and not over those of the parameter."""
    at_most = selection.swaps_per_group(swaps, self.plan.groups, step, self.score.device)
    return selection.better_slices(self.score, self.selection.mask, self.plan.k, margin, at_most)


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
        IncomingGradient, "_receive_more", lambda *_, **__: None, ZENFLOW, {"backwards": 2}
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


# Sharded models: sums over ranks, waits for them, and the messages in which ranks agree.


def _unawaited(method: Any) -> Any:
    """``method`` without waits for its collectives."""

    def defect(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pending, "wait", lambda pending, what: pending.result.clone())
            patch.setattr(RankGroup, "_wait", lambda *_, **__: None)
            return method(self, *arguments, **keywords)

    return defect


def _own_parts(
    self: ShardCalls, norms: Sequence[Tensor], params: Sequence[nn.Parameter], device: torch.device
) -> Tensor:
    """Each rank clips by the norm of its own parts."""
    return total_norm(norms, device)


def _parts_only(
    self: ShardCalls, norms: Sequence[Tensor], params: Sequence[nn.Parameter], device: torch.device
) -> Tensor:
    """Parameters that are not sharded do not count."""
    parts = [(norm, param) for norm, param in zip(norms, params, strict=True) if isinstance(param, LocalShard)]
    return _NORM_OF(self, [norm for norm, _ in parts], [param for _, param in parts], device)


def _whole_on_each_rank(
    self: ShardCalls, norms: Sequence[Tensor], params: Sequence[nn.Parameter], device: torch.device
) -> Tensor:
    """Parameters that are not sharded count as often as there are ranks."""
    return self.group.all_reduce(total_norm(norms, device).square()).wait("the norm of the gradients").sqrt_()


_NORM_OF = ShardCalls.norm_of


class ShardMutant(NamedTuple):
    """A defect, and a training of shards that notices it.

    Attributes:
        beside: a module is not sharded, and the loop averages its gradients.
        ends: it may end ranks: without waits, messages and sums mix.
    """

    owner: Any
    name: str
    defect: Any
    options: dict[str, Any]
    steps: int = 24
    beside: bool = False
    ends: bool = False


CLIPPING = {**ZENFLOW, "max_grad_norm": 0.1}
ADAPTIVE, DRIFTING = WINDOWED["adaptive"], WINDOWED["drifting"]
ONE_WHOLE = {**DRIFTING, "min_offload_size": 66 * 33}
SUMS = {
    "norms of slices are not summed": ShardMutant(ShardCalls, "sum_norms", lambda *_: None, RESELECTING),
    "norms of slices are not awaited": ShardMutant(
        ShardCalls, "sum_norms", _unawaited(ShardCalls.sum_norms), RESELECTING, ends=True
    ),
    "norms of gradients are not summed": ShardMutant(ShardCalls, "norm_of", _own_parts, CLIPPING),
    "norms of gradients are not awaited": ShardMutant(ShardCalls, "norm_of", _unawaited(_NORM_OF), CLIPPING, ends=True),
    "whole gradients do not count": ShardMutant(ShardCalls, "norm_of", _parts_only, CLIPPING, beside=True),
    "whole gradients count on each rank": ShardMutant(
        ShardCalls, "norm_of", _whole_on_each_rank, CLIPPING, beside=True
    ),
    "scheduling inputs are not summed": ShardMutant(Readback, "__init__", _not_summed, ADAPTIVE),
    "scheduling inputs are not awaited": ShardMutant(
        Readback, "start", _unawaited(Readback.start), ADAPTIVE, ends=True
    ),
    "parts count on each rank": ShardMutant(Schedule, "_counts", lambda *_: True, DRIFTING, steps=60),
    "whole parameters count on each rank": ShardMutant(
        Schedule, "_counts", lambda _, plan: plan.counted, ONE_WHOLE, steps=40, beside=True
    ),
    "messages are not awaited": ShardMutant(RankGroup, "exchange", _unawaited(RankGroup.exchange), ZENFLOW, ends=True),
}


def shards_with_defect(rank: int, name: str | None, mutant: str) -> list[Tensor]:
    options, steps, beside_another = SUMS[mutant].options, SUMS[mutant].steps, SUMS[mutant].beside
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            patch.setattr(SUMS[name].owner, SUMS[name].name, SUMS[name].defect)
        if beside_another:
            return beside(rank, options, None, steps)
        return train_sharded(rank, 2, options, steps=steps, build=crosswise, shard_placement_fn=across_slices)


def shards_are_right(ranks: RankProcesses, name: str | None, mutant: str) -> bool:
    """Whether two ranks of shards train as one process does."""
    chosen = SUMS[mutant]
    results = ranks.outcomes(shards_with_defect, name, mutant, timeout=60)
    if any(isinstance(each, BaseException) for each in results):
        assert name is not None, results
        assert chosen.ends, results
        return False
    first, second = results
    expected = train(chosen.options, steps=chosen.steps, build=uneven if chosen.beside else crosswise)
    return difference(first, second) == 0 and difference(first, expected) < 1e-6


def differing(rank: int, what: str) -> None:
    """Train shards, of which rank 1 has or does something else."""
    mesh = None
    if what == "replicas":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    options = dict(WINDOWED["re-selecting"])
    if what == "options" and rank == 1:
        options["topk_ratio"] = 0.5
    model = sharded(mesh=mesh)
    optimizer = optimizer_over(model, options, "")
    with pytest.MonkeyPatch.context() as patch:
        for step in range(2):
            alone = rank == step == 1
            if alone and what in ("rates", "replicas"):
                optimizer.param_groups[0]["lr"] = 0.5
            if alone and what == "an error":
                patch.setattr(StepMessages, "own", _fail)
            backward(model, step, rank)
            if alone and what == "gradients":
                next(model.parameters()).grad = None
            (optimizer.flush if alone and what == "calls" else optimizer.step)()
            optimizer.zero_grad()
    if what == "state":
        state = optimizer.state_dict()
        if rank == 1:
            state["state"][1]["exp_avg"].fill_(float("nan"))
        optimizer.load_state_dict(state)
    if what == "ends":
        (optimizer.close if rank else optimizer.flush)()


def _fail(*_: object) -> None:
    raise RuntimeError("the lane is on fire")


def whole_gradients(rank: int, what: str) -> None:
    unlike(rank, ZENFLOW, "shards")


def chosen_alike(rank: int, what: str) -> None:
    """Ranks measure other values, and raise unless both use those of rank 0."""
    model = sharded()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(lazy_engine, "_resolve", lambda given, *_, **__: replace(given, topk_ratio=0.5))
        optimizer = optimizer_over(model, {**ADAPTIVE, "update_interval": (None, 4)}, "")
        engine = optimizer.engine
    engine.calls.messages.measured_window = 3 - rank
    backward(model, 0, rank)
    optimizer.step()
    found = {"choices": engine.options.topk_ratio == 0.25, "measured": engine.schedule.shortest_window == 3}
    optimizer.close()
    raise ValueError(f"alike: {found[what]}")


class Disagreement(NamedTuple):
    """A defect in how ranks agree, and a training that differs between ranks.

    Attributes:
        scene: called with what differs; text: what all ranks raise without the defect.
    """

    owner: Any
    name: str
    defect: Any
    scene: Any
    what: str
    text: str


def _own_choice(ranks: RankGroup, given: Options, resolved: Options, *others: Any) -> Options:
    agreed(ranks, given, resolved, *others)
    return resolved


@contextmanager
def _alone(*_: object) -> Iterator[None]:
    """Nothing is sent."""
    yield


AGREEMENTS = {
    "options are not compared": Disagreement(
        lazy_engine, "agreed", lambda ranks, given, resolved, *_: resolved, differing, "options", "different options"
    ),
    "each rank uses its own choices": Disagreement(
        lazy_engine, "agreed", _own_choice, chosen_alike, "choices", "alike: True"
    ),
    "each rank uses its own measurement": Disagreement(
        StepMessages, "check", lambda self, *_, **__: self.measured_window, chosen_alike, "measured", "alike: True"
    ),
    "replicas are not asked": Disagreement(
        Sharding, "ranks", property(lambda mesh: dist.get_process_group_ranks(mesh.group)), differing, "replicas",
        "different values in param_groups",
    ),
    "rates are not compared": Disagreement(
        StepMessages, "_digest_of_groups", lambda _: bytes(4), differing, "rates", "different values in param_groups"
    ),
    "gradients are not compared": Disagreement(
        StepMessages, "_digest_of_gradients", lambda _: bytes(4), differing, "gradients", "has a gradient of"
    ),
    "whole gradients are not compared": Disagreement(
        ShardCalls, "_agreed_norm", lambda _, own: float(own), whole_gradients, "", "that are not sharded"
    ),
    "steps are not announced": Disagreement(ShardCalls, "step", _alone, differing, "calls", "makes the same calls"),
    "ends are not announced": Disagreement(ShardCalls, "ending", _alone, differing, "ends", "makes the same calls"),
    "loads are not announced": Disagreement(
        ShardCalls, "agree_on_load", lambda *_: None, differing, "state", "the state dict has 'exp_avg"
    ),
    "errors are not announced": Disagreement(
        RankGroup, "announce", lambda *_: None, differing, "an error", "the lane is on fire"
    ),
}  # fmt: skip


def scene_with_defect(rank: int, name: str | None, mutant: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            patch.setattr(AGREEMENTS[name].owner, AGREEMENTS[name].name, AGREEMENTS[name].defect)
        AGREEMENTS[mutant].scene(rank, AGREEMENTS[mutant].what)


def all_ranks_raise(ranks: RankProcesses, name: str | None, mutant: str) -> bool:
    """Whether all ranks raise what they should."""
    outcomes = ranks.outcomes(scene_with_defect, name, mutant, timeout=60)
    return all(isinstance(each, BaseException) and AGREEMENTS[mutant].text in str(each) for each in outcomes)


IN_EVERY_RUN = 3


def sampled(names: Iterable[str]) -> list[Any]:
    """All of ``names``, of which a few are in every run."""
    ordered = sorted(names)
    drawn = random.Random(0).sample(ordered, IN_EVERY_RUN)
    return [pytest.param(name, marks=() if name in drawn else pytest.mark.long) for name in ordered]


@pytest.mark.parametrize("name", sampled(SUMS))
def test_defects_in_sums_of_shards_are_found(two_ranks: RankProcesses, name: str) -> None:
    assert shards_are_right(two_ranks, None, name)
    assert not shards_are_right(two_ranks, name, name)


@pytest.mark.parametrize("name", sampled(AGREEMENTS))
def test_defects_in_agreement_of_shards_are_found(two_ranks: RankProcesses, name: str) -> None:
    assert all_ranks_raise(two_ranks, None, name)
    assert not all_ranks_raise(two_ranks, name, name)
