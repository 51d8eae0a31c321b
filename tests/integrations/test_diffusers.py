"""diffusers: a UNet and a diffusion transformer train under Accelerate as in its scripts, with their averages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, DiTTransformer2DModel, UNet2DModel
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.nn import functional as F

import zenflow_compile as zf
from tests.integrations.compare import ADAM, EAGER_BACKEND, EXACT, difference, forget_accelerate, offloaded, weights

STEPS = 5
MODELS = ["unet", "dit"]


def build(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "unet":
        sizes: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
        blocks = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }
        return UNet2DModel(sample_size=8, in_channels=3, out_channels=3, **sizes, **blocks)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=1, dropout=0.0,
    )  # fmt: skip
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0  # it draws labels by a generator that runs share
    return model


def trained(kind: str, *, ours: bool, compiled: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The weights, and their average."""
    forget_accelerate()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, schedule = build(kind), DDPMScheduler(num_train_timesteps=10)
    if ours:
        optimizer: Any = zf.ZenFlowAdamW(model.named_parameters(), **EXACT)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    if compiled:
        model.compile(**EAGER_BACKEND)
    model, wrapped = accelerator.prepare(model, optimizer, device_placement=[True, False])
    average = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True)
    draw = torch.Generator().manual_seed(3)
    for step in range(2 * STEPS):
        clean, noise = (torch.randn(4, 3, 8, 8, generator=draw) for _ in range(2))
        times = torch.randint(0, 10, (4,), generator=draw)
        with accelerator.accumulate(model):
            noisy = schedule.add_noise(clean, noise, times)
            labels = {"class_labels": torch.arange(4) + step % 5} if kind == "dit" else {}
            found = model(noisy, times, **labels).sample
            accelerator.backward(F.mse_loss(found[:, :3], noise))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            wrapped.step()
            wrapped.zero_grad()
        if accelerator.sync_gradients:
            average.step(model.parameters())
    kept = copy.deepcopy(average.shadow_params)
    if ours:
        assert offloaded(optimizer)
        optimizer.close()
    return weights(model), kept


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", MODELS)
def test_weights_and_averages_equal_adamw(kind: str, compiled: bool) -> None:
    expected, expected_average = trained(kind, ours=False, compiled=False)
    found, average = trained(kind, ours=True, compiled=compiled)
    assert difference(found, expected) < 2e-5
    largest = max((one - other).abs().max().item() for one, other in zip(average, expected_average, strict=True))
    assert largest < 2e-5
