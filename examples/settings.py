"""Settings and results of a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from examples.gpt import GPTConfig

# May differ between a checkpoint and the run that continues it, since they do not change the trajectory.
_FREE_ON_RESUME = frozenset({"out", "resume", "save_every", "evaluate_every", "live"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of one run. The defaults take about two minutes on two cores.

    Attributes:
        policy: where optimizer state lives: ``resident``, ``zero_offload`` or ``zenflow``.
        optimizer: a rule of ``zenflow_compile.rules``, such as ``AdamW`` or ``Lion``. ``Muon``, at AdamW's rates, has
            hidden matrices, and AdamW the others.
        steps: optimizer steps.
        batch: sequences per step.
        context: tokens per sequence.
        layers: blocks of the GPT.
        width: features per token; a multiple of 32, the width of a head.
        lr: the highest learning rate, reached at the end of the warm-up. With ``torch.optim.AdamW`` at these
            sizes 2e-3 beat 1e-3 on both seeds tried and lay within the noise of 3e-3.
        weight_decay: decoupled decay, as in AdamW.
        max_grad_norm: bound on the global gradient norm, exact over device and host; None does not clip.
        warm_up: steps in which the rate rises; the optimizer updates everything synchronously meanwhile.
        seed: of the initial weights and of the order of the data.
        update_interval: steps per update window, or ``auto`` (``zenflow`` only).
        staleness: 0 or 1, steps by which the update of a flushed window may come late (``zenflow`` only).
        state_dtype: how the host stores moments: ``fp32``, ``bf16`` or ``fp8`` (not ``resident``).
        inner: what compiles the rewritten graphs: ``inductor``, or ``eager`` to run them as they are.
        fsdp: shard the model over the ranks by ``fully_shard``; each block is compiled on its own then.
        device: ``auto`` takes CUDA where there is one.
        text_bytes: bytes of the standard library's source to read, at most.
        evaluate_every: steps between validations; one always follows the last step.
        evaluation_batches: batches per validation.
        save_every: steps between checkpoints; one always follows the last step.
        live: show the last steps below the progress bar.
        out: folder for checkpoints; None writes none.
        start_from: checkpoint of a run with a model of the same sizes, whose weights and nothing else are the
            initial ones; None draws them from ``seed``.
        resume: checkpoint to go on from.
    """

    policy: str = "zenflow"
    optimizer: str = "AdamW"
    steps: int = 400
    batch: int = 16
    context: int = 64
    layers: int = 6
    width: int = 128
    lr: float = 2e-3
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    warm_up: int = 60
    seed: int = 0
    update_interval: int | Literal["auto"] = 4
    staleness: int = 0
    state_dtype: str = "fp32"
    inner: str = "inductor"
    fsdp: bool = False
    device: str = "auto"
    text_bytes: int = 20_000_000
    evaluate_every: int = 100
    evaluation_batches: int = 64
    save_every: int = 100
    live: bool = False
    out: str | None = None
    start_from: str | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "context", "layers", "width", "evaluation_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("evaluate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least 1; above steps={self.steps} turns it off"
                )
        if not 0 <= self.warm_up < self.steps:
            raise ValueError(f"warm_up={self.warm_up} must be in [0, steps={self.steps}); the rate falls afterwards")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")

    def gpt(self) -> GPTConfig:
        """Sizes of the model."""
        return GPTConfig(context=self.context, layers=self.layers, width=self.width, heads=max(1, self.width // 32))

    def torch_device(self) -> torch.device:
        """The device to train on."""
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def rate(self, step: int) -> float:
        """Learning rate of ``step`` as a share of ``lr``: a linear rise, then a cosine down to a tenth."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        progress = (step - self.warm_up) / (self.steps - self.warm_up)
        return 0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0))

    def trajectory(self) -> dict[str, Any]:
        """The settings on which the numbers of a run depend: all but where and how often it writes and evaluates."""
        return {name: value for name, value in asdict(self).items() if name not in _FREE_ON_RESUME}

    @classmethod
    def of_checkpoint(cls, saved: Mapping[str, Any]) -> TrainConfig:
        """The ``saved`` settings; those that an older checkpoint lacks have their defaults, which change nothing.

        Raises:
            ValueError: there are settings of another version among them.
        """
        if unknown := sorted(saved.keys() - {each.name for each in fields(cls)}):
            raise ValueError(
                f"the checkpoint was made with {', '.join(f'{name}={saved[name]!r}' for name in unknown)}, which this "
                "version does not know; resume it with the version that made it, or begin a new run with its weights "
                "(--start-from)"
            )
        return cls(**saved)

    def must_continue(self, saved: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless this run goes on with the trajectory of the ``saved`` settings."""
        before = TrainConfig.of_checkpoint(saved).trajectory()
        for name, value in self.trajectory().items():
            if before[name] != value:
                raise ValueError(
                    f"{name}={value} differs from the checkpoint's {before[name]}; a resumed run keeps "
                    f"its settings, leave {name} out or start a new run"
                )

    def must_fit(self, saved: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless weights of a run with the ``saved`` settings fit this run's model."""
        for name in ("context", "layers", "width"):
            if saved[name] != getattr(self, name):
                raise ValueError(
                    f"start_from={self.start_from} has {name}={saved[name]} and this run {name}="
                    f"{getattr(self, name)}; give this run the sizes of the checkpoint, or start from another one"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Results of one run.

    Attributes:
        config: its settings.
        parameters: number of trained values.
        validation_loss: nats per byte after the last step.
        step_ms: mean time of an optimizer step, after the warm-up and without evaluation.
        tokens_per_second: at that pace.
        seconds: the whole run, compilation and validation included.
        device_bytes: optimizer state on the device.
        host_bytes: optimizer state, gradient windows and upload buffers in host memory.
        profile: ``profile().summary()`` of the steps after the warm-up.
        checkpoint: the last one written.
    """

    config: TrainConfig
    parameters: int
    validation_loss: float
    step_ms: float
    tokens_per_second: float
    seconds: float
    device_bytes: int
    host_bytes: int
    profile: Mapping[str, Any] = field(repr=False)
    checkpoint: Path | None = None
