"""Norms and loss scales of sharded gradients are those of the whole model, as beside ``torch.optim.AdamW``."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from tests.ranks.models import ALL_POLICIES, OFFLOAD, WINDOWED, batch, difference, optimizer_over, train, uneven
from tests.ranks.sharded import sharded, train_sharded, whole
from tests.ranks.test_training import EXACT, assert_equal_ranks
from tests.support.rank_processes import RankProcesses, messages

pytestmark = pytest.mark.timeout(180)

OFFLOADED = {"zero_offload": ALL_POLICIES["zero_offload"], "zenflow": ALL_POLICIES["zenflow"]}


class Full(nn.Sequential):
    """A model without shards that are empty: PyTorch has no infinity norm of them."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(40, 32), nn.Linear(32, 66), nn.Tanh(), nn.Linear(66, 33), nn.Linear(33, 40))


def full() -> nn.Module:
    torch.manual_seed(0)
    return Full()


def backward(model: nn.Module, step: int, rank: int) -> None:
    x, y = batch(step, rank, 2)
    F.cross_entropy(model(x).float(), y).backward()


def clipped(rank: int, options: dict[str, Any] | None, order: float) -> list[Tensor]:
    """The logarithms of the norms that clipping returns, the gradients that it leaves, and the weights."""
    model, found = sharded(full), []
    with tempfile.TemporaryDirectory() as folder:
        optimizer = optimizer_over(model, options, folder)
        for step in range(3):
            backward(model, step, rank)
            total: Any = clip_grad_norm_(model.parameters(), 0.05, norm_type=order, error_if_nonfinite=True)
            assert total.full_tensor() > 0.05, "nothing is clipped"
            found.append(total.full_tensor().log())
            if step == 1:
                found += [param.grad.full_tensor().clone() for param in model.parameters()]  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *whole(model)]


@pytest.mark.parametrize("order", [1.0, 2.0, 2.5, float("inf")])
@pytest.mark.parametrize("name", OFFLOADED)
def test_clipping_by_any_norm_equals_adamw(two_ranks: RankProcesses, name: str, order: float) -> None:
    results = two_ranks.call(clipped, OFFLOADED[name], order)
    assert_equal_ranks(results)
    assert difference(results[0], two_ranks.call(clipped, None, order)[0]) < EXACT


def not_finite(rank: int, options: dict[str, Any], order: float) -> tuple[list[Tensor], list[Tensor]]:
    """Clipping with ``error_if_nonfinite`` where a gradient of rank 0 alone has an inf, and the gradients around it."""
    model: Any = sharded(full)
    optimizer = optimizer_over(model, options, "")
    backward(model, 0, rank)
    grads: list[Any] = [param.grad for param in model.parameters()]
    before = [grad.full_tensor().clone() for grad in grads]
    if rank == 0:
        model[1].bias.grad.to_local()[0] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 0.05, norm_type=order, error_if_nonfinite=True)
    after = [param.grad.full_tensor().clone() for param in model.parameters()]
    optimizer.close()
    return before, after


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("name", ["resident", "zenflow"])
def test_inf_of_a_rank_raises_on_all(two_ranks: RankProcesses, name: str, order: float) -> None:
    for before, after in two_ranks.call(not_finite, ALL_POLICIES[name], order):
        changed = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
        assert sum(changed) == 1, "a gradient is scaled before the error"


def beside(rank: int, options: dict[str, Any] | None, clip: float | None, steps: int = 6) -> list[Tensor]:
    """Train with a module that is not sharded; its gradients are averaged by the loop."""
    model: Any = uneven()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=set(model.middle.parameters()))
    plain = list(model.middle.parameters())
    own = list(model.parameters())
    parts = [param for param in own if all(param is not each for each in plain)]
    optimizer = optimizer_over(model, options, "")
    for step in range(steps):
        backward(model, step, rank)
        for param in plain:
            mean = param.grad / 2
            torch.distributed.all_reduce(mean)
            param.grad = mean
        if options is None and clip is not None:
            norms = [nn.utils.get_total_norm([p.grad for p in each]) for each in (parts, plain)]
            total = torch.stack([norms[0].full_tensor(), norms[1]]).norm()
            for each in (parts, plain):
                nn.utils.clip_grads_with_norm_(each, clip, total)
        optimizer.step()
        optimizer.zero_grad()
    if options is not None:
        optimizer.flush()
    return [param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach() for param in own]


@pytest.mark.parametrize("name", ["resident", "zero_offload", "zenflow"])
def test_whole_parameters_count_once(two_ranks: RankProcesses, name: str) -> None:
    results = two_ranks.call(beside, {**ALL_POLICIES[name], "max_grad_norm": 0.1}, 0.1)
    assert_equal_ranks(results)
    assert difference(results[0], two_ranks.call(beside, None, 0.1)[0]) < EXACT


def unlike(rank: int, options: dict[str, Any], case: str) -> list[Tensor]:
    """Train with a module that is not sharded, and whose gradients differ between ranks, or are infinite on all.

    Returns:
        What this rank has of sharded weights.
    """
    shape = (2,) if case == "shards" else (2, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model: Any = uneven()
    fully_shard(model, mesh=mesh, ignored_params=set(model.middle.parameters()))
    optimizer = optimizer_over(model, {**options, "max_grad_norm": 0.1}, "")
    for step in range(2):
        backward(model, step, rank)
        for param in model.middle.parameters():
            if step == 0 or case in ("not finite", "rounded"):
                torch.distributed.all_reduce(param.grad)
            if case == "not finite":
                param.grad.fill_(float("inf") if step == 0 else float("nan"))
            elif case == "rounded" and rank == 1:
                param.grad.mul_(1 + 1e-6)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    found = [param.to_local().detach().clone() for param in model.parameters() if isinstance(param, DTensor)]
    optimizer.close()
    return found


@pytest.mark.tier1
@pytest.mark.parametrize("case", ["shards", "replicas"])
@pytest.mark.parametrize("name", ["resident", "zenflow"])
def test_unlike_whole_gradients_are_refused(two_ranks: RankProcesses, name: str, case: str) -> None:
    """Ranks would clip parts of one parameter by different factors."""
    for text in messages(two_ranks.outcomes(unlike, ALL_POLICIES[name], case)):
        assert "rank 0 and rank 1 have different gradients of the parameters that are not sharded in step 1" in text


@pytest.mark.parametrize("case", ["not finite", "rounded"])
def test_like_whole_gradients_are_accepted(two_ranks: RankProcesses, case: str) -> None:
    """Both replicas clip by the same factor."""
    first, second = two_ranks.call(unlike, ALL_POLICIES["zenflow"], case)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["adaptive", "drifting"])
def test_whole_parameters_are_scheduled_once(two_ranks: RankProcesses, name: str) -> None:
    """Their update windows and selections are those of one device: only one matrix is offloaded, and it is whole."""
    options = WINDOWED[name] | {"min_offload_size": 66 * 33}
    results = two_ranks.call(beside, options, None, 40)
    assert_equal_ranks(results)
    alone = train(options, steps=40)
    assert difference(alone, train(None, steps=40)) > 1e-3, "the windows change nothing"
    assert difference(results[0], alone) < EXACT


SCALERS: dict[str, Any] = {"GradScaler": torch.amp.GradScaler, "ShardedGradScaler": ShardedGradScaler}


def scaled(
    rank: int, options: dict[str, Any] | None, poisoned: int | None, scaler: str | None, replicated: bool = False
) -> tuple[list[Tensor], float]:
    """Train with a loss scale. In step 2, the loss of rank 1 alone, or of none, is inf."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if replicated else None
    model = sharded(mesh=mesh)
    with tempfile.TemporaryDirectory() as folder:
        optimizer = optimizer_over(model, options, folder)
        made = SCALERS[scaler or "GradScaler"]
        scale = made(device="cpu", init_scale=1024.0, growth_interval=3, enabled=scaler is not None)
        for step in range(6):
            x, y = batch(step, rank, 2)
            loss = F.cross_entropy(model(x), y)
            if step == 2 and rank == poisoned:
                loss = loss * float("inf")
            scale.scale(loss).backward()
            if step % 2:
                scale.unscale_(optimizer)  # else step() does it
                clip_grad_norm_(model.parameters(), 0.1)
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
        if options is not None:
            optimizer.flush()
        return whole(model), scale.get_scale()


@pytest.mark.matrix(2)
@pytest.mark.parametrize("poisoned", [None, 1])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_scaler_skips_on_all_ranks(two_ranks: RankProcesses, policy: str, scaler: str, poisoned: int | None) -> None:
    results = two_ranks.call(scaled, ALL_POLICIES[policy], poisoned, scaler)
    assert_equal_ranks([weights for weights, _ in results])
    expected, scale = two_ranks.call(scaled, None, poisoned, scaler)[0]
    assert [found for _, found in results] == [scale, scale]
    assert difference(results[0][0], expected) < EXACT


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("scaler", SCALERS)
def test_scaler_skips_windows_on_all_ranks(two_ranks: RankProcesses, scaler: str, replicated: bool) -> None:
    results = two_ranks.call(scaled, WINDOWED["re-selecting"], 1, scaler, replicated)
    assert_equal_ranks([weights for weights, _ in results])
    assert all(bool(weight.isfinite().all()) for weight in results[0][0])


@pytest.mark.parametrize("name", OFFLOADED)
def test_inf_without_scaler_is_that_of_adamw(two_ranks: RankProcesses, name: str) -> None:
    results = two_ranks.call(scaled, OFFLOADED[name], 1, None)
    expected = two_ranks.call(scaled, None, 1, None)[0][0]
    assert any(bool(weight.isnan().any()) for weight in expected)
    for weights, _ in results:
        for found, wanted in zip(weights, expected, strict=True):
            assert torch.equal(found.isnan(), wanted.isnan())


def hybrid(rank: int, change: str) -> list[Tensor]:
    """Train replicas on a mesh of (2, 1), of which rank 1 has something else."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"update_interval": 1, "topk_ratio": 0.25, **OFFLOAD}
    if change == "options" and rank == 1:
        options["topk_ratio"] = 0.5
    model = sharded(mesh=mesh)
    optimizer = optimizer_over(model, options, "")
    for step in range(2):
        if change == "values in param_groups" and rank == step == 1:
            optimizer.param_groups[0]["lr"] = 0.5
        backward(model, step, rank)
        if change == "gradients in .grad" and rank == step == 1:
            next(model.parameters()).grad = None
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@pytest.mark.tier1
@pytest.mark.parametrize("change", ["options", "values in param_groups", "gradients in .grad"])
def test_replicas_that_differ_are_refused(two_ranks: RankProcesses, change: str) -> None:
    expected = "rank 0 has a gradient of" if change == "gradients in .grad" else f"different {change}"
    assert all(expected in text for text in messages(two_ranks.outcomes(hybrid, change)))


def windowed(rank: int, options: dict[str, Any]) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return train_sharded(rank, 2, options, steps=24, clip=0.1, mesh=mesh)


@pytest.mark.parametrize("name", WINDOWED)
def test_windowed_replicas_are_bitwise_equal(two_ranks: RankProcesses, name: str) -> None:
    assert_equal_ranks(two_ranks.call(windowed, WINDOWED[name]))
