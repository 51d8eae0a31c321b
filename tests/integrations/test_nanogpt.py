"""A training script in the style of nanoGPT, with the optimizer exchanged."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import zenflow_compile as zf
from tests.integrations.compare import (
    ADAM,
    EAGER_BACKEND,
    ENTRIES,
    ENTRY_IDS,
    EXACT,
    PLACEMENT,
    RELATIVE,
    VOCABULARY,
    WINDOWED,
    assert_bitwise,
    assert_trained,
    dense_gradients,
    difference,
    offloaded,
    open_gradients,
    spread,
    weights,
)

STEPS, MICRO_STEPS, EVALUATE_EVERY, CLIP = 8, 3, 3, 0.3


def gpt2() -> nn.Module:
    """The same weights at every call."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return model


def get_batch(split: str, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number + (10_000 if split == "val" else 0))
    return (tokens := torch.randint(0, VOCABULARY, (4, 12), generator=generator)), tokens


def get_lr(step: int) -> float:
    """Cosine with a warm-up of two steps."""
    if step < 2:
        return ADAM["lr"] * (step + 1) / 3
    return 1e-3 + 0.5 * (1 + math.cos(math.pi * (step - 2) / STEPS)) * (ADAM["lr"] - 1e-3)


def configure_optimizers(model: nn.Module, options: dict[str, Any] | None, **extra_args: Any) -> torch.optim.Optimizer:
    """Make the optimizer, with decay for matrices and none for the others."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    if options is None:
        return torch.optim.AdamW(groups, **ADAM, **extra_args)
    return zf.ZenFlowAdamW(groups, **options, **extra_args)


@torch.no_grad()
def estimate_loss(model: nn.Module, call: Any) -> dict[str, float]:
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = []
        for number in range(2):
            inputs, labels = get_batch(split, 500 + number)
            losses.append(call(input_ids=inputs, labels=labels).loss.item())
        out[split] = sum(losses) / len(losses)
    model.train()
    return out


@dataclass
class Run:
    """The results of a script; ``windows`` are its weights after ``flush()``."""

    weights: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    offloaded: int = 0


def script(
    options: dict[str, Any] | None,
    entry: dict[str, Any] | None = None,
    *,
    clip: float = CLIP,
    save: tuple[int, Path] | None = None,
    resume: Path | None = None,
    **extra_args: Any,
) -> Run:
    """Run train.py.

    Args:
        save: after which step a checkpoint is saved, and where.
    """
    model = gpt2()
    first = 0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    optimizer = configure_optimizers(model, options, **extra_args)
    if resume is not None:
        checkpoint = torch.load(resume, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        first = checkpoint["iter_num"]
    call = torch.compile(model, **entry) if entry else model
    run = Run({})
    for step in range(first, STEPS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        if step % EVALUATE_EVERY == 0:
            run.evaluations += estimate_loss(model, call).values()
        for micro_step in range(MICRO_STEPS):
            inputs, labels = get_batch("train", MICRO_STEPS * step + micro_step)
            loss = call(input_ids=inputs, labels=labels).loss / MICRO_STEPS
            scaler.scale(loss).backward()
        run.losses.append(loss.item())
        scaler.unscale_(optimizer)
        run.norms.append(clip_grad_norm_(model.parameters(), clip).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if save is not None and save[0] == step + 1:
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step + 1}
            torch.save({**checkpoint, "scaler": scaler.state_dict()}, save[1])
    run.evaluations += estimate_loss(model, call).values()
    if isinstance(optimizer, zf.ZenFlowAdamW):
        run.offloaded = offloaded(optimizer)
        optimizer.close()
    run.weights = weights(model)
    return run


@cache
def reference(**extra_args: Any) -> Run:
    return script(None, **extra_args)


def assert_equal_to_adamw(run: Run) -> None:
    expected = reference()
    assert_trained(weights(gpt2()), expected.weights)
    assert difference(reference(clip=1e9).weights, expected.weights) > 1e-3, "the clip has no effect"
    assert all(norm > CLIP for norm in expected.norms)
    limit = max(1e-5, spread([expected.weights, reference(fused=True).weights]))
    assert run.offloaded
    assert difference(run.weights, expected.weights) <= limit
    assert run.norms == pytest.approx(expected.norms, rel=RELATIVE)
    assert run.losses == pytest.approx(expected.losses, rel=RELATIVE)
    assert run.evaluations == pytest.approx(expected.evaluations, rel=RELATIVE)


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_script_equals_adamw(entry: dict[str, Any] | None) -> None:
    """Nothing becomes dense: unscaling, accumulation and the clip are known from the gradients' parts."""
    with zf.profile() as profile:
        run = script(EXACT, entry)
    assert_equal_to_adamw(run)
    assert dense_gradients(profile) == {}


def test_script_under_inductor_equals_adamw() -> None:
    assert_equal_to_adamw(script(EXACT, {"backend": "zenflow"}))


def test_windows_are_not_adamw() -> None:
    assert difference(script(WINDOWED).weights, reference().weights) > 1e-4


@pytest.mark.parametrize(
    ("options", "entry"),
    [
        pytest.param(EXACT, None, id="exact-eager"),
        pytest.param(WINDOWED, None, id="windowed-eager"),
        pytest.param(EXACT, EAGER_BACKEND, id="exact-compiled", marks=pytest.mark.long),
        pytest.param(WINDOWED, EAGER_BACKEND, id="windowed-compiled"),
    ],
)
def test_resumed_script_continues_bitwise(
    options: dict[str, Any], entry: dict[str, Any] | None, tmp_path: Path
) -> None:
    """The script resumes after the third step, when update windows of four steps are open."""
    whole = script(options, entry, save=(3, tmp_path / "ckpt.pt"))
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert (open_gradients(saved["optimizer"]) > 0) == (options is WINDOWED)
    resumed = script(options, entry, resume=tmp_path / "ckpt.pt")
    assert resumed.losses == whole.losses[3:]
    assert_bitwise(resumed.weights, whole.weights)


def test_fused_of_the_signature_is_accepted() -> None:
    """nanoGPT asks the signature of ``torch.optim.AdamW`` for ``fused``, and passes True on a GPU."""
    assert "fused" in inspect.signature(zf.ZenFlowAdamW).parameters
    for fused in (True, False):
        configure_optimizers(gpt2(), {**ADAM, **PLACEMENT}, fused=fused)
