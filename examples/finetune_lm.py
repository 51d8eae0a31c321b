"""Fine-tune a causal language model on text files, with its own tokenizer and optimizer state in host memory.

    python -m examples.finetune_lm --text notes.txt more.txt
    python -m examples.finetune_lm --model folder/or/file.gguf --text notes.txt --save tuned
    python -m examples.finetune_lm --policy zero_offload --checkpoint-activations
    python -m examples.finetune_lm --config deepspeed.json

The model is that of ``examples.pretrained`` by default, and the text is the C++ headers that come with PyTorch.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import zenflow_compile as zf
from examples.epochs import Epochs
from examples.language_model import ModelError, load
from examples.pretrained import MODEL, UnavailableError, fetch

POLICIES = ("resident", "zero_offload", "twinflow", "deep_optimizer_states", "zenflow", "zero_infinity")
_HELD_OUT = 16  # one sequence in so many is not trained on


class Sequences:
    """A text as sequences of tokens, each of the same length.

    Args:
        text: characters.
        context: tokens of a sequence.
        batch: sequences of a step.
        seed: of their order.

    Attributes:
        trained, held_out: (sequences, ``context``).

    Raises:
        ValueError: the text is too short for a batch, or the tokenizer makes nothing of it.
    """

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase, context: int, *, batch: int, seed: int) -> None:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        count = len(ids) // context
        if count < max(batch, 2):
            raise ValueError(
                f"the text has {len(ids)} tokens, {count} sequences of {context}, and a batch has {batch}; give more "
                "--text, or a smaller --context or --batch"
            )
        whole = ids[: count * context].view(count, context)
        chosen = torch.arange(count) % _HELD_OUT == 1
        self.held_out, self.trained = whole[chosen], whole[~chosen]
        self._size = batch
        self._epochs = Epochs(len(self.trained), seed)

    def batch(self, step: int) -> Tensor:
        """The sequences of a step, (``batch``, ``context``); see ``Epochs``."""
        return self.trained[self._epochs.of_step(step, self._size)]


def finetune(given: argparse.Namespace, console: Console) -> list[float]:
    """Train, and return the loss of every step in nats per token.

    Raises:
        UnavailableError: the package of the default model cannot be had.
        ModelError, ValueError, OSError: a file cannot be used.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = read_text(given.text)
    if given.save is not None:
        Path(given.save).mkdir(parents=True, exist_ok=True)  # fails here, and not when all is trained
    model, tokenizer = load(
        given.model or fetch(MODEL, console), torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    longest = getattr(model.config, "max_position_embeddings", given.context)
    if given.context > longest:
        raise ValueError(f"--context={given.context} must be at most {longest}, which the model has positions for")
    sequences = Sequences(text, tokenizer, given.context, batch=given.batch, seed=given.seed)
    model.to(device)
    if given.checkpoint_activations:
        model.gradient_checkpointing_enable()
    model.train()

    optimizer = zf.ZenFlowAdamW(model.named_parameters(), config=given.config, **options(given))
    compiled = torch.compile(model, backend="zenflow", options={"inner": given.inner})
    losses: list[Tensor] = []
    before = evaluate(model, sequences.held_out[: given.evaluated], device)
    console.print(f"held-out loss before: {before:.4f}, perplexity {math.exp(before):.2f}", highlight=False)
    with optimizer, zf.live(optimizer) if given.live else zf.profile(optimizer) as profile:
        for step in range(given.steps):
            tokens = sequences.batch(step).to(device)
            loss = compiled(input_ids=tokens, labels=tokens).loss  # the model shifts the labels by itself
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())  # reading it here would wait for the device
            if (step + 1) % 10 == 0:
                console.print(f"step {step + 1}: loss {loss.item():.4f}", highlight=False)
    after = evaluate(model, sequences.held_out[: given.evaluated], device)
    console.print(f"held-out loss after: {after:.4f}, perplexity {math.exp(after):.2f}", highlight=False)
    if not console.quiet:
        profile.report(console)
    if given.save is not None:
        model.save_pretrained(given.save)
        tokenizer.save_pretrained(given.save)
        console.print(f"saved: {given.save}", highlight=False)
    return [each.item() for each in losses]


def options(given: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the optimizer: those of the command line, which come before those of ``--config``."""
    chosen = {name: getattr(given, name) for name in ("lr", "policy", "update_interval", "topk_ratio", "nvme_path")}
    return {name: value for name, value in chosen.items() if value is not None}


@torch.no_grad()
def evaluate(model: PreTrainedModel, sequences: Tensor, device: torch.device) -> float:
    """Mean loss per token in nats."""
    model.eval()
    losses = [model(input_ids=each.to(device), labels=each.to(device)).loss.item() for each in sequences.split(1)]
    model.train()
    return sum(losses) / len(losses)


def read_text(paths: Sequence[str]) -> str:
    """The files' text, or that of PyTorch's C++ headers.

    Raises:
        OSError, ValueError: a file cannot be read, is no text, or all are empty.
    """
    files = [Path(each) for each in paths] or sorted((Path(torch.__file__).parent / "include" / "c10").rglob("*.h"))
    try:
        text = "\n".join(file.read_text(encoding="utf8") for file in files)
    except UnicodeDecodeError as error:
        raise ValueError(f"a file of --text is not UTF-8: {error}") from None
    if not text.strip():
        raise ValueError(f"{', '.join(map(str, files)) or '--text'} has no text")
    return text


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.finetune_lm", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", metavar="PATH", help="GGUF file, or folder of Hugging Face Transformers")
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="UTF-8 text to train on")
    for name, value, said in (
        ("steps", 50, "optimizer steps"),
        ("batch", 4, "sequences per step"),
        ("context", 128, "tokens per sequence"),
        ("seed", 0, "of the order of the sequences"),
        ("evaluated", 32, "held-out sequences that are evaluated, at most"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{said} ({value})")
    parser.add_argument("--lr", type=float, help="learning rate, constant (2e-5, or that of --config)")
    parser.add_argument("--policy", choices=POLICIES, help="where optimizer state lives (zenflow)")
    parser.add_argument("--update-interval", type=int, metavar="N", help="steps per update window (4)")
    parser.add_argument("--topk-ratio", type=float, metavar="SHARE", help="slices updated in every step (0.1)")
    parser.add_argument("--nvme-path", metavar="FOLDER", help="of zero_infinity's state")
    parser.add_argument("--config", metavar="JSON", help="DeepSpeed configuration, for what is not given otherwise")
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor", help="what compiles the graphs")
    parser.add_argument("--checkpoint-activations", action="store_true", help="recompute them in the backward")
    parser.add_argument("--live", action="store_true", help="show the last steps while it trains")
    parser.add_argument("--save", metavar="FOLDER", help="write the model and its tokenizer")
    given = parser.parse_args(arguments)
    # A sequence of one token has no next one.
    for name, least in (("steps", 1), ("batch", 1), ("context", 2), ("evaluated", 1)):
        if getattr(given, name) < least:
            parser.error(f"--{name}={getattr(given, name)} must be at least {least}")
    if given.lr is None and given.config is None:
        given.lr = 2e-5
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m examples.finetune_lm``."""
    given = parse(arguments)
    try:
        finetune(given, Console())
    except (UnavailableError, ModelError, ValueError, TypeError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
