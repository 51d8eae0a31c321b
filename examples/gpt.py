"""A small pre-norm GPT: an ordinary ``nn.Module`` without any code for offloading."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of the model.

    Attributes:
        vocabulary: number of token values; 256 for bytes.
        context: the longest sequence, in tokens.
        layers: number of blocks.
        width: features per token; a multiple of ``heads``.
        heads: attention heads per block.
        tied: whether the output head shares the embedding's weight.
    """

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    width: int = 192
    heads: int = 6
    tied: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}; change one of the two")


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens: ``[batch, time, width]`` in and out."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, time, head width]
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and a four times wider GELU layer, each behind a norm, with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.mlp_down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """One block: ``[batch, time, width]`` in and out."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_down(functional.gelu(self.mlp_up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a final norm and a linear head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self._initialise()

    def _initialise(self) -> None:
        # Layers that write into the residual stream start smaller: its variance must not grow with depth.
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes_residual = name.endswith(("attention.out.weight", "mlp_down.weight"))
                nn.init.normal_(parameter, std=residual_std if writes_residual else 0.02)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a forward and a backward for one token of a sequence of ``context`` tokens, attention unmasked."""
        multiplied = sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))
        return 6.0 * multiplied + 12.0 * self.config.layers * self.config.width * self.config.context

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats per token.

        Args:
            tokens: ``int64[batch, time]`` with ``time <= context``.
            targets: ``int64[batch, time]``, the token that follows each of ``tokens``.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
