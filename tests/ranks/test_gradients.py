"""What ``.grad`` shows on several ranks: the mean over all of them, and norms without a message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.ranks.models import ADAM, ALL_POLICIES, backward, batch, difference, on_ranks, optimizer_over, uneven
from tests.support.rank_processes import RankProcesses, messages
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(120)


def trained(rank: int, **options: Any) -> tuple[torch.nn.Module, ZenFlowAdamW]:
    """A model behind its first backward."""
    model = uneven()
    optimizer = on_ranks(model, **{**ALL_POLICIES["zenflow"], **options})
    backward(model, 0, rank)
    return model, optimizer


def joint() -> torch.nn.Module:
    model = uneven()
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    return model


def norms(rank: int) -> list[float]:
    """Rank 0 reads norms, and the other does not."""
    model, optimizer = trained(rank)
    read = [float(param.grad.norm()) for param in model.parameters()] if rank == 0 else []  # type: ignore[union-attr]
    optimizer.step()
    optimizer.close()
    return read


def test_one_rank_may_read_norms(two_ranks: RankProcesses) -> None:
    read, nothing = two_ranks.call(norms)
    assert nothing == []
    expected = [float(param.grad.norm()) for param in joint().parameters()]  # type: ignore[union-attr]
    assert read == pytest.approx(expected, rel=1e-5)


def values(rank: int) -> list[Tensor]:
    model, optimizer = trained(rank)
    read = [param.grad.clone() for param in model.parameters()]  # type: ignore[union-attr]
    optimizer.close()
    return read


def test_values_are_means_over_ranks(two_ranks: RankProcesses) -> None:
    first, second = two_ranks.call(values)
    assert difference(first, second) == 0
    assert difference(first, [param.grad for param in joint().parameters()]) < 1e-6  # type: ignore[misc]


def values_on_one(rank: int, case: str) -> None:
    model, optimizer = trained(rank)
    param = dict(model.named_parameters())["up.weight"]
    if rank == 0:
        param.grad.clone()  # type: ignore[union-attr]
    elif case == "another":
        dict(model.named_parameters())["down.weight"].grad.clone()  # type: ignore[union-attr]
    optimizer.step()


@pytest.mark.parametrize("case", ["none", "another"])
def test_values_on_one_rank_raise_on_all(two_ranks: RankProcesses, case: str) -> None:
    for text in messages(two_ranks.outcomes(values_on_one, case)):
        assert "gradient" in text
        assert "process_group" in text


def early_norm(rank: int) -> str:
    model, optimizer = trained(rank, gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="gradient_accumulation_steps") as raised:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # sends what there is
    optimizer.close()
    return str(raised.value)


def test_norm_of_a_part_raises(two_ranks: RankProcesses) -> None:
    assert all("mean over ranks" in text for text in two_ranks.call(early_norm))


def held(rank: int) -> None:
    model, optimizer = trained(rank)
    optimizer.zero_grad()
    param = dict(model.named_parameters())["up.weight"]
    kept = torch.zeros_like(param)
    param.grad = kept
    backward(model, 1, rank)
    del kept


def test_gradient_of_users_raises(two_ranks: RankProcesses) -> None:
    for text in messages(two_ranks.outcomes(held)):
        assert "up.weight" in text


def cleared(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """The first of two declared backwards is dropped, and ``step()`` comes."""
    model, optimizer = trained(rank, gradient_accumulation_steps=2)
    before = [param.detach().clone() for param in model.parameters()]
    model.zero_grad()
    optimizer.step()
    optimizer.close()
    return before, [param.detach().clone() for param in model.parameters()]


def test_cleared_gradients_are_not_sent(two_ranks: RankProcesses) -> None:
    for before, after in two_ranks.call(cleared):
        assert difference(before, after) == 0


def clipped_by_value(rank: int, max_grad_norm: float | None) -> list[Tensor]:
    model, optimizer = trained(rank, max_grad_norm=max_grad_norm)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


def test_dense_gradients_can_be_clipped(two_ranks: RankProcesses) -> None:
    model = joint()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    first, second = two_ranks.call(clipped_by_value, 0.01)
    assert difference(first, second) == 0
    assert difference(first, [param.detach() for param in model.parameters()]) < 1e-6


def large_halves(rank: int) -> float:
    """A sum of fp16 gradients would be infinite, and their mean is not."""
    param = torch.nn.Parameter(torch.zeros(8, dtype=torch.float16))
    optimizer = ZenFlowAdamW([param], **ADAM, policy="resident", process_group=dist.group.WORLD)
    (param * 40000.0).sum().backward()
    assert param.grad is not None
    found = float(param.grad[0])
    optimizer.close()
    return found


def test_resident_halves_do_not_overflow(two_ranks: RankProcesses) -> None:
    assert two_ranks.call(large_halves) == [40000.0, 40000.0]


def wrapped(rank: int) -> None:
    model = uneven()
    optimizer = on_ranks(model)
    backward(DistributedDataParallel(model), 0, rank)
    optimizer.step()


def test_reducer_beside_a_group_is_refused(two_ranks: RankProcesses) -> None:
    for text in messages(two_ranks.outcomes(wrapped)):
        assert "under DistributedDataParallel" in text
        assert "process_group=False" in text


def averaged_by_hand(rank: int) -> None:
    model, _ = trained(rank)
    for param in model.parameters():
        dist.all_reduce(param.grad)


def test_collective_over_a_mean_raises(two_ranks: RankProcesses) -> None:
    for text in messages(two_ranks.outcomes(averaged_by_hand)):
        assert "is the mean over ranks already" in text
        assert "process_group=False" in text


def with_scaler(rank: int, poisoned: bool) -> tuple[list[Tensor], float]:
    """Two steps under ``GradScaler``; the second one has an inf on rank 1."""
    model, optimizer = trained(rank)
    optimizer.step()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in (1, 2):
        x, y = batch(step, rank, 2)
        loss = F.cross_entropy(model(x), y)
        if poisoned and rank == 1 and step == 1:
            loss = loss + model.up.weight[3, 4] * torch.inf  # type: ignore[index,union-attr]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()], scaler.get_scale()


def test_inf_of_one_rank_skips_all(two_ranks: RankProcesses) -> None:
    (first, scale), (second, other_scale) = two_ranks.call(with_scaler, True)
    assert difference(first, second) == 0
    assert scale == other_scale == 2.0
    assert all(weight.isfinite().all() for weight in first)


def without_scaler(rank: int) -> list[Tensor]:
    model, optimizer = trained(rank)
    optimizer.zero_grad()
    x, y = batch(1, rank, 2)
    loss = F.cross_entropy(model(x), y)
    if rank == 1:
        loss = loss + model.up.weight[3, 4] * torch.inf  # type: ignore[index,union-attr]
    loss.backward()
    optimizer.step()
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


def test_inf_without_scaler_is_that_of_adamw(two_ranks: RankProcesses) -> None:
    first, second = two_ranks.call(without_scaler)
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(first, second, strict=True))
    names = [name for name, _ in uneven().named_parameters()]
    nan = {name: int(weight.isnan().sum()) for name, weight in zip(names, first, strict=True)}
    assert {name for name, count in nan.items() if count} == {"up.weight"}
    assert nan["up.weight"] == 1


def unfrozen(rank: int, options: dict[str, Any] | None, ranks: int, frozen: str, *, alone: bool) -> list[Tensor]:
    """Weights after training in which parameters are unfrozen at step 2, and the others frozen then if ``alone``."""
    model = uneven()
    chosen = [param for name, param in model.named_parameters() if name.startswith(frozen)]
    others = [param for name, param in model.named_parameters() if not name.startswith(frozen)]
    for param in chosen:
        param.requires_grad_(False)
    group = dist.group.WORLD if ranks > 1 else None
    optimizer = optimizer_over(model, options, "", **({} if options is None else {"process_group": group}))
    for step in range(6):
        if step == 2:
            for param in chosen:
                param.requires_grad_(True)
            for param in others if alone else ():
                param.requires_grad_(False)
        x, y = batch(step, rank, ranks)
        F.cross_entropy(model(x), y).backward()
        if options and alone and step == 2:
            with pytest.raises(RuntimeError, match=r"was unfrozen, .* call optimizer.zero_grad\(\) after"):
                optimizer.step()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if options is not None:
        optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


def unfrozen_of_two(rank: int, options: dict[str, Any], frozen: str, alone: bool) -> list[Tensor]:
    return unfrozen(rank, options, 2, frozen, alone=alone)


@pytest.mark.tier1
@pytest.mark.parametrize(("frozen", "alone"), [("single", False), ("embedding", False), ("embedding", True)])
@pytest.mark.parametrize("policy", ["zero_offload", "zenflow"])
def test_unfrozen_parameters_are_averaged(two_ranks: RankProcesses, policy: str, frozen: str, alone: bool) -> None:
    """Whether they come first in a backward or last. Alone, they are refused until ``zero_grad`` has heard of them."""
    first, second = two_ranks.call(unfrozen_of_two, ALL_POLICIES[policy], frozen, alone)
    assert difference(first, second) == 0
    assert difference(first, unfrozen(0, None, 1, frozen, alone=alone)) < 1e-5
