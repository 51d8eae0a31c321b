"""Several ranks train by Muon: each of them has the state of some matrices, and updates these."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.exactness.test_rules import POLICIES
from tests.support.rank_processes import RankProcesses
from zenflow_compile import ZenFlow, rules
from zenflow_compile.options.options import Options
from zenflow_compile.performance.models import model
from zenflow_compile.planning.plan import MatrixShare, Plan
from zenflow_compile.planning.planners import empty_plan, extend_plan

pytestmark = pytest.mark.timeout(180)
STEPS, MIDDLE, BATCH = 5, 2, 12
SETS: dict[str, dict[str, Any]] = {
    **{name: POLICIES[name] for name in ("zero_offload", "zenflow")},
    "windows": POLICIES["zenflow"] | {"update_interval": 4},
    "fp8": {"policy": "zero_offload", "state_dtype": "fp8"},
}


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Seven matrices, the last of which are sent together, and vectors."""
    torch.manual_seed(0)
    sizes = (48, 64, 64, 64, 96, 40, 16, 16)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def by_muon(model: nn.Module, **options: Any) -> ZenFlow:
    groups = rules.muon_groups(model, rules.Muon(lr=0.02))
    return ZenFlow(groups, rules.AdamW(eps=1e-4), min_offload_size=1, workers=1, **options)


def train(
    optimizer: ZenFlow, model: nn.Module, rank: int, ranks: int, *, steps: range, clip: float | None = None
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(BATCH, 48, generator=generator).chunk(ranks)[rank].to(next(model.parameters()).dtype)
        for part in batch.split(3):  # accumulates gradients
            model(part).float().square().mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().float().flatten() for param in model.parameters()])


def divided(
    rank: int,
    options: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    clip: float | None = None,
) -> Tensor:
    model = mlp(dtype)
    run: Any = torch.compile(model, backend="zenflow", options={"inner": "eager"}) if compiled else model
    with by_muon(model, process_group=dist.group.WORLD, **options) as optimizer:
        train(optimizer, run, rank, dist.get_world_size(), steps=range(STEPS), clip=clip)
    return weights_of(model)


def elements_by_rank(rank: int) -> list[tuple[int, int]]:
    """Of each matrix, those of the state that a rank has: planned, and in its host memory."""
    model = mlp()
    with by_muon(model, process_group=dist.group.WORLD, policy="zero_offload") as optimizer:
        train(optimizer, model, rank, dist.get_world_size(), steps=range(1))
        streamed = optimizer.engine.core.streamed.params.values()
        return [(each.plan.numel, sum(tensor.numel() for tensor in each.state.tensors())) for each in streamed]


def test_each_matrix_has_one_owner(two_ranks: RankProcesses) -> None:
    sizes = [param.numel() for param in mlp().parameters() if param.dim() == 2]
    found = two_ranks.call(elements_by_rank)
    for size, of_ranks in zip(sizes, zip(*found, strict=True), strict=True):
        assert sorted(of_ranks) == [(0, 0), (size, size)]
    assert all(0.3 * sum(sizes) < sum(planned for planned, _ in of_rank) for of_rank in found)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETS)
def test_owners_update_as_all_ranks_would(two_ranks: RankProcesses, name: str, dtype: torch.dtype) -> None:
    """To the bit: resident matrices are updated by each rank, with the same mean gradients."""
    windows = {"update_interval": 4} if name == "windows" else {}
    if windows:  # vectors have them; matrices are updated in each step
        expected = two_ranks.call(divided, SETS["zenflow"], dtype=dtype)
    else:
        expected = two_ranks.call(divided, {**SETS[name], "policy": "resident"}, dtype=dtype)
    found = two_ranks.call(divided, SETS[name], dtype=dtype)
    assert torch.equal(*found)
    assert torch.equal(found[0], expected[0])


@pytest.mark.long
@pytest.mark.parametrize("keywords", [{"clip": 0.1}, {"compiled": True}], ids=["clipped", "graphs"])
def test_steps_of_loops_and_graphs(two_ranks: RankProcesses, keywords: dict[str, Any]) -> None:
    expected = two_ranks.call(divided, {"policy": "resident"}, **keywords)
    found = two_ranks.call(divided, SETS["zenflow"], **keywords)
    assert torch.equal(*found)
    assert torch.equal(found[0], expected[0])


@pytest.mark.long
def test_four_ranks(four_ranks: RankProcesses) -> None:
    """With two copies they are in ``test_meshes_of_ranks_in_another_order``."""
    expected = four_ranks.call(divided, {"policy": "resident"})
    found = four_ranks.call(divided, SETS["zero_offload"])
    assert all(torch.equal(each, expected[0]) for each in found)


def test_two_ranks_train_as_one(two_ranks: RankProcesses) -> None:
    """Gradients are added up in another order, which Newton-Schulz multiplies, as it does a nudge in the last bit."""
    found = two_ranks.call(divided, SETS["zero_offload"])[0]

    def alone(nudge: float) -> Tensor:
        model = mlp()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.0 + nudge)
        with by_muon(model, policy="zero_offload") as optimizer:
            train(optimizer, model, 0, 1, steps=range(STEPS))
        return weights_of(model)

    expected = alone(0.0)
    noise = max(float((alone(nudge) - expected).abs().max()) for nudge in (1e-7, 2e-7, -1e-7))
    assert float((found - expected).abs().max()) <= 3 * noise
    assert float((weights_of(mlp()) - expected).abs().max()) > 5 * noise


def part_of_a_run(rank: int, ranks: int, options: dict[str, Any], steps: range, state: bytes | None) -> Any:
    """Weights, and the saved state, at the end of ``steps``."""
    model = mlp()
    group = dist.group.WORLD if ranks > 1 else None
    with by_muon(model, process_group=group, **options) as optimizer:
        if state is not None:
            weights, of_optimizer = torch.load(io.BytesIO(state))
            model.load_state_dict(weights)
            optimizer.load_state_dict(of_optimizer)
        train(optimizer, model, rank, ranks, steps=steps)
        file = io.BytesIO()
        optimizer.synchronize()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
    return weights_of(model), file.getvalue()


def of_two(rank: int, *arguments: Any) -> Any:
    return part_of_a_run(rank, 2, *arguments)


@pytest.mark.parametrize("name", ["zenflow"])
def test_state_has_whole_matrices(two_ranks: RankProcesses, name: str) -> None:
    """Two ranks resume to the bit, and one loads and saves the same state."""
    whole = two_ranks.call(of_two, SETS[name], range(STEPS), None)[0][0]
    (_, saved), (_, other) = two_ranks.call(of_two, SETS[name], range(MIDDLE), None)
    assert torch.equal(two_ranks.call(of_two, SETS[name], range(MIDDLE, STEPS), saved)[1][0], whole)
    _, again = part_of_a_run(0, 1, SETS[name], range(0), saved)
    states = [torch.load(io.BytesIO(each))[1]["state"] for each in (saved, other, again)]
    for index, entry in states[0].items():
        for key, value in entry.items():
            assert all(torch.equal(value, state[index][key]) for state in states[1:])
    assert all(bool(states[0][index]["momentum_buffer"].any()) for index in range(7))


def sharded(rank: int) -> str:
    model = mlp()
    fully_shard(model)
    with pytest.raises(ValueError, match="is sharded by fully_shard, and Muon needs whole matrices") as caught:
        by_muon(model)
    return str(caught.value)


def test_muon_refuses_sharded_models(two_ranks: RankProcesses) -> None:
    assert all("process_group=" in text for text in two_ranks.call(sharded))


# Everything at once.


def branched(dtype: torch.dtype) -> nn.ModuleDict:
    torch.manual_seed(0)
    shapes = {
        "a": (32, 32),
        "b": (32, 32),
        "frozen": (32, 32),
        "c": (32, 64),
        "d": (64, 32),
        "e": (32, 33),
        "late": (33, 40),
    }
    return nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()}).to(dtype)


def branched_loss(model: nn.ModuleDict, x: Tensor, step: int) -> Tensor:
    """Some matrices have no gradient in some steps."""
    x = torch.tanh(model["a"](x))
    if step % 3 != 1:
        x = torch.tanh(model["b"](x))
    x = torch.tanh(model["frozen"](x))
    if step % 4 != 2:
        x = model["d"](torch.tanh(model["c"](x)))
    loss: Tensor = model["late"](torch.tanh(model["e"](x))).float().square().mean()
    return loss


def everything(
    rank: int,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    *,
    mesh: list[list[int]] | None = None,
    steps: range = range(9),
    state: bytes | None = None,
) -> tuple[Tensor, bytes]:
    """Two groups of matrices with rates of their own, and one that comes later; weights, and the saved state."""
    model, ranks = branched(dtype), dist.get_world_size()
    model["frozen"].weight.requires_grad_(False)

    def group(names: str, lr: float) -> dict[str, Any]:
        return {"params": [model[name].weight for name in names.split()], "rule": rules.Muon(lr=lr)}

    groups = [
        group("a d", 0.02),
        group("b c e frozen", 0.007),
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    ranks_of = dist.group.WORLD if mesh is None else DeviceMesh("cpu", mesh)
    optimizer = ZenFlow(groups, rules.AdamW(eps=1e-4), process_group=ranks_of, min_offload_size=1, workers=1, **options)
    with optimizer:
        if state is not None:
            weights, of_optimizer = torch.load(io.BytesIO(state))
            optimizer.add_param_group(group("late", 0.01))
            model.load_state_dict(weights)
            optimizer.load_state_dict(of_optimizer)
        for step in steps:
            if step == 4:
                optimizer.add_param_group(group("late", 0.01))
            x = torch.randn(12, 32, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
            branched_loss(model, x.to(dtype), step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
    return weights_of(model), file.getvalue()


def differing(first: bytes, second: bytes) -> list[tuple[int, str]]:
    """Entries of two saved states that have other values."""
    mine, others = (torch.load(io.BytesIO(each))[1]["state"] for each in (first, second))
    return [
        (index, key)
        for index, entry in mine.items()
        for key in entry.keys() & others[index].keys() - {"plan", "chosen"}
        if not torch.equal(entry[key], others[index][key])
    ]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["zero_offload", "fp8"])
def test_groups_that_miss_gradients_and_come_later(three_ranks: RankProcesses, name: str, dtype: torch.dtype) -> None:
    expected, state = three_ranks.call(everything, SETS[name] | {"policy": "resident"}, dtype)[0]
    for weights, own in three_ranks.call(everything, SETS[name], dtype):
        assert torch.equal(weights, expected)
        assert differing(own, state) == []


def test_state_of_three_ranks_loads_into_two(three_ranks: RankProcesses, two_ranks: RankProcesses) -> None:
    _, state = three_ranks.call(everything, SETS["fp8"], steps=range(7))[0]
    found = two_ranks.call(everything, SETS["fp8"], steps=range(7, 11), state=state)
    expected = two_ranks.call(everything, SETS["fp8"] | {"policy": "resident"}, steps=range(7, 11), state=state)
    assert all(torch.equal(weights, expected[0][0]) for weights, _ in found)
    assert differing(found[0][1], expected[0][1]) == []
    for _, again in two_ranks.call(everything, SETS["fp8"], steps=range(7, 7), state=state):
        assert differing(again, state) == []


@pytest.mark.tier2
def test_meshes_of_ranks_in_another_order(four_ranks: RankProcesses) -> None:
    """An owner is the place in a row of the mesh, and not the number of the rank."""
    expected, state = four_ranks.call(everything, {"policy": "resident"})[0]
    for weights, own in four_ranks.call(everything, SETS["zero_offload"], mesh=[[3, 1], [2, 0]]):
        assert torch.equal(weights, expected)
        assert differing(own, state) == []


def loaded_from_pytorch(rank: int, options: dict[str, Any], state: Any) -> Tensor:
    model = mlp()
    with by_muon(model, process_group=dist.group.WORLD, **options) as optimizer:
        optimizer.load_state_dict(state)
        train(optimizer, model, rank, 2, steps=range(2))
    return weights_of(model)


def test_ranks_load_states_of_pytorch(two_ranks: RankProcesses) -> None:
    model = mlp()
    groups = rules.muon_groups(model, rules.Muon())
    matrices, vectors = ([param for _, param in group["params"]] for group in groups)
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, eps=1e-4)]
    model(torch.randn(8, 48)).square().mean().backward()
    for each in optimizers:
        each.step()
    first, second = (each.state_dict() for each in optimizers)
    count = len(matrices)
    state = {
        "state": first["state"] | {count + index: entry for index, entry in second["state"].items()},
        "param_groups": [
            first["param_groups"][0],
            second["param_groups"][0] | {"params": [count + index for index in second["param_groups"][0]["params"]]},
        ],
    }
    found = two_ranks.call(loaded_from_pytorch, SETS["zero_offload"], state)
    expected = two_ranks.call(loaded_from_pytorch, {"policy": "resident"}, state)
    assert torch.equal(found[0], expected[0])
    assert not torch.equal(found[0], two_ranks.call(part_of_two, SETS["zero_offload"])[0])


def part_of_two(rank: int, options: dict[str, Any]) -> Tensor:
    """As ``loaded_from_pytorch``, without a state."""
    model = mlp()
    with by_muon(model, process_group=dist.group.WORLD, **options) as optimizer:
        train(optimizer, model, rank, 2, steps=range(2))
    return weights_of(model)


def chosen_policy(rank: int) -> tuple[str, Tensor]:
    model = mlp()
    with by_muon(model, process_group=dist.group.WORLD, policy="auto", tokens_per_step=64) as optimizer:
        train(optimizer, model, rank, 2, steps=range(STEPS))
        policy = optimizer.engine.plan.policy
    return policy, weights_of(model)


@pytest.mark.long
def test_policy_of_ranks_is_chosen(two_ranks: RankProcesses) -> None:
    (policy, weights), (other, of_other) = two_ranks.call(chosen_policy)
    assert policy == other
    assert torch.equal(weights, of_other)


# Who has which matrices.

RANKS = 8


def plan_of(rank: int, parts: int = 1, stop: int | None = None) -> Plan:
    """Of Llama-3.2-1B by Muon, planned in so many parts, of which there are ``stop`` so far."""
    muon, others = rules.Muon(), rules.AdamW()
    specs = [
        replace(spec, rule=muon if len(spec.shape) == 2 and spec.name.startswith("layers") else others)
        for spec in model("llama3.2-1b").params
    ]
    options = Options.from_keywords(policy="zero_offload")
    plan = replace(empty_plan(options), rank=rank, ranks=RANKS)
    size = -(-len(specs) // parts)
    for first in range(0, len(specs), size)[:stop]:
        plan = extend_plan(plan, specs[first : first + size], options)
    return plan


def owners_of(plan: Plan) -> dict[int, int]:
    return {param.index: param.flat.owner for param in plan.params if isinstance(param.flat, MatrixShare)}


@pytest.mark.parametrize("parts", [1, 3])
def test_work_is_level(parts: int) -> None:
    plans = [plan_of(rank, parts) for rank in range(RANKS)]
    assert all(owners_of(plan) == owners_of(plans[0]) for plan in plans)
    measures: list[Callable[[Any], float]] = [
        lambda param: param.rule.matrix_flops(*param.shape),
        lambda param: param.host_state_bytes,
    ]
    for measure in measures:
        sums = [sum(measure(param) for param in plan.params if param.index in owners_of(plan)) for plan in plans]
        assert max(sums) < 1.1 * sum(sums) / RANKS
    buffers = [max(plan.subgroup_bytes) for plan in plans]
    subgroups = [[param.whole.whole_state_bytes for param in each] for each in plans[0].streamed_subgroups.values()]
    assert max(buffers) <= max(sum(each) / RANKS + max(each) for each in subgroups)


def test_owners_stay_when_parameters_come_later() -> None:
    """On a rank that knows its own parts alone."""
    first, all_parts = plan_of(0, 3, stop=1), plan_of(0, 3)
    owners = owners_of(first)
    assert set(owners.values()) == set(range(RANKS))
    assert owners == {index: owner for index, owner in owners_of(all_parts).items() if index < len(first.params)}
