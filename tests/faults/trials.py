"""One trial: train, let a call fail, and look at what training makes of it."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.faults.injection import Injector, Site
from tests.simulated.accelerator import serve
from tests.support.training import EAGER_BACKEND, Training, batch, mlp

BEGIN, END = 4, 9  # the steps in which calls fail; those before warm up

WINDOWS = {"update_interval": 2, "full_warm_up_rounds": 1, "select_strategy": "step", "select_interval": 2}
SCENARIOS: dict[str, dict[str, Any]] = {
    "windows": WINDOWS,
    "int8": {**WINDOWS, "gradient_compression": "int8"},
    "summed": {**WINDOWS, "accumulate_on_device": True},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 2},
    "files": {**WINDOWS, "policy": "zero_infinity"},
}
PHASES = ("train", "load", "close")


@dataclass(frozen=True)
class Trial:
    """A scenario, how the model is called, what runs while calls fail, and the device: "cpu" or "sim"."""

    scenario: str
    entry: str  # "hooks" or "graph"
    phase: str
    device: str = "cpu"


class WatchedBackward(torch.autograd.Function):
    """Returns a copy of a tensor. Its backward starts to watch the calling thread, which may be one of autograd's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, injector: Injector) -> Tensor:
        ctx.injector = injector
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.injector.watch_this_thread()
        return grad, None


@dataclass
class WatchedTraining(Training):
    """Training on a device whose backward is watched."""

    device: str = "cpu"
    injector: Injector = field(default_factory=Injector)

    def loss(self, step: int) -> Tensor:
        inputs, targets = (each.to(self.device) for each in batch(step, self.dtype))
        loss = F.cross_entropy(self.call(inputs).float(), targets)
        return loss if self.device == "cpu" else WatchedBackward.apply(loss, self.injector)


def _begin(trial: Trial, folder: str, injector: Injector) -> tuple[Training, bytes]:
    """A training that has made its first steps, and its state then."""
    options = dict(SCENARIOS[trial.scenario])
    if trial.scenario == "files":
        options["nvme_path"] = folder
    if trial.device != "cpu":
        serve()
    training = WatchedTraining(
        EAGER_BACKEND if trial.entry == "graph" else None,
        {"workers": 1, **options},
        build=lambda dtype: mlp(dtype).to(trial.device),
        device=trial.device,
        injector=injector,
    )
    training.run(0, BEGIN)
    return training, training.saved()


@cache
def expected(trial: Trial, without: int | None = None) -> list[Tensor]:
    """The weights at the end of an undisturbed run, or of one that leaves out step ``without``."""
    with tempfile.TemporaryDirectory() as folder:
        training, _ = _begin(trial, folder, Injector())
        for step in range(BEGIN, END):
            if step != without:
                training.step(step)
        weights = training.weights()
        training.optimizer.close()
        # ``close`` applies the gradients of open update windows, too.
        return training.weights_as_they_are() if trial.phase == "close" else weights


def sites_of(trial: Trial) -> list[Site]:
    """The calls that can fail in this phase."""
    with tempfile.TemporaryDirectory() as folder, Injector().watch() as injector:
        training, saved = _begin(trial, folder, injector)
        injector.recording = trial.phase == "train"
        _train(training)
        injector.recording = trial.phase == "load"
        training.load(saved)
        injector.recording = trial.phase == "close"
        training.optimizer.close()
        injector.recording = False
    return sorted(injector.found)


def outcome(trial: Trial, site: Site) -> str:
    """What a failure at ``site`` leads to; ``"WRONG: ..."`` if it is not what it has to be."""
    others = set(threading.enumerate())
    with tempfile.TemporaryDirectory() as folder, Injector().watch() as injector:
        training, saved = _begin(trial, folder, injector)
        try:
            found = _PHASES[trial.phase](trial, training, saved, injector, site)
        finally:
            injector.target = None
            training.optimizer.close()
    left = [thread.name for thread in set(threading.enumerate()) - others if thread.name.startswith("zenflow")]
    if left:
        return f"WRONG: threads are left: {left}"
    return found


def _train(training: Training) -> list[Tensor]:
    for step in range(BEGIN, END):
        training.step(step)
    return training.weights()


def _in_training(trial: Trial, training: Training, saved: bytes, injector: Injector, site: Site) -> str:
    injector.target = site
    failed_at, refused, found = None, False, "nothing changed"
    for step in range(BEGIN, END + 1):
        try:
            if step < END:
                training.step(step)
            else:
                weights = training.weights()
        except Exception:
            if failed_at is not None or step == END:
                refused = True
                break
            failed_at = step
            training.optimizer.zero_grad()
    injector.target = None
    if refused:
        found = "refused"
    elif same(weights, expected(trial)):
        found = "nothing changed" if failed_at is None else "as made"
    elif failed_at is not None and same(weights, expected(trial, failed_at)):
        found = "as dropped"
    elif injector.raised:
        return f"WRONG: other weights after a failure {'without a word' if failed_at is None else f'at {failed_at}'}"
    else:
        return "WRONG: other weights without a failure"
    return (
        found if _can_be_loaded(trial, training, saved) else f"WRONG: {found}, then a loaded state trains differently"
    )


def _in_load(trial: Trial, training: Training, saved: bytes, injector: Injector, site: Site) -> str:
    _train(training)
    injector.target = site
    found = "nothing changed"
    try:
        training.load(saved)
    except Exception:
        found = "refused"
        injector.target = None
        training.load(saved)
    try:
        weights = _train(training)
    except Exception:  # of a thread that goes on in the background
        found = "refused"
        training.load(saved)
        weights = _train(training)
    injector.target = None
    return found if same(weights, expected(trial)) else f"WRONG: {found}, then other weights"


def _in_close(trial: Trial, training: Training, saved: bytes, injector: Injector, site: Site) -> str:
    _train(training)
    injector.target = site
    found = "nothing changed"
    try:
        training.optimizer.close()
    except Exception:
        found = "refused"
    injector.target = None
    training.optimizer.close()
    right = found == "refused" or same(training.weights_as_they_are(), expected(trial))
    return found if right else "WRONG: other weights without a word"


_PHASES = {"train": _in_training, "load": _in_load, "close": _in_close}


def _can_be_loaded(trial: Trial, training: Training, saved: bytes) -> bool:
    training.load(saved)
    return same(_train(training), expected(trial))


def same(actual: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether all weights are equal bit for bit."""
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(actual, wanted, strict=True))
