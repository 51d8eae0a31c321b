"""Recipes in the style of torchtune: gradients scaled by the number of tokens, and the optimizer in backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import zenflow_compile as zf
from tests.integrations.compare import (
    ADAM,
    EAGER_BACKEND,
    ENTRIES,
    ENTRY_IDS,
    EXACT,
    RELATIVE,
    VOCABULARY,
    WINDOWED,
    assert_bitwise,
    assert_trained,
    dense_gradients,
    difference,
    offloaded,
    open_gradients,
    tiny_llama,
    weights,
)

INDUCTOR: dict[str, Any] = {"backend": "zenflow"}
STEPS, CLIP = 6, 0.2
Numbers = list[float]


def build(entry: dict[str, Any] | None = None) -> nn.Module:
    """A Llama whose blocks are compiled one by one, and recomputed in the backward.

    As in torchtune, blocks are compiled before they are wrapped: Dynamo compiles nothing of a wrapper. Under Inductor
    they are not recomputed: torch 2.13's own backend="inductor" fails there with AdamW, too (strides of saved tensors).
    """
    model = tiny_llama()
    blocks = set(model.model.layers)
    if entry:
        for block in blocks:
            block.compile(**entry)
    if entry != INDUCTOR:
        apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)
    return model


def graphs(optimizers: Iterable[Optimizer]) -> int:
    """Count the compiled graphs that serve the optimizers' parameters."""
    return sum(len(optimizer.engine.graphs) for optimizer in optimizers if isinstance(optimizer, zf.ZenFlowAdamW))


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels; 3 to 10 labels of each sequence count."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, 3 + number % 8 :] = -100
    return tokens, labels


def summed_loss(model: nn.Module, number: int) -> tuple[Tensor, int]:
    tokens, labels = batch(number)
    logits = model(input_ids=tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, int((labels != -100).sum())


def scale_grads(model: nn.Module, scaler: Tensor) -> None:
    """Scale gradients as torchtune's ``training.scale_grads`` does."""
    for param in model.parameters():
        if param.grad is not None:
            param.grad *= scaler


def full_finetune(model: nn.Module, optimizer: Optimizer, *, scaled: bool = True) -> Numbers:
    """Run the inner loop of torchtune's recipe: micro batches of different token counts, one norm per step."""
    logged: Numbers = []
    for step in range(STEPS):
        tokens, running = torch.tensor(0), torch.tensor(0.0)
        for micro in range(3):
            loss, count = summed_loss(model, 3 * step + micro)
            tokens += count
            running += loss.detach()
            loss.backward()
        if scaled:
            scale_grads(model, 1 / tokens)
        norm = clip_grad_norm_(model.parameters(), max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        logged += [running.item() / int(tokens), norm.item()]
    return logged


@cache
def reference(scaled: bool = True) -> tuple[dict[str, Tensor], Numbers]:
    model = build()
    numbers = full_finetune(model, torch.optim.AdamW(model.parameters(), **ADAM), scaled=scaled)
    return weights(model), numbers


@pytest.mark.parametrize(
    "entry",
    [*ENTRIES, pytest.param(INDUCTOR, marks=pytest.mark.long)],
    ids=[*ENTRY_IDS, "inductor"],
)
def test_scaled_gradients_equal_adamw(entry: dict[str, Any] | None) -> None:
    """Nothing becomes dense: one factor scales each gradient, and accumulated ones lie in the engine's memory."""
    expected, numbers = reference()
    assert_trained(weights(build()), expected)
    assert reference(scaled=False)[1][1] > 5 * numbers[1], "the scale has no effect"
    model = build(entry)
    with zf.ZenFlowAdamW(model.parameters(), **EXACT) as optimizer:
        with zf.profile() as profile:
            logged = full_finetune(model, optimizer)
        assert offloaded(optimizer)
        assert (graphs([optimizer]) > 0) == bool(entry)
        optimizer.synchronize()
    assert dense_gradients(profile) == {}
    # Without recomputation names have no "_checkpoint_wrapped_module".
    assert difference(dict(zip(expected, weights(model).values(), strict=True)), expected) <= 1e-5
    assert logged == pytest.approx(numbers, rel=RELATIVE)


# Optimizers in backward


class InBackward:
    """torchtune's ``OptimizerInBackwardWrapper``: one optimizer per parameter, which hooks step and clear."""

    def __init__(self, model: nn.Module, make: Callable[[Any], Optimizer]) -> None:
        self.optimizers = {name: make([param]) for name, param in model.named_parameters()}
        of = {param: self.optimizers[name] for name, param in model.named_parameters()}

        def step(param: Tensor) -> None:
            of[param].step()
            of[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])

    def all(self) -> list[Optimizer]:
        return list(self.optimizers.values())


def per_parameter(model: nn.Module, make: Callable[[Any], Optimizer]) -> list[Optimizer]:
    return InBackward(model, make).all()


def per_layer(model: nn.Module, make: Callable[[Any], Optimizer]) -> list[Optimizer]:
    """One optimizer for each block, stepped when the last gradient of the block has arrived."""
    made = []
    parts: list[Any] = [*model.model.layers, model.model.embed_tokens, model.model.norm, model.lm_head]
    for part in parts:
        params = list(part.parameters())
        optimizer, arrived = make(params), Counter[str]()

        def step(param: Tensor, optimizer: Any = optimizer, arrived: Any = arrived, count: int = len(params)) -> None:
            arrived["gradients"] += 1
            if arrived["gradients"] == count:
                optimizer.step()
                optimizer.zero_grad()
                arrived.clear()

        for param in params:
            param.register_post_accumulate_grad_hook(step)
        made.append(optimizer)
    return made


def apply_in_backward(model: nn.Module, make: Callable[[Any], Optimizer]) -> list[Optimizer]:
    """PyTorch's own: a hook after each ``AccumulateGrad`` node."""
    _apply_optimizer_in_backward(make, model.parameters(), {})
    return _get_in_backward_optimizers(model)


WAYS = {"per_parameter": per_parameter, "per_layer": per_layer, "apply_in_backward": apply_in_backward}


def train_in_backward(
    way: str, options: dict[str, Any] | None, entry: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """This form supports neither clipping nor accumulation, in torchtune as here."""
    model = build(entry)
    made = WAYS[way](
        model,
        lambda params: torch.optim.AdamW(params, **ADAM) if options is None else zf.ZenFlowAdamW(params, **options),
    )
    for step in range(STEPS):
        for group in (group for optimizer in made for group in optimizer.param_groups):
            group["lr"] = ADAM["lr"] / (1 + step)  # torchtune's scheduler writes every optimizer's rate
        loss, tokens = summed_loss(model, step)
        (loss / tokens).backward()
        assert all(param.grad is None for param in model.parameters())
    if options is not None:
        ours = [optimizer for optimizer in made if isinstance(optimizer, zf.ZenFlowAdamW)]
        assert sum(map(offloaded, ours)) > 10
        assert (graphs(ours) > 0) == bool(entry)
        for optimizer in ours:
            optimizer.close()
    return weights(model)


@cache
def in_backward_reference() -> dict[str, Tensor]:
    expected = train_in_backward("per_parameter", None)
    assert_trained(weights(build()), expected)
    return expected


@pytest.mark.parametrize(
    ("way", "entry"),
    [
        *[pytest.param(way, None, id=f"{way}-eager") for way in WAYS],
        pytest.param("per_parameter", EAGER_BACKEND, id="per_parameter-compiled"),
        *[
            pytest.param(way, EAGER_BACKEND, id=f"{way}-compiled", marks=pytest.mark.long)
            for way in ("per_layer", "apply_in_backward")
        ],
    ],
)
def test_optimizers_in_backward_equal_adamw(way: str, entry: dict[str, Any] | None) -> None:
    assert difference(train_in_backward(way, EXACT, entry), in_backward_reference()) <= 1e-5


@pytest.mark.parametrize("options", [EXACT, WINDOWED], ids=["exact", "windowed"])
@pytest.mark.parametrize("entry", [None, pytest.param(EAGER_BACKEND, marks=pytest.mark.long)], ids=ENTRY_IDS)
def test_optimizers_in_backward_resume_bitwise(
    entry: dict[str, Any] | None, options: dict[str, Any], tmp_path: Path
) -> None:
    """One file holds the states of all optimizers, in the middle of update windows."""

    def run(steps: range, load: Path | None, save: Path | None) -> dict[str, Tensor]:
        model = build(entry)
        wrapper = InBackward(model, lambda params: zf.ZenFlowAdamW(params, **options))
        if load:
            checkpoint = torch.load(load, weights_only=True)
            model.load_state_dict(checkpoint["model"])
            wrapper.load_state_dict(checkpoint["optimizer"])
        for step in steps:
            summed_loss(model, step)[0].backward()
            if save and step == 2:
                torch.save({"model": model.state_dict(), "optimizer": wrapper.state_dict()}, save)
        for optimizer in wrapper.all():
            optimizer.close()
        return weights(model)

    whole = run(range(STEPS), None, tmp_path / "recipe.pt")
    states = torch.load(tmp_path / "recipe.pt", weights_only=True)["optimizer"].values()
    assert any(map(open_gradients, states)) == (options is WINDOWED)
    assert_bitwise(run(range(3, STEPS), tmp_path / "recipe.pt", None), whole)
    assert difference(whole, run(range(3), None, None)) > 1e-3
