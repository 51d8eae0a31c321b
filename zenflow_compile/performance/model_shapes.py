"""The shape of a model: its parameters in forward order, and the work of a token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zenflow_compile.planning.planners import ParamSpec

if TYPE_CHECKING:
    import torch

NamedShape = tuple[str, tuple[int, ...]]

_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model in which every token is multiplied with all matrices but the embeddings.

    Attributes:
        params: in forward order, with ``layers`` repeated blocks.
        hidden: width of the residual stream, and of all attention heads together.
        context: tokens of a sequence that attention runs over.
        embeddings: names of the parameters in which tokens are looked up, which costs no FLOPs.
        tied: the embedding that is also the head, at the end of the forward; None if there is none.
        source: source of the configuration.

    Raises:
        ValueError: ``embeddings`` names no parameter, or ``tied`` no embedding.
    """

    name: str
    params: tuple[ParamSpec, ...]
    layers: int
    hidden: int
    context: int
    embeddings: tuple[str, ...] = ()
    tied: str | None = None
    source: str

    def __post_init__(self) -> None:
        names = {spec.name for spec in self.params}
        if unknown := [name for name in self.embeddings if name not in names]:
            raise ValueError(f"embeddings={unknown!r} of {self.name!r} must be names of its params; correct them")
        if self.tied is not None and self.tied not in self.embeddings:
            raise ValueError(f"tied={self.tied!r} of {self.name!r} must be one of its embeddings; add it to them")

    @property
    def lookups(self) -> int:
        """Elements of embeddings that are not also the head."""
        return sum(spec.numel for spec in self.params if spec.name in self.embeddings and spec.name != self.tied)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(spec.numel for spec in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSizes:
    """Sizes of a model like Llama: RMS norms, SwiGLU, grouped keys and values.

    Attributes:
        qkv_bias: queries, keys and values have biases (Qwen2).
        qk_norm: queries and keys are normalized, per head (Qwen3, Gemma 3).
        sandwich_norms: attention and MLP are also normalized behind them (Gemma 2 and 3).
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    head_dim: int
    source: str
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False

    def shape(self, name: str, dtype: torch.dtype) -> ModelShape:
        embedding = (_EMBEDDING, (self.vocabulary, self.hidden))
        blocks = [(f"layers.{i}.{part}", shape) for i in range(self.layers) for part, shape in self._block()]
        head = [] if self.tied else [("lm_head.weight", (self.vocabulary, self.hidden))]
        return ModelShape(
            name=name,
            params=specs_of([embedding, *blocks, ("norm.weight", (self.hidden,)), *head], dtype),
            layers=self.layers,
            hidden=self.heads * self.head_dim,
            context=self.context,
            embeddings=(_EMBEDDING,),
            tied=_EMBEDDING if self.tied else None,
            source=self.source,
        )

    def _block(self) -> list[NamedShape]:
        block: list[NamedShape] = []
        for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            block.append((f"self_attn.{part}_proj.weight", (heads * self.head_dim, self.hidden)))
            if self.qkv_bias:
                block.append((f"self_attn.{part}_proj.bias", (heads * self.head_dim,)))
        names = ["q_norm", "k_norm"] if self.qk_norm else []
        block += [(f"self_attn.{name}.weight", (self.head_dim,)) for name in names]
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if self.sandwich_norms else []
        return [
            *block,
            ("self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim)),
            ("mlp.gate_proj.weight", (self.intermediate, self.hidden)),
            ("mlp.up_proj.weight", (self.intermediate, self.hidden)),
            ("mlp.down_proj.weight", (self.hidden, self.intermediate)),
            *((f"{name}.weight", (self.hidden,)) for name in norms),
        ]


def specs_of(params: Iterable[NamedShape], dtype: torch.dtype) -> tuple[ParamSpec, ...]:
    """Parameters with weights of ``dtype``."""
    return tuple(ParamSpec(name, shape, dtype) for name, shape in params)


def flops_per_token(model: ModelShape, context: int | None = None) -> float:
    """FLOPs of a forward and backward for one token, without recomputation.

    6 per element of the matrices that a token is multiplied with (Kaplan et al., arXiv 2001.08361, Table 1), and
    12 * layers * hidden * context for attention, as if no token were masked (PaLM, arXiv 2204.02311, appendix B).

    Args:
        context: tokens of a sequence; the model's own by default.
    """
    tokens = model.context if context is None else context
    multiplied = sum(spec.numel for spec in model.params if len(spec.shape) >= 2) - model.lookups
    return 6.0 * multiplied + 12.0 * model.layers * model.hidden * tokens
