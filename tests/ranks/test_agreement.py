"""Bad input of several ranks: one clear error on all of them, before or in the first step."""

from __future__ import annotations

import gc
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from tests.ranks.models import ADAM, ALL_POLICIES, OFFLOAD, backward, batch, on_ranks, uneven
from tests.support.rank_processes import RankProcesses, messages
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.options.options import Options
from zenflow_compile.runtime.ranks.agreement import agreed, rank_group

pytestmark = pytest.mark.timeout(120)


def first_step(rank: int, difference: str) -> None:
    """Train one step with something that differs on rank 1."""
    model: nn.Module = uneven()
    adam: dict[str, Any] = dict(ADAM)
    options = dict(ALL_POLICIES["zenflow"])
    if rank == 1:
        if difference == "options":
            options["topk_ratio"] = 0.5
        elif difference == "parameters":
            model.up = nn.Linear(32, 65)
        elif difference == "weights":
            nn.init.normal_(model.up.weight)  # type: ignore[arg-type,union-attr]
        elif difference == "param groups":
            adam["lr"] = 0.5
            adam["maximize"] = True
        elif difference == "versions of torch":
            torch.__version__ = torch.torch_version.TorchVersion("9.9")
    optimizer = ZenFlowAdamW(model.named_parameters(), **adam, **options, process_group=dist.group.WORLD)
    x, y = batch(0, rank, 2)
    F.cross_entropy(model(x) if difference != "parameters" else model.up(model.embedding(x)), y).backward()  # type: ignore[operator,union-attr]
    optimizer.step()


@pytest.mark.tier1
@pytest.mark.parametrize(
    ("difference", "values"),
    [
        ("options", "{'topk_ratio': 0.25} and {'topk_ratio': 0.5}"),
        ("parameters", "{4: [[66, 32], 'torch.float32', True], 5: [[66], 'torch.float32', True]} and {4: [[65, 32], "),
        ("weights", ""),
        ("param groups", "{0: {'lr': 0.01, 'maximize': False}} and {0: {'lr': 0.5, 'maximize': True}}"),
        ("versions of torch", f"{torch.__version__} and 9.9"),
    ],
)
def test_different_ranks_are_refused(two_ranks: RankProcesses, difference: str, values: str) -> None:
    outcomes = two_ranks.outcomes(first_step, difference)
    two_ranks.close()  # one of them has another version of torch now
    for text in messages(outcomes):
        assert f"different {difference}: {values}" in text


def made(rank: int, case: str) -> None:
    group: Any = None
    if case == "mesh of three dimensions":
        group = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("replicas", "shards", "columns"))
    elif case == "other ranks":
        group = dist.new_group([1 - rank], use_local_synchronization=True)
        group = dist.new_group([0])
        if rank == 0:
            raise ValueError("process_group does not hold this rank")
    elif case == "no group":
        group = 3
    ZenFlowAdamW(uneven().named_parameters(), **ADAM, process_group=group)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("several ranks", "process_group=torch.distributed.group.WORLD"),
        ("mesh of three dimensions", "mesh of 3 dimensions"),
        ("no group", "process_group=3 must be"),
    ],
)
def test_bad_groups_are_refused(two_ranks: RankProcesses, case: str, text: str) -> None:
    assert all(text in message for message in messages(two_ranks.outcomes(made, case)))


def outside(rank: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        ZenFlowAdamW(uneven().named_parameters(), **ADAM, process_group=group).close()  # one rank trains alone
        return "hold this rank"
    with pytest.raises(ValueError, match="hold this rank") as raised:
        ZenFlowAdamW(uneven().named_parameters(), **ADAM, process_group=group)
    return str(raised.value)


def test_group_without_the_rank_is_refused(two_ranks: RankProcesses) -> None:
    assert all("hold this rank" in text for text in two_ranks.call(outside))


def with_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with ZenFlowAdamW(uneven().named_parameters(), **ADAM, process_group=mesh) as optimizer:
        assert optimizer.engine.plan.ranks == 2


def test_mesh_of_one_dimension_is_a_group(two_ranks: RankProcesses) -> None:
    two_ranks.call(with_mesh)


def alone(rank: int) -> float:
    """Without a group of its own a rank trains alone, whatever the others do."""
    model = uneven()
    optimizer = ZenFlowAdamW(model.named_parameters(), **ADAM, **ALL_POLICIES["zenflow"], process_group=False)
    for step in range(rank + 1):
        F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return float(model.up.weight.detach().sum())  # type: ignore[operator,union-attr]


def measured(rank: int) -> tuple[Options, int | None]:
    """Each rank measures other numbers of its machine: the options that it chooses, and what its host keeps up with."""
    model = uneven()
    given = Options.from_keywords(policy="zenflow", update_stride="auto")
    params = list(model.parameters())
    ranks = rank_group(dist.group.WORLD, params, torch.device("cpu"))
    assert ranks is not None
    resolved = replace(given, update_stride=3 + rank, workers=1 + rank)
    chosen = agreed(ranks, given, resolved, [{"params": params, **ADAM}], params)
    optimizer = on_ranks(model, update_interval="auto")
    calls = optimizer.engine.calls
    calls.messages.measured_window = 3 + rank
    with calls.step(0, 0) as shortest_window:
        pass
    return chosen, shortest_window


@pytest.mark.tier1
def test_measurements_of_rank_0_are_those_of_all(two_ranks: RankProcesses) -> None:
    for rank, (chosen, shortest_window) in enumerate(two_ranks.call(measured)):
        assert (chosen.update_stride, chosen.workers, shortest_window) == (3, 1 + rank, 3)


def test_ranks_may_train_alone(two_ranks: RankProcesses) -> None:
    first, second = two_ranks.call(alone)
    assert first != second


UNDECLARED = "0 backward() calls beyond the declared ones, and rank 1 1"


def changed_on_one(rank: int, what: str) -> None:
    model = uneven()
    optimizer = on_ranks(model, **ALL_POLICIES["zenflow"], gradient_accumulation_steps=1)
    for step in range(2):
        backward(model, step, rank)
        if rank == step == 1:
            if what == "gradients":
                model.up.weight.grad = None  # type: ignore[union-attr,assignment]
            elif what == UNDECLARED:  # nothing of it is sent before the step
                backward(model, step, rank)
            else:
                optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.tier1
@pytest.mark.parametrize("what", ["gradients", "param_groups", UNDECLARED])
def test_changes_on_one_rank_raise_on_all(two_ranks: RankProcesses, what: str) -> None:
    for text in messages(two_ranks.outcomes(changed_on_one, what)):
        assert what in text
        assert "in step 1" in text


def grown(rank: int, moved: bool) -> list[torch.Tensor]:
    """Add a group after the first step; or the model changes its dtype before it, and the engine is built anew."""
    model = uneven()
    options = {**ALL_POLICIES["zenflow"], "process_group": dist.group.WORLD}
    later = list(model.down.parameters())  # type: ignore[union-attr]
    first = [param for param in model.parameters() if all(param is not other for other in later)]
    optimizer = ZenFlowAdamW(first, **ADAM, **options)
    if moved:
        assert optimizer.host_bytes  # builds an engine
        model.double().float()
        model.bfloat16()
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": later})
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        if step < 2:
            for param in later:
                param.grad = None
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("moved", [False, True])
def test_groups_and_models_may_change(two_ranks: RankProcesses, moved: bool) -> None:
    first, second = two_ranks.call(grown, moved)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def written(rank: int, case: str) -> list[torch.Tensor]:
    """One element of each matrix is written between two steps: its owner alone sees another weight."""
    model = uneven()
    options = {"topk_ratio": 0.25, "update_interval": 3 if case == "late" else 4, **OFFLOAD}
    if case == "late":
        options["staleness"] = 1
    optimizer = on_ranks(model, **options)
    for step in range(7):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        if step in (2, 3):
            with torch.no_grad():
                for param in model.parameters():
                    param.view(-1)[0] += 0.5
            if case == "flush":
                optimizer.flush()
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.filterwarnings("ignore:the gradients in the update windows")
@pytest.mark.parametrize("case", ["step", "flush", "late"])
def test_writes_are_followed_by_all(two_ranks: RankProcesses, case: str) -> None:
    first, second = two_ranks.call(written, case)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(one.isfinite().all() for one in first)


def ended_without_close(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = uneven()
    options = {"topk_ratio": 0.25, "update_interval": 2, "staleness": 1, **OFFLOAD}
    optimizer = on_ranks(model, **options)
    for step in range(5):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    before = [param.detach().clone() for param in model.parameters()]
    del optimizer
    gc.collect()
    return before, [param.detach().clone() for param in model.parameters()]


def test_collected_optimizer_leaves_equal_weights(two_ranks: RankProcesses) -> None:
    (before, first), (_, second) = two_ranks.call(ended_without_close)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(before, first, strict=True))


def ends_alone(rank: int, call: str) -> None:
    model = uneven()
    optimizer = on_ranks(model)
    for step in range(2):
        backward(model, step, rank)
        if rank == step == 1:
            getattr(optimizer, call)()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("call", ["flush", "close"])
def test_flush_on_one_rank_raises_on_all(two_ranks: RankProcesses, call: str) -> None:
    for text in messages(two_ranks.outcomes(ends_alone, call)):
        assert f"calls {call}()" in text


def ended_by_total_steps(rank: int, total_steps: int | None) -> list[torch.Tensor]:
    model = uneven()
    optimizer = on_ranks(model, topk_ratio=0.25, update_interval=4, total_steps=total_steps, **OFFLOAD)
    for step in range(6):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    if total_steps is None:
        optimizer.flush()
    assert not optimizer.engine.windows_hold_gradients
    weights = [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return weights


def test_last_step_flushes_on_all_ranks(two_ranks: RankProcesses) -> None:
    first, second = two_ranks.call(ended_by_total_steps, 6)
    flushed, _ = two_ranks.call(ended_by_total_steps, None)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(first, flushed, strict=True))


def two_heads(rank: int) -> list[torch.Tensor]:
    """Two optimizers over a model, of which each rank sees another one's gradient first."""
    torch.manual_seed(0)
    body, heads = nn.Linear(16, 32), nn.ModuleList(nn.Linear(32, 8) for _ in range(2))
    optimizers = [on_ranks(part) for part in (body, heads)]
    for step in range(4):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        outputs = [heads[rank](torch.tanh(body(x))), torch.tanh(body(x))]
        sum(each.square().mean() for each in outputs[:: 1 if rank else -1]).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in optimizers:
        optimizer.close()
    return [param.detach().clone() for part in (body, heads) for param in part.parameters()]


def test_two_optimizers_end_backwards_in_one_order(two_ranks: RankProcesses) -> None:
    first, second = two_ranks.call(two_heads)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def taken_over(rank: int, options: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor | None], str]:
    """Replace the optimizer in the middle of update windows, with a gradient that no step has used."""
    model = uneven()
    earlier = on_ranks(model, **options)
    for step in range(3):
        backward(model, step, rank)
        earlier.step()
        earlier.zero_grad()
    backward(model, 3, rank)
    with warnings.catch_warnings(record=True, action="always") as caught:
        later = on_ranks(model, **options)
    grads = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
    later.step()
    later.zero_grad()
    with suppress(RuntimeError):
        earlier.step()
        raise AssertionError("the earlier optimizer steps")
    for step in range(4, 6):
        backward(model, step, rank)
        later.step()
        later.zero_grad()
    later.close()
    return [param.detach().clone() for param in model.parameters()], grads, str(caught[-1].message)


def test_all_ranks_take_over(two_ranks: RankProcesses) -> None:
    exact = {**ALL_POLICIES["zenflow"], "update_interval": 1}
    for options in (exact, ALL_POLICIES["zero_offload"]):
        (first, gradients, text), (second, others, _) = two_ranks.call(taken_over, options)
        assert "takes over parameters of an earlier one" in text
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
        assert all(grad is not None for grad in gradients)
        assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))  # type: ignore[arg-type]
        model = uneven()
        for begin, end in ((0, 3), (3, 6)):
            adamw = torch.optim.AdamW(model.parameters(), **ADAM)
            for step in range(begin, end):
                x, y = batch(step, 0, 1)
                F.cross_entropy(model(x), y).backward()
                adamw.step()
                adamw.zero_grad()
        torch.testing.assert_close(first, list(model.parameters()), rtol=1e-4, atol=1e-6)


class OverFrozenIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Parameter(torch.randint(0, 255, (16, 16), dtype=torch.uint8), requires_grad=False)
        self.head = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.base.float() / 255) @ self.head


def over_frozen_integers(rank: int) -> torch.Tensor:
    model = OverFrozenIntegers()
    with on_ranks(model) as optimizer:
        for step in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.head.detach()


def test_ranks_train_over_frozen_integers(two_ranks: RankProcesses) -> None:
    first, second = two_ranks.call(over_frozen_integers)
    assert torch.equal(first, second)
