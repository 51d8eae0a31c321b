"""Lightning's Trainer: precision, clipping, resume, callbacks, manual optimization, with the real package."""

from __future__ import annotations

import copy
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import zenflow_compile as zf
from tests.integrations.compare import (
    ADAM,
    EAGER_BACKEND,
    EXACT,
    FIRST_USES,
    INTERVALS,
    RELATIVE,
    TOLERANCE,
    WINDOWED,
    Layers,
    Numbers,
    assert_as_adamw,
    assert_bitwise,
    assert_trained,
    dense_gradients,
    difference,
    nudge,
    offloaded,
    open_gradients,
    spread,
    weights,
)
from tests.support.processes import run_two_processes
from zenflow_compile.integrations.lightning import ZenFlowCallback

pytestmark = [
    pytest.mark.timeout(120),
    # Warnings of Lightning about tiny data sets, missing loggers and its own use of PyTorch.
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning"),
]
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

ENTRIES: dict[str, dict[str, Any] | None] = {"hooks": None, "compiled": EAGER_BACKEND}
BATCHES = 6


class Regression(LightningModule):
    """Logs the loss and the norm of every gradient at every step.

    Args:
        options: of ``ZenFlowAdamW``; None for ``torch.optim.AdamW``.
        skipped: batches whose ``training_step`` returns None.
        adamw: keywords of ``torch.optim.AdamW``.
    """

    def __init__(
        self, options: dict[str, Any] | None = None, skipped: tuple[int, ...] = (), adamw: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Layers()
        self.options, self.skipped, self.adamw = options, skipped, adamw or {}
        self.losses: list[float] = []
        self.norms: list[dict[str, float]] = []
        self.validated: list[float] = []
        self.batch_size = 8

    def new_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        if self.options is None:
            return torch.optim.AdamW(module.parameters(), **ADAM, **self.adamw)
        return zf.ZenFlowAdamW(module.named_parameters(), **self.options)

    def configure_optimizers(self) -> Any:
        return self.new_optimizer(self)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if batch_idx in self.skipped:
            return None
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append({name: float(norm) for name, norm in grad_norm(self.net, 2).items()})

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.validated.append(loss.item())
        self.log("val_loss", loss)
        return loss

    test_step = validation_step

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size)

    def val_dataloader(self) -> list[Any]:
        return []


def loader(batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * BATCHES, 16, generator=generator)
    return DataLoader(TensorDataset(inputs, 3 * torch.randn(8 * BATCHES, 2, generator=generator)), batch_size)


def new_trainer(folder: Path | None = None, **keywords: Any) -> Trainer:
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "max_epochs": 2,
            "default_root_dir": folder,
            **keywords,
        }
    )


def compiled(module: LightningModule, entry: str) -> LightningModule:
    """``module`` with its network compiled in place, as Lightning's docs advise."""
    if (backend := ENTRIES[entry]) is not None:
        module.net.compile(**backend)  # type: ignore[union-attr]
    return module


def optimizer_of(trainer: Trainer) -> zf.ZenFlowAdamW:
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, zf.ZenFlowAdamW)
    assert offloaded(optimizer) == 2
    return optimizer


def some(names: Iterable[str], short: Iterable[str]) -> list[Any]:
    """Parameters for a test: those that are not in ``short`` are long."""
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in names]


# Automatic optimization.

SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "norm": lambda: {"gradient_clip_val": 0.5},
    "value": lambda: {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "accumulated": lambda: {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
    "scheduled": lambda: {"callbacks": [GradientAccumulationScheduler({0: 3, 1: 2})]},
    "anomaly": lambda: {"detect_anomaly": True},
    "overfit": lambda: {"overfit_batches": 2},
    "fp32": lambda: {"precision": "32-true"},
    "bf16": lambda: {"precision": "bf16-mixed", "gradient_clip_val": 0.5},
    "bf16_value": lambda: {"precision": "bf16-mixed", "gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "fp16": lambda: {"precision": "16-mixed", "gradient_clip_val": 0.5},
    # Gradients overflow in the first steps, which the scaler skips.
    "fp16_overflow": lambda: {
        "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))],
        "gradient_clip_val": 0.5,
    },
    "skipped": lambda: {"gradient_clip_val": 0.5},
    "skipped_accumulated": lambda: {"accumulate_grad_batches": 2},
    "skipped_fp16": lambda: {"precision": "16-mixed"},
}


class Fitted(SimpleNamespace):
    """A module after ``trainer.fit()``, with what was logged."""


BF16_WEIGHTS = {"bf16_weights": lambda: {"precision": "bf16-true"}}


def fit(
    setting: str,
    entry: str = "hooks",
    options: dict[str, Any] | None = None,
    nudged: float | None = None,
    **adamw: Any,
) -> Fitted:
    """``nudged``: change the first weights in their last place, towards this number."""
    module = Regression(options, (0, 3, 4) if "skipped" in setting else (), adamw)
    if nudged is not None:
        nudge(module, nudged)
    before = weights(module)
    trainer = new_trainer(**{**SETTINGS, **BF16_WEIGHTS}[setting]())
    compiled(module, entry)
    with zf.profile() as profile:
        trainer.fit(module, loader())
    return Fitted(module=module, trainer=trainer, profile=profile, before=before, weights=weights(module))


@cache
def adamw_fits(setting: str) -> list[Fitted]:
    """The same run under AdamW; in half precision also over weights that differ in the last place."""
    fitted = fit(setting)
    assert_trained({name: value.to(fitted.weights[name]) for name, value in fitted.before.items()}, fitted.weights)
    halves = "fp16" in setting or "bf16" in setting
    return [fitted, *(fit(setting, nudged=towards) for towards in ((math.inf, -math.inf) if halves else ()))]


def numbers(ended: dict[str, Tensor], module: Regression) -> Numbers:
    assert module.losses
    assert module.norms
    norms = {name: [each[name] for each in module.norms] for name in module.norms[0]}
    return Numbers(ended, {"losses": module.losses, **norms})


SHORT_SETTINGS = ("norm", "value", "accumulated", "bf16", "fp16_overflow", "skipped")


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("setting", some(SETTINGS, SHORT_SETTINGS))
def test_trainer_equals_adamw(setting: str, entry: str) -> None:
    fitted = fit(setting, entry, EXACT)
    assert_as_adamw(*(numbers(each.weights, each.module) for each in (fitted, *adamw_fits(setting))))
    optimizer_of(fitted.trainer)
    if "value" in setting:
        # Clipping by value writes every element: each offloaded gradient is dense, once.
        assert sum(dense_gradients(fitted.profile).values()) == 2 * len(fitted.module.norms)
    else:
        assert dense_gradients(fitted.profile) == {}


@pytest.mark.parametrize("entry", ENTRIES)
def test_bf16_weights_stay_within_the_spread(entry: str) -> None:
    """One rounding moves a bf16 weight by 2^-8 of it: AdamW's own variants differ as much as ZenFlowAdamW."""
    variants = [
        fit("bf16_weights", **{name: flag}) for name, flag in (("foreach", False), ("foreach", True), ("fused", True))
    ]
    fitted = fit("bf16_weights", entry, EXACT)
    assert fitted.weights["net.first.weight"].dtype == torch.bfloat16
    allowed = spread(each.weights for each in variants)
    assert 0 < allowed < 2**-7
    assert min(difference(fitted.weights, each.weights) for each in variants) <= allowed
    optimizer_of(fitted.trainer)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["zero_offload", "twinflow", "deep_optimizer_states"])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore:policy=:UserWarning")
def test_exact_policies_equal_adamw(setting: str, entry: str, policy: str) -> None:
    options = {**ADAM, "min_offload_size": 100, "policy": policy}
    if policy == "deep_optimizer_states":  # else its stride is measured, and may leave nothing on the host
        options.update(ratio=1.0, update_stride=2)
    fitted = fit(setting, entry, options)
    assert_as_adamw(*(numbers(each.weights, each.module) for each in (fitted, *adamw_fits(setting))))
    assert offloaded(fitted.trainer.optimizers[0]) > 0


class WholeStep(Regression):
    """Its training step can be compiled as a whole."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        return


@pytest.mark.parametrize("backend", [EAGER_BACKEND, {"backend": "zenflow"}], ids=["eager", "inductor"])
def test_compiled_lightning_module(backend: dict[str, Any]) -> None:
    """Lightning unwraps it, and compiles ``training_step`` and ``validation_step``."""
    expected, module = WholeStep(), WholeStep(EXACT)
    before = weights(module)
    new_trainer(gradient_clip_val=0.5).fit(expected, loader(), loader())
    trainer = new_trainer(gradient_clip_val=0.5)
    trainer.fit(torch.compile(module, **backend), loader(), loader())
    assert difference(weights(module), weights(expected)) < TOLERANCE
    assert_trained(before, weights(module))
    assert module.norms == [pytest.approx(norms, rel=RELATIVE) for norms in expected.norms]
    assert module.validated == pytest.approx(expected.validated, rel=RELATIVE)
    assert zf.optimizer_of(torch.compile(module, **backend)) is optimizer_of(trainer)


class Scheduled(Regression):
    """The learning rate falls whenever the loss does not."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@pytest.mark.parametrize("entry", ENTRIES)
def test_plateau_scheduler_and_rate_monitor(entry: str, tmp_path: Path) -> None:
    modules = [Scheduled(), compiled(Scheduled(EXACT), entry)]
    for number, module in enumerate(modules):
        logger = CSVLogger(tmp_path / str(number))
        trainer = new_trainer(logger=logger, max_epochs=4, log_every_n_steps=1, callbacks=[LearningRateMonitor("step")])
        trainer.fit(module, loader(), loader())
    rates, expected = (
        re.findall(
            r"\d+\.?\d*(?:e-\d+)?", (tmp_path / str(number) / "lightning_logs/version_0/metrics.csv").read_text()
        )
        for number in (1, 0)
    )
    assert [float(rate) for rate in rates] == pytest.approx([float(rate) for rate in expected], rel=1e-5)
    assert trainer.optimizers[0].param_groups[0]["lr"] < ADAM["lr"]
    assert difference(weights(modules[1]), weights(modules[0])) < TOLERANCE
    assert modules[1].validated == pytest.approx(modules[0].validated, rel=RELATIVE)


@pytest.mark.parametrize("entry", ENTRIES)
def test_validate_and_test_see_current_weights(entry: str) -> None:
    """This holds between two fits, too: the second one's optimizer takes the parameters over."""
    modules = [Regression(), compiled(Regression(EXACT), entry)]
    for module in modules:
        trainer = new_trainer(max_epochs=1)
        trainer.fit(module, loader())
        for run in (trainer.validate, trainer.test):
            run(module, loader(), verbose=False)
        again = new_trainer(max_epochs=1)
        taken = nullcontext() if module.options is None else pytest.warns(UserWarning, match="takes over parameters")
        with taken:
            again.fit(module, loader(), loader())
    assert modules[1].validated == pytest.approx(modules[0].validated, rel=RELATIVE)
    assert difference(weights(modules[1]), weights(modules[0])) < TOLERANCE


# Checkpoints.


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("callback", [pytest.param(False, marks=pytest.mark.long), True], ids=["bare", "callback"])
def test_resume_is_bitwise(interval: int, entry: str, callback: bool, tmp_path: Path) -> None:
    """The run resumes after 6 of 18 steps, within the second update window, with clipping and accumulation."""
    ends = []
    for resumed in (False, True):
        module = compiled(Regression(INTERVALS[interval]), entry)
        saves = ModelCheckpoint(tmp_path / str(resumed), "{step}", every_n_train_steps=6, save_top_k=-1)
        trainer = new_trainer(
            max_epochs=6,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            enable_checkpointing=True,
            callbacks=[saves, *[ZenFlowCallback()] * callback],
        )
        trainer.fit(module, loader(), ckpt_path=tmp_path / "False/step=6.ckpt" if resumed else None)
        ends.append(weights(module))
        assert trainer.global_step == 18
        assert optimizer_of(trainer).param_groups[0]["params"][0] is module.net.first.weight
    saved = torch.load(tmp_path / "False/step=6.ckpt", weights_only=True)
    assert_trained(saved["state_dict"], ends[0])
    assert (open_gradients(saved["optimizer_states"][0]) > 0) == (interval == 4)
    assert_bitwise(ends[0], ends[1])


@pytest.mark.parametrize("entry", ENTRIES)
def test_best_checkpoint_has_the_validated_weights(entry: str, tmp_path: Path) -> None:
    """The best model is in the middle of a window: the saved weights are those that were validated."""
    module = compiled(Regression(WINDOWED), entry)
    saves = ModelCheckpoint(
        tmp_path, "{step}", monitor="val_loss", mode="max", save_top_k=2, save_last=True, save_weights_only=True
    )
    trainer = new_trainer(enable_checkpointing=True, callbacks=[saves], num_sanity_val_steps=0, max_epochs=3)
    trainer.fit(module, loader(), loader())
    best = torch.tensor(module.validated).view(3, BATCHES).mean(1).max()
    assert float(saves.best_model_score) == pytest.approx(float(best), rel=RELATIVE)
    loaded = Regression.load_from_checkpoint(saves.best_model_path)
    (measured,) = trainer.validate(loaded, loader(), verbose=False)
    assert measured["val_loss"] == pytest.approx(float(best), rel=RELATIVE)
    assert "optimizer_states" not in torch.load(saves.last_model_path, weights_only=True)
    assert torch.load(saves.best_model_path, weights_only=True)["global_step"] % 4 > 0


class Recorder(Callback):
    """Keeps the weights of every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *batch: Any) -> None:
        optimizer = trainer.optimizers[0]
        if isinstance(optimizer, zf.ZenFlowAdamW):
            optimizer.synchronize()
        self.seen.append({name: param.detach().clone() for name, param in module.named_parameters()})


class StopsAt(Callback):
    """Sets ``should_stop`` in one of the hooks."""

    def __init__(self, step: int, hook: str) -> None:
        def stop(trainer: Trainer, module: LightningModule, *batch: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step >= step

        setattr(self, hook, stop)


class StepClock(Timer):
    """A clock whose seconds are steps."""

    steps = 0

    def on_train_batch_end(self, trainer: Trainer, *batch: Any) -> None:
        self.steps = trainer.global_step
        super().on_train_batch_end(trainer, *batch)

    def time_elapsed(self, stage: Any = None) -> float:
        return float(self.steps)


class SavesAtTheEnd(Regression):
    """Saves by hand in the last hook of training."""

    path: Path

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


def stopping(metric: str) -> EarlyStopping:
    """Stops at its first check: the metric is above the threshold."""
    return EarlyStopping(metric, mode="min", divergence_threshold=0.0, check_on_train_epoch_end=metric == "loss")


EVERY_STEP = {"every_n_train_steps": 1}
Ending = tuple[dict[str, Any], dict[str, Any], Callable[[], list[Callback]]]
"""Keywords of the trainer and of ``ModelCheckpoint``, and callbacks."""

ENDINGS: dict[str, Ending] = {
    "max_steps": ({"max_steps": 9}, EVERY_STEP, list),
    "max_epochs": ({"max_epochs": 3}, {}, list),
    "every_step": ({"max_epochs": 3}, EVERY_STEP, list),
    "limited": ({"max_epochs": 3, "limit_train_batches": 0.5}, EVERY_STEP, list),
    "max_time": ({"max_epochs": 9}, EVERY_STEP, lambda: [StepClock(timedelta(seconds=5))]),
    "stopped_in_batch": ({"max_epochs": 9}, EVERY_STEP, lambda: [StopsAt(7, "on_train_batch_end")]),
    "stopped_in_epoch": ({"max_epochs": 9}, {}, lambda: [StopsAt(7, "on_train_batch_end")]),
    "stopped_early": ({"max_epochs": 9}, {}, lambda: [stopping("loss")]),
    "stopped_on_val": ({"max_epochs": 9}, {"save_on_train_epoch_end": False}, lambda: [stopping("val_loss")]),
    "stopped_not_before": (
        {"max_epochs": 9, "min_epochs": 3},
        {"save_on_train_epoch_end": False},
        lambda: [stopping("val_loss")],
    ),
    "stopped_min_steps": ({"max_epochs": 9, "min_steps": 10}, EVERY_STEP, lambda: [StopsAt(3, "on_train_batch_end")]),
    "last": ({"max_epochs": 3}, {"save_last": True}, list),
    "weights_only": ({"max_epochs": 3}, {"save_weights_only": True}, list),
    "after_validation": ({"max_epochs": 3}, {"save_on_train_epoch_end": False}, list),
    "accumulated": ({"max_epochs": 6, "accumulate_grad_batches": 4}, EVERY_STEP, list),
}


def end(ending: Ending, entry: str, folder: Path, ours: list[Callback], options: dict[str, Any]) -> Fitted:
    trainer_keywords, checkpoint_keywords, callbacks = ending
    module, recorder = compiled(Regression(options), entry), Recorder()
    saves = ModelCheckpoint(folder, "{step}", save_top_k=1, **checkpoint_keywords)
    trainer = new_trainer(
        callbacks=[*callbacks(), saves, recorder, *ours], enable_checkpointing=True, **trainer_keywords
    )
    trainer.fit(module, loader(), loader())
    return Fitted(module=module, trainer=trainer, saves=saves, steps=recorder.seen)


SHORT_ENDINGS = ("max_steps", "max_epochs", "max_time", "stopped_early", "stopped_on_val", "weights_only")


@pytest.mark.parametrize("ending", some(ENDINGS, SHORT_ENDINGS))
def test_last_model_holds_every_gradient(ending: str, tmp_path: Path) -> None:
    """The last saved file and the module hold them; earlier steps equal those without the callback."""
    entry = "compiled" if ending in ("max_steps", "last") else "hooks"
    plain = end(ENDINGS[ending], entry, tmp_path / "plain", [], WINDOWED)
    ours = end(ENDINGS[ending], entry, tmp_path / "ours", [ZenFlowCallback()], WINDOWED)
    assert len(ours.steps) == len(plain.steps) > 0
    for one, other in zip(ours.steps, plain.steps, strict=True):
        assert_bitwise(one, other)
    unflushed = torch.load(plain.saves.best_model_path, weights_only=True)["state_dict"]
    optimizer_of(plain.trainer).flush()
    expected = weights(plain.module)
    assert difference(unflushed, expected) > 1e-4, "nothing waited, and the test shows nothing"
    saved = torch.load(ours.saves.best_model_path, weights_only=True)
    assert saved["global_step"] == ours.trainer.global_step
    assert_bitwise(saved["state_dict"], expected)
    assert_bitwise(weights(ours.module), expected)
    if ours.saves.last_model_path:
        assert_bitwise(torch.load(ours.saves.last_model_path, weights_only=True)["state_dict"], expected)
    ours.trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert_bitwise(torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"], expected)


def test_checkpoint_on_train_end_holds_every_gradient(tmp_path: Path) -> None:
    files = []
    for number, callbacks in enumerate(([], [ZenFlowCallback()])):
        module = SavesAtTheEnd(WINDOWED)
        module.path = tmp_path / f"{number}.ckpt"
        trainer = new_trainer(max_epochs=1, callbacks=callbacks)
        trainer.fit(module, loader())
        files.append(torch.load(module.path, weights_only=True)["state_dict"])
        optimizer_of(trainer).flush()
    assert difference(files[0], weights(module)) > 1e-4
    assert_bitwise(files[1], weights(module))


def test_save_before_the_end_was_known_warns(tmp_path: Path) -> None:
    """The file is right for a resume. Only the validation after it says that no step follows."""
    ending: Ending = ({"max_epochs": 9}, EVERY_STEP, lambda: [StopsAt(6, "on_validation_end")])
    with pytest.warns(UserWarning, match=r"called at step 6, .*call trainer\.save_checkpoint\(\) after fit"):
        ours = end(ending, "hooks", tmp_path, [ZenFlowCallback()], WINDOWED)
    saved = torch.load(ours.saves.best_model_path, weights_only=True)
    assert difference(saved["state_dict"], weights(ours.module)) > 1e-4


def test_save_without_open_windows_does_not_warn(tmp_path: Path) -> None:
    ending: Ending = ({"max_epochs": 9}, EVERY_STEP, lambda: [StopsAt(6, "on_validation_end")])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="state_dict")
        ours = end(ending, "hooks", tmp_path, [ZenFlowCallback()], EXACT)
    assert ours.trainer.global_step == 6


def test_copied_modules_have_no_flush() -> None:
    """A copy that a callback keeps does not copy the optimizer, and its state dict flushes nothing."""
    copies: list[LightningModule] = []

    class Copies(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *batch: Any) -> None:
            copies.append(copy.deepcopy(module.net))
            hooks = module._state_dict_pre_hooks.values()
            assert len(hooks) == len(copy.deepcopy(list(hooks)))
            for hook in copy.deepcopy(list(hooks)):
                hook(module, "", False)

    modules = []
    for callbacks in ([], [ZenFlowCallback()]):
        module = Regression(WINDOWED)
        trainer = new_trainer(max_epochs=1, max_steps=5, callbacks=[*callbacks, Copies()])
        trainer.fit(module, loader())
        optimizer_of(trainer).flush()
        modules.append(module)
        assert not any("lightning" in type(hook).__module__ for hook in module._state_dict_pre_hooks.values())
    assert_bitwise(weights(modules[0]), weights(modules[1]))


def test_hooks_are_removed_after_an_error() -> None:
    class Fails(Regression):
        def on_train_batch_end(self, *batch: Any) -> None:
            raise RuntimeError("broken")

    module, ours = Fails(EXACT), ZenFlowCallback()
    trainer = new_trainer(callbacks=[ours, EMAWeightAveraging()])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(module, loader())
    assert not any("lightning" in type(hook).__module__ for hook in module._state_dict_pre_hooks.values())
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


# Further fits.


@pytest.mark.parametrize("entry", some(ENTRIES, ["hooks"]))
@pytest.mark.parametrize("same", [True, False], ids=["one_trainer", "two_trainers"])
def test_second_fit_with_the_callback(entry: str, same: bool) -> None:
    """The second fit makes a new optimizer, whose moments start from zero as AdamW's do."""
    modules = [Regression(), compiled(Regression(EXACT), entry)]
    for module in modules:
        callbacks = [] if module.options is None else [ZenFlowCallback()]
        trainer = new_trainer(max_epochs=1, callbacks=callbacks)
        trainer.fit(module, loader())
        if same:
            trainer.fit_loop.max_epochs = 2
        else:
            trainer = new_trainer(max_epochs=1, callbacks=callbacks)
        trainer.fit(module, loader())
    assert len(modules[1].losses) == 2 * BATCHES
    assert difference(weights(modules[1]), weights(modules[0])) < TOLERANCE
    optimizer_of(trainer)


def test_one_optimizer_for_two_fits() -> None:
    """A module that keeps its optimizer continues with its state."""

    class Keeps(Regression):
        optimizer: torch.optim.Optimizer | None = None

        def configure_optimizers(self) -> Any:
            self.optimizer = self.optimizer or self.new_optimizer(self)
            return self.optimizer

    modules = [Keeps(), Keeps(EXACT)]
    for module in modules:
        trainer = new_trainer(max_epochs=1, callbacks=[] if module.options is None else [ZenFlowCallback()])
        trainer.fit(module, loader())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader())
    assert difference(weights(modules[1]), weights(modules[0])) < TOLERANCE
    assert trainer.optimizers[0] is modules[1].optimizer


def find_rate(trainer: Trainer, module: LightningModule) -> Any:
    finder = Tuner(trainer).lr_find(module, num_training=8, update_attr=False)
    return finder.results["lr"], finder.results["loss"]


def find_batch_size(trainer: Trainer, module: LightningModule) -> Any:
    found = Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=2, init_val=2)
    module.batch_size = 8
    return [float(found)], [0.0]


@pytest.mark.parametrize("entry", some(ENTRIES, ["hooks"]))
@pytest.mark.parametrize("find", [find_rate, find_batch_size])
def test_tuner_leaves_no_trace(find: Callable[..., Any], entry: str, tmp_path: Path) -> None:
    """The tuner trains, and restores weights and state. The fit after it makes a new optimizer."""
    modules, found = [Regression(), compiled(Regression(EXACT), entry)], []
    for module in modules:
        before = weights(module)
        trainer = new_trainer(tmp_path, callbacks=[] if module.options is None else [ZenFlowCallback()])
        found.append(find(trainer, module))
        assert_bitwise(before, weights(module))
        module.losses, module.norms = [], []
        trainer.fit(module)
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert_as_adamw(*(numbers(weights(each), each) for each in reversed(modules)))


@pytest.mark.parametrize("interval", [pytest.param(1, marks=pytest.mark.long), 4])
@pytest.mark.parametrize(
    "find",
    [partial(LearningRateFinder, num_training_steps=8, update_attr=False), partial(BatchSizeFinder, max_trials=1)],
    ids=["rate", "batch_size"],
)
def test_finders_restore_weights_and_state(find: Callable[[], Callback], interval: int, tmp_path: Path) -> None:
    """Finders as callbacks use the optimizer that trains afterwards: the run equals one without them bit for bit."""
    ends, batch_size = [], 8
    for callbacks in ([find()], []):
        module = compiled(Regression(INTERVALS[interval]), "compiled")
        module.batch_size = batch_size
        trainer = new_trainer(tmp_path, callbacks=callbacks, max_epochs=1)
        trainer.fit(module)
        ends.append(weights(module))
        optimizer_of(trainer)
        batch_size = module.batch_size  # of the run whose finder suggested a rate
    assert_bitwise(ends[0], ends[1])


# Averages.

AVERAGES: dict[str, Callable[[], Callback]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.8),
    "average": WeightAveraging,
    "swa": lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=2),
}


def averaged(
    average: str, entry: str, options: dict[str, Any] | None, folder: Path, *, ours: bool = False, first: bool = False
) -> Fitted:
    module, saves = compiled(Regression(options), entry), ModelCheckpoint(folder, "{step}")
    callbacks = [AVERAGES[average](), saves]
    if ours:
        callbacks.insert(0 if first else 2, ZenFlowCallback())
    trainer = new_trainer(callbacks=callbacks, max_epochs=4, enable_checkpointing=True)
    trainer.fit(module, loader(), loader())
    saved = torch.load(saves.best_model_path, weights_only=True)
    return Fitted(module=module, trainer=trainer, saved=saved, weights=weights(module))


@pytest.mark.parametrize("way", some(["callback_first", "callback_last", "no_callback"], ["no_callback"]))
@pytest.mark.parametrize("entry", some(ENTRIES, ["compiled"]))
@pytest.mark.parametrize("average", some(AVERAGES, ["ema", "swa"]))
def test_averages_equal_those_of_adamw(average: str, entry: str, way: str, tmp_path: Path) -> None:
    """Averages, the model that they replace, and validation on them."""
    expected = averaged(average, "hooks", None, tmp_path / "adamw")
    ours, first = way != "no_callback", way == "callback_first"
    fitted = averaged(average, entry, EXACT, tmp_path / "ours", ours=ours, first=first)
    assert difference(fitted.weights, expected.weights) < TOLERANCE
    for part in ("state_dict", "current_model_state"):
        if part in expected.saved:
            assert difference(fitted.saved[part], expected.saved[part]) < TOLERANCE
    assert fitted.module.validated == pytest.approx(expected.module.validated, rel=RELATIVE)


@pytest.mark.parametrize("ours", [True, False], ids=["callback", "no_callback"])
def test_average_is_kept_when_windows_are_flushed(ours: bool) -> None:
    """The callback flushes windows before the average is copied into the model; without it they are dropped."""
    module, average = compiled(Regression(WINDOWED), "compiled"), EMAWeightAveraging(decay=0.8)
    trainer = new_trainer(callbacks=[average, ZenFlowCallback()] if ours else [average], max_epochs=3)
    trainer.fit(module, loader())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer_of(trainer).close()
    assert any("were dropped" in str(each.message) for each in caught) != ours
    assert_bitwise(weights(module), weights(average._average_model.module))


# Manual optimization.


class Adversarial(Regression):
    """Two optimizers. The second network uses the first one's outputs, and its turn discards the first's gradients."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        super().__init__(options)
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 1))

    def configure_optimizers(self) -> Any:
        return [self.new_optimizer(self.net), self.new_optimizer(self.critic)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator, critic = self.optimizers()
        with generator.toggle_model():
            loss = F.mse_loss(self.net(batch[0]), batch[1]) - self.critic(self.net(batch[0])).mean()
            self.manual_backward(loss)
            self.clip_gradients(generator, 0.5, "norm")
            generator.step()
            generator.zero_grad()
        self.toggle_optimizer(critic)
        real, false = self.critic(batch[1]), self.critic(self.net(batch[0]))
        score = false.mean() - real.mean() + real.square().mean()
        self.manual_backward(score)
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)
        self.losses += [loss.item(), score.item()]


@pytest.mark.parametrize("precision", some(["32-true", "bf16-mixed", "16-mixed"], ["32-true"]))
@pytest.mark.parametrize("entry", ENTRIES)
def test_two_optimizers(entry: str, precision: str) -> None:
    modules = [Adversarial(), compiled(Adversarial(EXACT), entry)]
    if entry == "compiled":
        modules[1].critic.compile(**EAGER_BACKEND)
    before = weights(modules[0])
    for module in modules:
        trainer = new_trainer(precision=precision)
        trainer.fit(module, loader())
    assert difference(weights(modules[1]), weights(modules[0])) < TOLERANCE
    assert modules[1].losses == pytest.approx(modules[0].losses, rel=RELATIVE, abs=RELATIVE)
    assert_trained(before, weights(modules[1]))
    assert [offloaded(optimizer) for optimizer in trainer.optimizers] == [2, 2]


class Wrapped(Regression):
    """Uses the wrapper that ``self.optimizers()`` gives, whose class is derived from ours, for everything."""

    def __init__(self, options: dict[str, Any] | None = None, first: Callable[[Any], object] = repr) -> None:
        super().__init__(options)
        self.automatic_optimization = False
        self.first = first

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx == 0:
            self.first(optimizer)
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())


@cache
def adamw_by_hand() -> Wrapped:
    module = Wrapped()
    new_trainer().fit(module, loader())
    return module


@pytest.mark.parametrize("first", some(FIRST_USES, ["state_dict", "flush"]))
@pytest.mark.parametrize("entry", some(ENTRIES, ["hooks"]))
def test_first_use_through_the_wrapper(entry: str, first: str) -> None:
    """A method of the wrapper builds the one engine of the optimizer."""
    module, expected = compiled(Wrapped(EXACT, FIRST_USES[first]), entry), adamw_by_hand()
    trainer = new_trainer()
    trainer.fit(module, loader())
    assert difference(weights(module), weights(expected)) < TOLERANCE
    assert module.losses == pytest.approx(expected.losses, rel=RELATIVE)
    optimizer = optimizer_of(trainer)
    wrapper = module.optimizers()
    assert isinstance(wrapper, zf.ZenFlowAdamW)
    assert wrapper.engine is optimizer.engine
    saved, through = optimizer.state_dict(), wrapper.state_dict()
    assert saved["state"].keys() == through["state"].keys()
    assert int(saved["state"][0]["step"]) == 2 * BATCHES
    assert optimizer.state[module.net.first.weight]["step"] == wrapper.state[module.net.first.weight]["step"]


def test_close_through_the_wrapper() -> None:
    module = Wrapped(WINDOWED)
    trainer = new_trainer()
    trainer.fit(module, loader())
    closed = copy.deepcopy(module.net)
    wrapper = module.optimizers()
    wrapper.close()
    assert difference(weights(module.net), weights(closed)) > 1e-4, "close() applies the gradients in open windows"
    for optimizer in (wrapper, trainer.optimizers[0]):
        with pytest.raises(RuntimeError, match="this ZenFlowAdamW is closed"):
            optimizer.state_dict()
    zf.ZenFlowAdamW(module.parameters(), **EXACT).close()


def test_close_of_an_unused_optimizer_by_its_wrapper() -> None:
    module = Wrapped(EXACT, lambda optimizer: optimizer.close())
    with pytest.raises(RuntimeError, match="this ZenFlowAdamW is closed"):
        new_trainer().fit(module, loader())
    zf.ZenFlowAdamW(module.parameters(), **EXACT).close()


# Strategies.


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_callback_refuses_sharding(strategy: type) -> None:
    trainer = new_trainer(callbacks=[ZenFlowCallback()])
    trainer._accelerator_connector.strategy = object.__new__(strategy)
    callbacks = trainer.callbacks
    with pytest.raises(ValueError, match=rf"{strategy.__name__}.*use Trainer\(devices=1, strategy='auto'\)"):
        trainer.callbacks[0].setup(trainer, Regression(EXACT), "fit")
    assert trainer.callbacks is callbacks
    trainer.callbacks[0].setup(trainer, Regression(EXACT), "test")


def work(rank: int) -> dict[str, Any]:
    """Train under ``strategy="ddp"``: with AdamW, with ours, and with ours compiled, whose error is the result."""
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for name, options, entry in (
        ("adamw", None, "hooks"),
        ("exact", EXACT, "hooks"),
        ("windowed", WINDOWED, "hooks"),
        ("compiled", EXACT, "compiled"),
    ):
        module = compiled(Regression(None if options is None else {**options, "process_group": False}), entry)
        callbacks = [] if options is None else [ZenFlowCallback()]
        trainer = new_trainer(
            devices=2, strategy="ddp", callbacks=callbacks, gradient_clip_val=0.5, accumulate_grad_batches=2
        )
        try:
            trainer.fit(module, loader(4))
            results[name] = {"weights": weights(module), "norms": module.norms, "losses": module.losses}
            if options is not None:
                assert offloaded(trainer.optimizers[0]) == 2
        except ValueError as error:
            results[name] = str(error)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_two_processes(work, tmp_path_factory.mktemp("ranks"), process_group=False)


def test_eager_data_parallel_equals_adamw(ranks: list[dict[str, Any]]) -> None:
    """All processes see the averaged gradients, and their updates are equal."""
    for results in ranks:
        assert difference(results["exact"]["weights"], results["adamw"]["weights"]) < TOLERANCE
        assert results["exact"]["losses"] == pytest.approx(results["adamw"]["losses"], rel=RELATIVE)
        for one, other in zip(results["exact"]["norms"], results["adamw"]["norms"], strict=True):
            assert one == pytest.approx(other, rel=RELATIVE)
    for name in ("exact", "windowed"):
        assert_bitwise(ranks[0][name]["weights"], ranks[1][name]["weights"])


def test_compiled_data_parallel_is_refused(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert re.match("the model is wrapped in DistributedDataParallel.*train the bare module", results["compiled"])
