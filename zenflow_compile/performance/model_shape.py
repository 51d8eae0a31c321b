"""A model as its parameters in forward order, and the work of a token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zenflow_compile.planning.model_blocks import repeated_blocks
from zenflow_compile.planning.planners import ParamSpec

if TYPE_CHECKING:
    import torch

NamedShape = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model in which every token is multiplied with all matrices but the embeddings, or with a share of some.

    Attributes:
        params: in forward order, with ``layers`` repeated blocks.
        hidden: width of the residual stream, and of all attention heads together.
        context: tokens of a sequence that attention runs over.
        embeddings: names of the parameters in which tokens are looked up, which costs no FLOPs.
        tied: the embedding that is also the head, at the end of the forward; None if there is none.
        shares: of some parameters, by name: the share of their elements that a token is multiplied with, on average.
        whole: a sequence is a sample, which has all tokens of ``context``.
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
    shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    whole: bool = False
    source: str

    def __post_init__(self) -> None:
        names = {spec.name for spec in self.params}
        if unknown := [name for name in self.embeddings if name not in names]:
            raise ValueError(f"embeddings={unknown!r} of {self.name!r} must be names of its params; correct them")
        if self.tied is not None and self.tied not in self.embeddings:
            raise ValueError(f"tied={self.tied!r} of {self.name!r} must be one of its embeddings; add it to them")

    def multiplied(self, spec: ParamSpec) -> float:
        """How many elements of a parameter a token is multiplied with, but for an embedding that is also the head."""
        if len(spec.shape) < 2 or spec.name in self.embeddings:
            return 0.0
        return spec.numel * self.shares.get(spec.name, 1.0)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(spec.numel for spec in self.params)


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
    multiplied = sum(model.multiplied(spec) for spec in model.params)
    multiplied += sum(spec.numel for spec in model.params if spec.name == model.tied)
    return 6.0 * multiplied + 12.0 * model.layers * model.hidden * tokens


def shape_of(specs: Sequence[ParamSpec]) -> ModelShape:
    """The shape of a model with known parameters only: repeated blocks are its layers, and attention is left out."""
    blocks = repeated_blocks([spec.shape for spec in specs])
    width = next((spec.shape[-1] for spec in specs if len(spec.shape) > 1), 1)
    layers = (blocks[2] - blocks[0]) // blocks[1] if blocks else len(specs)
    return ModelShape(
        name="model", params=tuple(specs), layers=layers, hidden=width, context=0, source="its parameters"
    )
