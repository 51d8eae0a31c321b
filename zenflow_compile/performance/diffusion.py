"""Diffusion Transformers with joint attention: an image's tokens and a text's, each with matrices of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zenflow_compile.performance.model_shape import ModelShape, NamedShape, specs_of

if TYPE_CHECKING:
    import torch

_TIME = 256  # sinusoids of the time step
_LATENTS = 64  # channels of a latent image, 16, in patches of 2 x 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionSizes:
    """Sizes of an MMDiT (Esser et al., arXiv 2403.03206), with names as in diffusers.

    Attributes:
        hidden: width of both streams.
        joint: blocks in which image and text have their own matrices.
        single: blocks behind them, in which all tokens share matrices.
        text: width of the text's embeddings.
        pooled: width of the embedding that stands for the whole text.
        image_tokens, text_tokens: of a sample; together the context.
        guidance: the guidance scale is embedded, as the time step is.
        convolved: patches are cut by a convolution, and the last joint block has no text behind its attention.
    """

    hidden: int
    joint: int
    single: int = 0
    head_dim: int
    text: int = 4096
    pooled: int
    image_tokens: int = 4096
    text_tokens: int
    guidance: bool = False
    convolved: bool = False
    source: str

    def shape(self, name: str, dtype: torch.dtype) -> ModelShape:
        params = specs_of(self._params(), dtype)
        return ModelShape(
            name=name,
            params=params,
            layers=self.joint + self.single,
            hidden=self.hidden,
            context=self.image_tokens + self.text_tokens,
            shares={spec.name: self._share(spec.name) for spec in params},
            whole=True,
            source=self.source,
        )

    def _share(self, name: str) -> float:
        """The share of a sample's tokens that a parameter is multiplied with."""
        context = self.image_tokens + self.text_tokens
        if ".norm" in name or name.startswith(("time_text_embed", "norm_out")):
            return 1 / context  # scales and shifts: once for a sample
        if name.startswith("single_transformer_blocks"):
            return 1.0
        of_text = any(part in name for part in ("context", ".add_", ".to_add_out"))
        return (self.text_tokens if of_text else self.image_tokens) / context

    def _params(self) -> list[NamedShape]:
        width = self.hidden
        patches: NamedShape = ("pos_embed.proj.weight", (width, _LATENTS // 4, 2, 2))
        if not self.convolved:
            patches = ("x_embedder.weight", (width, _LATENTS))
        embedded = [("timestep", _TIME), *([("guidance", _TIME)] if self.guidance else []), ("text", self.pooled)]
        embedders = [
            each
            for kind, given in embedded
            for each in (
                *_linear(f"time_text_embed.{kind}_embedder.linear_1", given, width),
                *_linear(f"time_text_embed.{kind}_embedder.linear_2", width, width),
            )
        ]
        return [
            patches,
            (patches[0].replace("weight", "bias"), (width,)),
            *embedders,
            *_linear("context_embedder", self.text, width),
            *(each for number in range(self.joint) for each in self._joint(number)),
            *(each for number in range(self.single) for each in self._single(f"single_transformer_blocks.{number}")),
            *_linear("norm_out.linear", width, 2 * width),
            *_linear("proj_out", width, _LATENTS),
        ]

    def _joint(self, number: int) -> list[NamedShape]:
        block, width = f"transformer_blocks.{number}", self.hidden
        ends = self.convolved and number == self.joint - 1
        return [
            *_linear(f"{block}.norm1.linear", width, 6 * width),
            *_linear(f"{block}.norm1_context.linear", width, (2 if ends else 6) * width),
            *self._attention(block, ("to_q", "to_k", "to_v", "to_out.0"), ("norm_q", "norm_k")),
            *self._attention(
                block,
                ("add_q_proj", "add_k_proj", "add_v_proj", *(() if ends else ("to_add_out",))),
                ("norm_added_q", "norm_added_k"),
            ),
            *_mlp(f"{block}.ff", width),
            *([] if ends else _mlp(f"{block}.ff_context", width)),
        ]

    def _single(self, block: str) -> list[NamedShape]:
        width = self.hidden
        return [
            *_linear(f"{block}.norm.linear", width, 3 * width),
            *_linear(f"{block}.proj_mlp", width, 4 * width),
            *_linear(f"{block}.proj_out", 5 * width, width),
            *self._attention(block, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")),
        ]

    def _attention(self, block: str, matrices: tuple[str, ...], norms: tuple[str, ...]) -> list[NamedShape]:
        width = self.hidden
        return [
            *(each for name in matrices for each in _linear(f"{block}.attn.{name}", width, width)),
            *((f"{block}.attn.{name}.weight", (self.head_dim,)) for name in norms),
        ]


def _linear(name: str, given: int, made: int) -> list[NamedShape]:
    return [(f"{name}.weight", (made, given)), (f"{name}.bias", (made,))]


def _mlp(name: str, width: int) -> list[NamedShape]:
    return [*_linear(f"{name}.net.0.proj", width, 4 * width), *_linear(f"{name}.net.2", 4 * width, width)]
