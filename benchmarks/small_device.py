"""Trains a Llama within a limit of device memory that is smaller than its weights, and measures the peak.

    python -m benchmarks small_device --policy zero_offload --width 512 --layers 8 --batch 1 --context 16 \\
        --offload-weights auto --device-memory 40MB

Weights are in host memory between their uses. Without CUDA, an allocator that counts stands for the device, and needs a
C++ compiler. The model has random weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import zenflow_compile as zf
from benchmarks.common import option_parser, write_results
from benchmarks.counting_allocator import CountingError, counted_cpu
from examples.stdlib_text import Text, load_text, training_batch
from zenflow_compile.runtime.device.devices import device_of

_UNITS = {"B": 1, "KB": 10**3, "KIB": 2**10, "MB": 10**6, "MIB": 2**20, "GB": 10**9, "GIB": 2**30}
_DECIDED = 3  # steps: "auto" decides in the third one


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Settings of one run.

    Attributes:
        steps: optimizer steps.
        batch: sequences per step.
        context: tokens per sequence.
        lr: learning rate, constant.
        width: features per token of the random model; a multiple of 64.
        layers: its blocks.
        policy: where optimizer state lives.
        inner: what compiles the rewritten graphs, ``inductor`` or ``eager``.
        seed: of weights and data.
        offload_weights: ``"auto"``, a share, or bytes; see ``ZenFlowAdamW``.
        live: show the last steps while it trains.
        device_memory: bytes of device memory that the run may use; None: all that is free.
    """

    steps: int = 50
    batch: int = 4
    context: int = 128
    lr: float = 2e-4
    width: int = 256
    layers: int = 4
    policy: str = "zenflow"
    inner: str = "inductor"
    seed: int = 0
    offload_weights: float | Literal[False, "auto"] = False
    device_memory: int | None = None
    live: bool = False

    @property
    def measures(self) -> bool:
        """Whether the run measures device memory."""
        return self.offload_weights is not False or self.device_memory is not None


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory of a run.

    Attributes:
        weights: bytes of the model's weights.
        limit: bytes that the run may use; None: all.
        peak: most bytes that tensors had at a time in the steps after ``"auto"`` has decided.
        kept: weights that stay on the device.
        offloaded: weights that are in host memory between their uses.
    """

    weights: int
    limit: int | None
    peak: int
    kept: int
    offloaded: int

    def __str__(self) -> str:
        limit = "all that is free" if self.limit is None else f"{self.limit / 1e6:.2f} MB"
        return (
            f"weights {self.weights / 1e6:.2f} MB, limit {limit}, peak of steady steps {self.peak / 1e6:.2f} MB; "
            f"{self.kept} weights kept on the device, {self.offloaded} in host memory"
        )


@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves: the loss of every step, in nats per byte, and its device memory, if that was measured."""

    losses: list[float]
    memory: Memory | None


def build(config: DeviceConfig) -> LlamaForCausalLM:
    """The model: its bytes are tokens, so any vocabulary of at least 256 will do."""
    torch.manual_seed(config.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=config.width,
            intermediate_size=3 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.width // 32,
            num_key_value_heads=config.width // 64,
            max_position_embeddings=config.context,
            use_cache=False,
        )
    )


def losses_of(config: DeviceConfig, *, text: Text | None = None, console: Console | None = None) -> list[float]:
    """Train on the standard library's source and return the loss of every step, in nats per byte."""
    return train(config, text=text, console=console).losses


def train(config: DeviceConfig, *, text: Text | None = None, console: Console | None = None) -> Result:
    """Train on the standard library's source.

    Raises:
        ValueError: memory is measured, and there are too few steps for it, or there is no limit on the CPU.
        CountingError: memory is to be counted on the CPU, and there is no C++ compiler, or it fails.
    """
    if config.measures and config.steps <= _DECIDED:
        raise ValueError(f"steps={config.steps} must be at least {_DECIDED + 1}: memory is measured after that many")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device_memory is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, config.device_memory / total))
    if config.offload_weights == "auto" and config.device_memory is None and device.type == "cpu":
        raise ValueError(
            "--offload-weights auto needs a limit on the CPU, which has no memory of its own; pass "
            "--device-memory, such as 64MB"
        )
    console = console or Console(quiet=True)
    text = text or load_text()
    counts = config.measures and device.type == "cpu"
    with counted_cpu(config.device_memory) if counts else nullcontext():
        return _train(config, text, console, device)


def _optimizer(config: DeviceConfig, model: LlamaForCausalLM) -> zf.ZenFlowAdamW:
    options: dict[str, Any] = {}
    if config.measures:
        # One backward per step: gradients leave the device in the backward, and not in the step.
        options = {"offload_weights": config.offload_weights, "gradient_accumulation_steps": 1}
    return zf.ZenFlowAdamW(model.named_parameters(), lr=config.lr, policy=config.policy, **options)


def _train(config: DeviceConfig, text: Text, console: Console, device: torch.device) -> Result:
    model = build(config).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    weights = sum(param.nbytes for param in model.parameters())

    optimizer = _optimizer(config, model)
    compiled = torch.compile(model, backend="zenflow", options={"inner": config.inner})
    losses = []
    recorded = zf.live(optimizer) if config.live else zf.profile(optimizer)
    with optimizer, recorded as profile:
        for step in range(config.steps):
            tokens, _ = training_batch(text, seed=config.seed, step=step, batch=config.batch, context=config.context)
            tokens = tokens.to(device)
            loss = compiled(input_ids=tokens, labels=tokens).loss  # Llama shifts the labels by itself
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if config.measures and step + 1 == _DECIDED:
                device_of(device).reset_peak()
            if (step + 1) % 10 == 0:
                console.print(f"step {step + 1}: loss {losses[-1]:.4f}", highlight=False)
        memory = _memory(config, device, weights, optimizer) if config.measures else None
    if not console.quiet:
        profile.report(console)
    return Result(losses, memory)


def _memory(config: DeviceConfig, device: torch.device, weights: int, optimizer: zf.ZenFlowAdamW) -> Memory:
    peak = device_of(device).peak_bytes()
    assert peak is not None
    offloaded = len(optimizer.engine.weights.weights)
    kept = sum(len(group["params"]) for group in optimizer.param_groups) - offloaded
    return Memory(weights, config.device_memory, peak, kept, offloaded)


def _bytes(text: str) -> int:
    """Bytes, with or without a unit: ``64MB``."""
    number = text.rstrip("BbIiKkMmGg ")
    try:
        return int(float(number) * _UNITS[text[len(number) :].strip().upper() or "B"])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} must be bytes, as 64MB, 64MiB or 64000000") from None


def _weights(text: str) -> float | Literal["auto"]:
    """``auto``, a share, which has a decimal point and no unit, or bytes."""
    if text == "auto":
        return "auto"
    try:
        return float(text) if "." in text and text[-1].isdigit() else _bytes(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be auto, a share in (0, 1], as 0.5, or bytes, as 64MB, 64MiB or 64000000"
        ) from None


def parse(arguments: Sequence[str] | None = None) -> tuple[DeviceConfig, Path | None]:
    """The settings that a command line gives, and the results file."""
    defaults = DeviceConfig()
    parser = option_parser("small_device", __doc__)
    parser.argument_default = argparse.SUPPRESS
    for name in ("steps", "batch", "context", "width", "layers", "seed"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=str(getattr(defaults, name)))
    parser.add_argument("--lr", type=float, help=str(defaults.lr))
    parser.add_argument("--policy", choices=("resident", "zero_offload", "zenflow"), help=defaults.policy)
    parser.add_argument("--inner", choices=("inductor", "eager"), help=defaults.inner)
    parser.add_argument(
        "--offload-weights", type=_weights, metavar="VALUE", help="auto, a share such as 0.5, or bytes such as 64MB"
    )
    parser.add_argument("--device-memory", type=_bytes, metavar="BYTES", help="limit of device memory, such as 64MB")
    parser.add_argument("--live", action="store_true", help="show the last steps while it trains")
    given = vars(parser.parse_args(arguments))
    out: Path | None = given.pop("out")
    return DeviceConfig(**given), out


def main(arguments: Sequence[str] | None = None, text: Text | None = None) -> int:
    """Entry point."""
    config, out = parse(arguments)
    console = Console()
    try:
        result = train(config, text=text, console=console)
    except (CountingError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    memory = result.memory
    measured = {} if memory is None else asdict(memory)
    write_results("small_device", [asdict(config) | measured | {"last_loss": result.losses[-1]}], out=out)
    if memory is not None:
        console.print(str(memory), highlight=False)
        if memory.limit is not None and memory.peak > memory.limit:
            raise SystemExit(
                f"error: the peak of {memory.peak} bytes is above --device-memory={memory.limit}: raise it, or use a "
                "smaller --batch or --context, --policy zero_offload, or --offload-weights auto"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
