"""One trial: train, let a call fail or Ctrl-C come, and look at what training makes of it."""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import zenflow_compile
from tests.faults.injection import Injector, Site, Target
from tests.simulated.accelerator import serve
from tests.support.training import (
    ADAM,
    EAGER_BACKEND,
    LARGEST_STATE,
    OFFLOAD_ALL,
    Training,
    batch,
    by_adamw,
    by_muon,
    mlp,
)

BEGIN, END = 4, 9  # the steps in which calls fail; those before warm up

WINDOWS = {"update_interval": 2, "full_warm_up_rounds": 1, "select_interval": 2}
SCENARIOS: dict[str, dict[str, Any]] = {
    "windows": WINDOWS,
    "int8": {**WINDOWS, "gradient_transfer": "int8"},
    "summed": {**WINDOWS, "gradient_transfer": "mean"},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 2},
    "files": {**WINDOWS, "policy": "zero_infinity", "host_window_bytes": LARGEST_STATE},
    "matrices": {"policy": "zero_offload"},
}
BY_MUON = "matrices"
PHASES = ("train", "load", "close")


@dataclass(frozen=True)
class Trial:
    """A scenario, how the model is called, what runs while calls fail, and the device: "cpu" or "sim"."""

    scenario: str
    entry: str  # "hooks", "graph", or "backward": the optimizer is in the backward graph
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
    in_backward: bool = False

    def __post_init__(self) -> None:
        if not self.in_backward:
            super().__post_init__()
            return
        self.model = self.build(self.dtype)
        options = {**EAGER_BACKEND["options"], **ADAM, **OFFLOAD_ALL, **self.options}
        self.call = torch.compile(self.model, backend="zenflow", options=options)
        with torch.no_grad():
            self.call(batch(0)[0].to(self.device))  # the first call makes the optimizer
        self.optimizer = zenflow_compile.optimizer_of(self.call)

    def step(self, step: int) -> None:
        if self.in_backward:
            self.backward(step)
        else:
            super().step(step)

    def zero_grad(self) -> None:
        """As a loop does after an error; one without an optimizer of its own does nothing."""
        if not self.in_backward:
            self.optimizer.zero_grad()

    def loss(self, step: int) -> Tensor:
        inputs, targets = (each.to(self.device) for each in batch(step, self.dtype))
        loss = F.cross_entropy(self.call(inputs).float(), targets)
        return loss if self.device == "cpu" else WatchedBackward.apply(loss, self.injector)


def _begin(trial: Trial, folder: str, injector: Injector) -> tuple[Training, bytes]:
    """A training that has made its first steps, and its state then."""
    options = dict(SCENARIOS[trial.scenario])
    if "host_window_bytes" in options:
        options["nvme_path"] = folder
    if trial.device != "cpu":
        serve()
    training = WatchedTraining(
        EAGER_BACKEND if trial.entry == "graph" else None,
        {"workers": 1, **options},
        build=lambda dtype: mlp(dtype).to(trial.device),
        device=trial.device,
        injector=injector,
        in_backward=trial.entry == "backward",
        make=by_muon if trial.scenario == BY_MUON else by_adamw,
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


def targets_of(trial: Trial) -> tuple[list[Site], int]:
    """The calls that can fail in this phase, and the number of points at which it can be interrupted."""
    with tempfile.TemporaryDirectory() as folder, Injector().watch() as injector:
        training, saved = _begin(trial, folder, injector)
        injector.recording = trial.phase == "train"
        _train(training)
        injector.recording = trial.phase == "load"
        training.load(saved)
        injector.recording = trial.phase == "close"
        training.optimizer.close()
        injector.recording = False
    return sorted(injector.found), injector.points


def outcome(trial: Trial, target: Target) -> str:
    """What a failure or an interrupt at ``target`` leads to; ``"WRONG: ..."`` if it is not what it has to be."""
    others = set(threading.enumerate())
    with tempfile.TemporaryDirectory() as folder, Injector().watch() as injector:
        training, saved = _begin(trial, folder, injector)
        try:
            found = _PHASES[trial.phase](trial, training, saved, injector, target)
        finally:
            injector.target = None
            training.optimizer.close()
        files = sorted(os.listdir(folder))
    left = [thread.name for thread in set(threading.enumerate()) - others if thread.name.startswith("zenflow")]
    if left:
        return f"WRONG: threads are left: {left}"
    if files:
        return f"WRONG: files are left: {files}"
    return found


def _train(training: Training) -> list[Tensor]:
    for step in range(BEGIN, END):
        training.step(step)
    return training.weights()


def _in_training(trial: Trial, training: Training, saved: bytes, injector: Injector, target: Target) -> str:
    injector.target, injector.points = target, 0
    failed_at, refused, found = None, False, "nothing changed"
    for step in range(BEGIN, END + 1):
        try:
            if step < END:
                training.step(step)
            else:
                weights = training.weights()
        except (Exception, KeyboardInterrupt):
            if failed_at is not None or step == END:
                refused = True
                break
            failed_at = step
            training.zero_grad()
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


def _in_load(trial: Trial, training: Training, saved: bytes, injector: Injector, target: Target) -> str:
    _train(training)
    injector.target, injector.points = target, 0
    found = "nothing changed"
    try:
        training.load(saved)
    except (Exception, KeyboardInterrupt):
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


def _in_close(trial: Trial, training: Training, saved: bytes, injector: Injector, target: Target) -> str:
    _train(training)
    injector.target, injector.points = target, 0
    found = "nothing changed"
    try:
        training.optimizer.close()
    except Exception:
        found = "refused"
    except KeyboardInterrupt:
        try:
            training.optimizer.close()
        except RuntimeError:  # an update that was flushed and not queued is lost, and named
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
