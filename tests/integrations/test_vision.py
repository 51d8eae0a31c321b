"""Vision models with timm's own training parts: scaler, clips, schedule, weight decay by layer, moving averages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zenflow_compile as zf
from tests.integrations.compare import (
    ADAM,
    EAGER_BACKEND,
    ENTRIES,
    ENTRY_IDS,
    EXACT,
    WINDOWED,
    assert_trained,
    dense_gradients,
    difference,
    offloaded,
    spread,
    weights,
)
from tests.integrations.vision import import_timm

timm = import_timm()

STEPS = 6


def vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    model: nn.Module = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10, weight_init="jax"
    )
    return model


def resnet() -> nn.Module:
    """ResNet18 with an eighth of its channels."""
    from timm.models.resnet import BasicBlock, ResNet

    model: nn.Module = ResNet(BasicBlock, (2, 2, 2, 2), num_classes=10, stem_width=8, channels=(8, 16, 32, 64))
    return model


def convnext() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    model: nn.Module = ConvNeXt(depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), num_classes=10, ls_init_value=0.5)
    return model


def torchvision_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    model: nn.Module = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    for name in ("layer3", "layer4"):  # without the two stages that have 10 of its 11 million weights
        setattr(model, name, nn.Identity())
    model.fc = nn.Linear(128, 10)
    return model


MODELS = {"vit": vit, "resnet": resnet, "convnext": convnext, "torchvision_resnet": torchvision_resnet}


def batch(name: str, number: int) -> tuple[Tensor, Tensor]:
    side = 16 if name == "vit" else 32
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(4, 3, side, side, generator=generator)
    return images, torch.randint(0, 10, (4,), generator=generator)


@dataclass(frozen=True)
class Recipe:
    """Arguments of timm's train.py.

    Attributes:
        clip: mode and value of ``dispatch_clip_grad``; None for no clip.
        groups: decay of the parameter groups: ``weight_decay`` or ``layer_decay``.
        ema: whether a ``ModelEmaV3`` follows the model.
    """

    clip: tuple[str, float] | None = None
    groups: str = "weight_decay"
    ema: bool = False


@dataclass
class Trained:
    """Weights, losses, those of the moving average, and its losses."""

    weights: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    average: dict[str, Tensor] = field(default_factory=dict)
    dense: dict[str, int] = field(default_factory=dict)


def groups_of(model: nn.Module, recipe: Recipe) -> Any:
    from timm.optim import param_groups_layer_decay, param_groups_weight_decay

    if recipe.groups == "layer_decay":
        return param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.75)
    return param_groups_weight_decay(model, weight_decay=0.05)


def train(
    name: str, recipe: Recipe, options: dict[str, Any] | None, entry: dict[str, Any] | None = None, **adamw: Any
) -> Trained:
    """Run the inner loop of timm's train.py, two batches per update."""
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3, NativeScaler

    torch.manual_seed(0)
    model = MODELS[name]()
    groups = groups_of(model, recipe)
    optimizer: Any
    if options is None:
        optimizer = torch.optim.AdamW(groups, **ADAM, **adamw)
    else:
        optimizer = zf.ZenFlowAdamW(groups, **options)
    scheduler = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=2, warmup_lr_init=1e-3, t_in_epochs=False)
    scaler = NativeScaler(device="cpu")
    ema = ModelEmaV3(model, decay=0.8) if recipe.ema else None
    call = torch.compile(model, **entry) if entry else model
    result = Trained({})
    with zf.profile() as profile:
        for step in range(STEPS):
            for part in range(2):
                images, targets = batch(name, 2 * step + part)
                loss = F.cross_entropy(call(images), targets) / 2
                mode, value = recipe.clip or ("norm", None)
                clip: dict[str, Any] = {"clip_grad": value, "clip_mode": mode, "parameters": model.parameters()}
                scaler(loss, optimizer, **clip, need_update=part == 1)
                result.losses.append(loss.item())
            optimizer.zero_grad()
            if ema is not None:
                ema.update(model, step=step)
            scheduler.step_update(num_updates=step + 1)
    if options is not None:
        result.dense = dense_gradients(profile)
        assert offloaded(optimizer)
        optimizer.close()
    result.weights = weights(model)
    if ema is not None:
        result.average = weights(ema.module)
    return result


@cache
def reference(name: str, recipe: Recipe) -> tuple[Trained, float]:
    """Weights of AdamW, and the spread of its variants."""
    torch.manual_seed(0)
    before = weights(MODELS[name]())
    runs = [train(name, recipe, None, foreach=True), train(name, recipe, None, fused=True)]
    assert_trained(before, runs[0].weights)
    return runs[0], spread(run.weights for run in runs)


def compare(name: str, recipe: Recipe, entry: dict[str, Any] | None) -> Trained:
    expected, limit = reference(name, recipe)
    result = train(name, recipe, EXACT, entry)
    assert difference(result.weights, expected.weights) <= max(1e-5, 2 * limit)
    assert result.losses == pytest.approx(expected.losses, rel=max(1e-5, limit))
    return result


NORM = Recipe(clip=("norm", 0.5))
FEW = [("vit", ENTRIES[1]), ("resnet", ENTRIES[0]), ("resnet", ENTRIES[1]), ("convnext", ENTRIES[0])]


def cases(build: Callable[[str, dict[str, Any] | None], bool]) -> list[Any]:
    """Every model with both entries; models that ``build`` does not name are marked long."""
    return [
        pytest.param(name, entry, id=f"{name}-{label}", marks=[] if build(name, entry) else [pytest.mark.long])
        for name in MODELS
        for entry, label in zip(ENTRIES, ENTRY_IDS, strict=True)
    ]


@pytest.mark.parametrize(("name", "entry"), cases(lambda name, entry: (name, entry) in FEW))
def test_models_equal_adamw(name: str, entry: dict[str, Any] | None) -> None:
    """``NativeScaler`` unscales and clips by norm: no gradient becomes dense."""
    assert difference(reference(name, Recipe())[0].weights, reference(name, NORM)[0].weights) > 1e-4
    assert compare(name, NORM, entry).dense == {}


CLIPS = {
    "value": Recipe(clip=("value", 0.01)),
    "agc": Recipe(clip=("agc", 0.02)),
    "layer_decay": Recipe(clip=("norm", 0.5), groups="layer_decay"),
}


@pytest.mark.parametrize("entry", [None, pytest.param(EAGER_BACKEND, marks=pytest.mark.long)], ids=ENTRY_IDS)
@pytest.mark.parametrize("recipe", CLIPS.values(), ids=CLIPS)
def test_timm_recipes_equal_adamw(recipe: Recipe, entry: dict[str, Any] | None) -> None:
    """Clips of single elements and of rows write values, which takes dense memory."""
    for other in (NORM, Recipe()):
        assert difference(reference("vit", other)[0].weights, reference("vit", recipe)[0].weights) > 1e-4
    result = compare("vit", recipe, entry)
    assert bool(result.dense) == (recipe.clip is not None and recipe.clip[0] != "norm")


@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
def test_moving_average_equals_adamw(entry: dict[str, Any] | None) -> None:
    """No option is needed: ``ModelEmaV3`` reads ``state_dict()``, which applies every due update."""
    recipe = Recipe(ema=True)
    expected = reference("vit", recipe)[0]
    result = compare("vit", recipe, entry)
    assert difference(expected.average, expected.weights) > 1e-3
    assert difference(result.average, expected.average) <= 1e-5


def test_windowed_moving_average_at_both_entries() -> None:
    eager, compiled = (train("vit", Recipe(ema=True), WINDOWED, entry) for entry in ENTRIES)
    assert difference(eager.average, compiled.average) <= 1e-5
    assert difference(eager.average, reference("vit", Recipe(ema=True))[0].average) > 1e-4


@pytest.mark.long
def test_vit_under_inductor_equals_adamw() -> None:
    assert compare("vit", NORM, {"backend": "zenflow"}).dense == {}
