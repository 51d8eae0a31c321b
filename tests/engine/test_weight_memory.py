"""Weights whose memory PyTorch cannot resize, or that share it, with ``offload_weights``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.calls import Call, at_calls
from tests.support.training import EAGER_BACKEND, take_step
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.parameters import host_weights
from zenflow_compile.runtime.parameters.moved_weights import own_memory
from zenflow_compile.torch_internals.torch_private import refusal_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_weights")]

WIDTH = 48
Habit = Callable[[nn.Sequential], None]


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def from_numpy(model: nn.Module, folder: Path) -> None:
    for param in model.parameters():
        param.data = torch.from_numpy(param.detach().numpy().copy())


def from_file(model: nn.Module, folder: Path, *, mmap: bool) -> None:
    torch.save(model.state_dict(), folder / "model.pt")
    model.load_state_dict(torch.load(folder / "model.pt", mmap=mmap), assign=True)


def loaded(model: nn.Module, folder: Path) -> None:
    from_file(model, folder, mmap=False)


def mapped(model: nn.Module, folder: Path) -> None:
    from_file(model, folder, mmap=True)


def from_safetensors(model: nn.Module, folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(model.state_dict(), folder / "model.safetensors")
    model.load_state_dict(safetensors.load_file(folder / "model.safetensors"), assign=True)


def values(seed: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) / WIDTH**0.5


class Run:
    """A model that trains with its weights in host memory."""

    def __init__(self, model: nn.Sequential, policy: str = "zero_offload") -> None:
        torch._dynamo.reset()
        self.model = model
        self.optimizer = ZenFlowAdamW(
            model.named_parameters(), lr=1e-2, policy=policy, min_offload_size=1, offload_weights=1.0
        )
        self.call = torch.compile(model, **EAGER_BACKEND)

    @property
    def weights(self) -> host_weights.HostWeights:
        found: host_weights.HostWeights = self.optimizer.engine.weights
        return found


def losses(call: Any, optimizer: Any, *steps: int) -> list[float]:
    found = []
    for step in steps:
        loss = call(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
        take_step(loss, optimizer)
        found.append(float(loss.detach()))
    return found


def adamw(model: nn.Sequential, habit: Habit | None = None) -> list[float]:
    """Losses of eight steps of AdamW. ``habit`` comes after the fourth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = losses(model, optimizer, *range(4))
    if habit is not None:
        habit(model)
    return [*first, *losses(model, optimizer, *range(4, 8))]


@pytest.mark.parametrize("policy", ["zero_offload", "resident"])
@pytest.mark.parametrize("origin", [from_numpy, loaded, mapped, from_safetensors])
def test_weights_from_files_train_as_adamw(
    origin: Callable[[nn.Module, Path], None], policy: str, tmp_path: Path
) -> None:
    model = build()
    origin(model, tmp_path)
    assert not any(param.untyped_storage().resizable() for param in model.parameters())
    run = Run(model, policy)
    found = losses(run.call, run.optimizer, *range(8))
    assert found == pytest.approx(adamw(build()), rel=0, abs=1e-7)
    assert run.weights.kept == {}
    assert refusal_of(model[0].weight.untyped_storage()) is not None  # its memory is given back
    run.optimizer.close()


def test_one_weight_at_a_time_gets_its_own_memory() -> None:
    """The memory of a file is let go of before the next weight is copied."""
    model = build()
    arrays = {id(param): param.detach().numpy().copy() for param in model.parameters()}
    alive = [weakref.ref(each) for each in arrays.values()]
    for param in model.parameters():
        param.data = torch.from_numpy(arrays.pop(id(param)))
    counts: list[int] = []

    def counting(call: Call) -> None:
        counts.append(sum(each() is not None for each in alive))

    run = Run(model)
    with at_calls(counting, own_memory):
        losses(run.call, run.optimizer, 0)
    assert counts == [4, 3, 2, 1]
    run.optimizer.close()


def test_buffer_of_the_same_storage_follows_the_weight(tmp_path: Path) -> None:
    model = build()
    mapped(model, tmp_path)
    model.register_buffer("alias", model[0].weight.data)
    run = Run(model)
    losses(run.call, run.optimizer, 0, 1)
    with pytest.raises(RuntimeError, match=r"0\.weight is in host memory"):
        model.alias.sum()  # type: ignore[operator, union-attr]
    run.optimizer.synchronize()
    assert torch.equal(model.alias, model[0].weight)  # type: ignore[arg-type]
    run.optimizer.close()
    assert torch.equal(model.alias, model[0].weight)  # type: ignore[arg-type]


def test_weights_in_shared_memory_stay_there() -> None:
    model = build().share_memory()
    seen_by_others = [param.detach() for param in model.parameters()]
    run = Run(model)
    found = losses(run.call, run.optimizer, *range(8))
    assert found == pytest.approx(adamw(build()), rel=0, abs=1e-7)
    assert set(run.weights.kept.values()) == {"other processes may share its memory"}
    run.optimizer.close()
    assert all(map(torch.equal, seen_by_others, model.parameters()))
    assert all(each.is_shared() for each in seen_by_others)


def test_parameters_over_one_array_stay_one() -> None:
    def tied() -> nn.Sequential:
        model = build()
        array = model[0].weight.detach().numpy().copy()
        for layer in (model[0], model[2]):
            layer.weight.data = torch.from_numpy(array)
        return model

    model = tied()
    run = Run(model, "resident")
    assert losses(run.call, run.optimizer, *range(8)) == pytest.approx(adamw(tied()), rel=0, abs=1e-7)
    run.optimizer.synchronize()
    assert torch.equal(model[0].weight, model[2].weight)
    run.optimizer.close()
    with pytest.raises(ValueError, match=r"the memory of 0\.weight and 2\.weight overlaps"):
        Run(tied())


def test_given_memory_of_an_array_is_taken_over() -> None:
    def give(model: nn.Sequential) -> None:
        model[0].weight.data = torch.from_numpy(values(5).numpy())

    run = Run(build())
    found = losses(run.call, run.optimizer, *range(4))
    run.optimizer.synchronize()
    give(run.model)
    found += losses(run.call, run.optimizer, *range(4, 8))
    assert found == pytest.approx(adamw(build(), give), rel=0, abs=1e-7)
    run.optimizer.close()


@pytest.mark.tier1
@pytest.mark.parametrize("part", ["begin", "end"])
def test_given_part_of_a_tensor_is_refused(part: str) -> None:
    """Its memory is not emptied: the other part belongs to other code."""
    flat = torch.cat([values(5), values(6)])
    run = Run(build())
    losses(run.call, run.optimizer, 0, 1)
    run.optimizer.synchronize()
    run.model[0].weight.data = flat[:WIDTH] if part == "begin" else flat[WIDTH:]
    with pytest.raises(RuntimeError, match=r"0\.weight was given memory .* it shares memory with other tensors"):
        losses(run.call, run.optimizer, 2, 3)
    assert torch.equal(flat, torch.cat([values(5), values(6)]))
    run.optimizer.close()
