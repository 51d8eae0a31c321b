"""Models and data to compare systems on, the same in every process for the same seed.

Imports PyTorch alone at module level: DeepSpeed's virtual environment runs this file too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.systems.llama import Llama, LlamaConfig
from examples.gpt import GPT, GPTConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BATCHES = 4
"""Different batches of a run, used in turn: few, so that the loss falls within a few dozen steps."""

Batch = tuple[Tensor, ...]


class LinearStack(nn.Module):
    """``layers`` linear layers of ``width``, nothing between them; the loss is the mean squared error."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """``[batch, width]`` both; the mean squared error, a scalar."""
        return functional.mse_loss(self.layers(inputs), targets)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the size of its batches.

    Attributes:
        summary: a description.
        build: makes the model on the CPU or under ``torch.device``, in fp32.
        rows: of a batch: examples, or sequences of ``context`` tokens.
        width: features per example of a linear stack; 0 for language models.
        context: tokens per sequence; 0 for linear stacks.
        vocabulary: number of token values.
        llama: sizes of a Llama; None for other models.
    """

    summary: str
    build: Callable[[], nn.Module]
    rows: int
    width: int = 0
    context: int = 0
    vocabulary: int = 0
    llama: LlamaConfig | None = None

    def with_tokens(self, tokens: int) -> Workload:
        """The same model at ``tokens`` per step, in sequences of at most ``context``.

        Raises:
            ValueError: the model takes no tokens, or they do not divide into sequences.
        """
        if not self.context:
            raise ValueError(f"tokens={tokens} has no meaning for {self.summary}; leave it out")
        context = min(self.context, tokens)
        if tokens < 1 or tokens % context:
            raise ValueError(f"tokens={tokens} must be a multiple of the {self.context} tokens of a sequence")
        return replace(self, rows=tokens // context, context=context)

    def batches(self, seed: int, dtype: torch.dtype, device: torch.device) -> list[Batch]:
        """``BATCHES`` random batches that depend on ``seed`` alone."""
        generator = torch.Generator().manual_seed(seed)
        made: list[Batch] = []
        for _ in range(BATCHES):
            if self.context:
                tokens = torch.randint(self.vocabulary, (self.rows, self.context + 1), generator=generator)
                batch = tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)
            else:
                inputs, targets = (torch.randn(self.rows, self.width, generator=generator) for _ in range(2))
                batch = inputs.to(device, dtype), targets.to(device, dtype)
            made.append(batch)
        return made


def _linear(layers: int, width: int, rows: int, summary: str) -> Workload:
    return Workload(summary, lambda: LinearStack(layers, width), rows, width=width)


def _gpt(rows: int, config: GPTConfig, summary: str) -> Workload:
    return Workload(summary, lambda: GPT(config), rows, context=config.context, vocabulary=config.vocabulary)


def _llama(rows: int, context: int, summary: str, config: LlamaConfig) -> Workload:
    return Workload(summary, lambda: Llama(config), rows, context=context, vocabulary=config.vocabulary, llama=config)


# Shapes of Qwen2.5-3B, from its published configuration; biases of q, k, v only there, of the output too here.
_QWEN_3B = LlamaConfig(
    vocabulary=151_936, width=2048, intermediate=11008, layers=36, heads=16, key_value_heads=2, bias=True
)
_LLAMA_1B = LlamaConfig(vocabulary=32_768, width=2048, intermediate=8192, layers=16, heads=32, key_value_heads=8)
_LLAMA_TINY = LlamaConfig(vocabulary=256, width=64, intermediate=128, layers=2, heads=4, key_value_heads=2, tied=False)

WORKLOADS: dict[str, Workload] = {
    "tiny": _linear(3, 128, 8, "3 linear layers of 128, batch 8"),
    "optimizer-bound": _linear(8, 1024, 16, "8 linear layers of 1024, batch 16"),
    "compute-bound": _linear(8, 1024, 256, "8 linear layers of 1024, batch 256"),
    "gpt": _gpt(
        2,
        GPTConfig(vocabulary=16384, context=128, layers=12, width=768, heads=12),
        "GPT of 12 blocks of 768 with a vocabulary of 16,384, 2 sequences of 128",
    ),
    "llama-tiny": _llama(2, 32, "Llama of 2 blocks of 64, 2 sequences of 32", _LLAMA_TINY),
    "qwen2.5-3b": _llama(1, 4096, "Llama with the shapes of Qwen2.5-3B, 4,096 tokens", _QWEN_3B),
    "llama-3b-32k": _llama(
        1,
        4096,
        "the same with a vocabulary of 32,768 and a head of its own, 4,096 tokens",
        replace(_QWEN_3B, vocabulary=32_768, tied=False),
    ),
    "llama-1b": _llama(
        1,
        4096,
        "Llama with the shapes of Llama-3.2-1B and a vocabulary of 32,768, 4,096 tokens",
        _LLAMA_1B,
    ),
}
