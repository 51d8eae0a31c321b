"""Fine-tune a Hugging Face Llama model in a plain loop: one line differs from a loop that offloads nothing.

    python -m examples.finetune_llama --steps 50

The model comes from a small configuration with random weights, so nothing is downloaded; give ``--model`` a
folder with weights of your own to start from those. Needs the ``hf`` extra.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import zenflow_compile as zf
from examples.stdlib_text import Text, load_text, training_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuneConfig:
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
        model: folder of a Llama model to start from instead of random weights.
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
    model: str | None = None


def build(config: FineTuneConfig) -> LlamaForCausalLM:
    """The model: its bytes are tokens, so any vocabulary of at least 256 will do."""
    if config.model is not None:
        return LlamaForCausalLM.from_pretrained(config.model, local_files_only=True)
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


def finetune(config: FineTuneConfig, *, text: Text | None = None, console: Console | None = None) -> list[float]:
    """Train on the standard library's source and return the loss of every step, in nats per byte."""
    console = console or Console(quiet=True)
    text = text or load_text()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(config).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)

    optimizer = zf.ZenFlowAdamW(model.named_parameters(), lr=config.lr, policy=config.policy)
    compiled = torch.compile(model, backend="zenflow", options={"inner": config.inner})
    losses = []
    with optimizer, zf.profile(optimizer) as profile:
        for step in range(config.steps):
            tokens, _ = training_batch(text, seed=config.seed, step=step, batch=config.batch, context=config.context)
            tokens = tokens.to(device)
            loss = compiled(input_ids=tokens, labels=tokens).loss  # Llama shifts the labels by itself
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if (step + 1) % 10 == 0:
                console.print(f"step {step + 1}: loss {losses[-1]:.4f}", highlight=False)
    if not console.quiet:
        profile.report(console)
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m examples.finetune_llama``."""
    defaults = FineTuneConfig()
    parser = argparse.ArgumentParser(
        prog="python -m examples.finetune_llama",
        description=__doc__.partition("\n")[0],
        argument_default=argparse.SUPPRESS,
    )
    for name in ("steps", "batch", "context", "width", "layers", "seed"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=str(getattr(defaults, name)))
    parser.add_argument("--lr", type=float, help=str(defaults.lr))
    parser.add_argument("--policy", choices=("resident", "zero_offload", "zenflow"), help=defaults.policy)
    parser.add_argument("--inner", choices=("inductor", "eager"), help=defaults.inner)
    parser.add_argument("--model", metavar="FOLDER", help="start from these weights instead of random ones")
    finetune(FineTuneConfig(**vars(parser.parse_args(arguments))), console=Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
