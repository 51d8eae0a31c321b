"""A Llama in plain PyTorch, for machines without ``transformers``: the published shapes, random weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of the model.

    Attributes:
        vocabulary: number of token values.
        width: features per token; a multiple of ``heads``.
        intermediate: features of the feed-forward layers.
        layers: number of blocks.
        heads, key_value_heads: of attention; keys and values are shared by ``heads / key_value_heads`` heads.
        tied: whether the output head shares the embedding's weight.
        bias: whether the projections of attention have biases.
        checkpointing: whether the backward computes each block's activations again.
        head_tokens: tokens whose logits exist at a time: with a vocabulary of 152k those of 32k tokens would take 20 GB
            in fp32.
    """

    vocabulary: int
    width: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    tied: bool = True
    bias: bool = False
    checkpointing: bool = True
    head_tokens: int = 1024

    def activation_bytes(self, tokens: int) -> int:
        """Memory of a step's activations in bf16 with ``checkpointing``: an estimate, of the largest parts alone.

        They are what enters each block, what one block keeps while its backward runs, and the logits of ``head_tokens``
        tokens with their gradients in bf16 and fp32.
        """
        inputs = 2 * self.layers * tokens * self.width
        block = 2 * tokens * (8 * self.width + 4 * self.intermediate)
        return inputs + block + 12 * min(tokens, self.head_tokens) * self.vocabulary


class Attention(nn.Module):
    """Causal self-attention with rotary positions (RoFormer, arXiv:2104.09864)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.key_value_heads = config.heads, config.key_value_heads
        self.head_width = config.width // config.heads
        shared = self.head_width * config.key_value_heads
        self.q_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.k_proj = nn.Linear(config.width, shared, bias=config.bias)
        self.v_proj = nn.Linear(config.width, shared, bias=config.bias)
        self.o_proj = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """``[batch, time, width]`` in and out; ``cosines`` and ``sines``: ``[time, head width]``."""
        batch, time, width = x.shape
        q = self.q_proj(x).view(batch, time, self.heads, self.head_width).transpose(1, 2)
        k, v = (
            project(x).view(batch, time, self.key_value_heads, self.head_width).transpose(1, 2)
            for project in (self.k_proj, self.v_proj)
        )
        q, k = (each * cosines + _rotated(each) * sines for each in (q, k))
        shared_by = self.heads // self.key_value_heads
        k, v = (each.repeat_interleave(shared_by, dim=1) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each after a norm, with a residual connection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.gate_proj = nn.Linear(config.width, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.width, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """``[batch, time, width]`` in and out."""
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        h = self.feed_forward_norm(x)
        out: Tensor = x + self.down_proj(functional.silu(self.gate_proj(h)) * self.up_proj(h))
        return out


class Llama(nn.Module):
    """A decoder with its loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """``int64[batch, time]`` both; the mean cross entropy in nats per token."""
        x = self.embedding(tokens)
        cosines, sines = (each.to(x.dtype) for each in self._rotary(tokens.shape[1], x.device))
        for block in self.blocks:
            if self.config.checkpointing:
                x = checkpoint(block, x, cosines, sines, use_reentrant=False)
            else:
                x = block(x, cosines, sines)
        hidden, flat = self.norm(x).flatten(0, 1), targets.flatten()
        total = hidden.new_zeros((), dtype=torch.float32)
        size = self.config.head_tokens
        for part, labels in zip(hidden.split(size), flat.split(size), strict=True):
            total = total + checkpoint(self._summed_loss, part, labels, use_reentrant=False)
        return total / flat.numel()

    def _rotary(self, time: int, device: torch.device) -> tuple[Tensor, Tensor]:
        width = self.config.width // self.config.heads
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
        angles = torch.outer(torch.arange(time, dtype=torch.float32, device=device), 10_000.0**-exponents)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def _summed_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(hidden).float(), labels, reduction="sum")
