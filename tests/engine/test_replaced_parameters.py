"""A model that holds other parameters than its optimizer is refused in one sentence; other changes are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.training import EAGER_BACKEND, Training
from zenflow_compile import ZenFlowAdamW

pytestmark = pytest.mark.timeout(60)


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def replace_parameter(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.zeros(32, 32))


def replace_module(model: Any) -> None:
    model[4] = nn.Linear(32, 10)


def resize(model: Any) -> None:
    """Give the parameter other memory, as ``resize_token_embeddings`` does."""
    model[4].weight.data, model[4].bias.data = torch.zeros(12, 32), torch.zeros(12)


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (assign, "in the place of 0.weight"),
    (replace_parameter, "in the place of 2.weight"),
    (replace_module, "in the place of 4.weight"),
    (resize, "4.weight was float32"),
]


@pytest.mark.tier1
@pytest.mark.parametrize("again", [False, True], ids=["graph", "compiled_again"])
@pytest.mark.parametrize(("change", "text"), CHANGES)
def test_replaced_parameter_fails_the_next_forward(change: Callable[[Any], None], text: str, again: bool) -> None:
    training = Training(EAGER_BACKEND, {}).run(0, 2)
    change(training.model)
    if again:
        training.call = torch.compile(training.model, **EAGER_BACKEND)
    with pytest.raises(RuntimeError, match=f"{text}.*create it anew") as caught:
        training.loss(2)
    assert "report" not in str(caught.value).split("anew")[0]
    training.optimizer.close()
    training.optimizer = ZenFlowAdamW(training.model.named_parameters(), min_offload_size=100)
    training.call = torch.compile(training.model, **EAGER_BACKEND)
    if change is not resize:
        training.run(2, 4)


@pytest.mark.parametrize(("change", "text"), [each for each in CHANGES if each[0] is not replace_module])
def test_replaced_parameter_fails_the_next_step(change: Callable[[Any], None], text: str) -> None:
    training = Training(EAGER_BACKEND, {}).run(0, 2)
    training.backward(2)
    change(training.model)
    with pytest.raises(RuntimeError, match=f"{text}.*create it anew"):
        training.optimizer.step()


def delete_module(model: Any) -> None:
    del model[4]
    model.append(nn.Identity())


def freeze(model: Any) -> None:
    model[2].requires_grad_(False)


def wrap(model: Any) -> None:
    """Keep the parameter under another name, as adapters do."""
    model[4] = nn.Sequential(model[4], nn.Identity())


def untie(model: Any) -> None:
    model[2].weight = nn.Parameter(model.state_dict()["2.weight"].clone())


@pytest.mark.parametrize("change", [delete_module, freeze, wrap, untie])
def test_other_changes_do_not_raise(change: Callable[[Any], None]) -> None:
    def build(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10))
        model[3].weight = model[2].weight
        return model.to(dtype)

    training = Training(EAGER_BACKEND, {"update_interval": 1}, build=build).run(0, 2)
    change(training.model)
    training.run(2, 4)
