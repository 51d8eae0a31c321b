"""Models as planning sees them: the shapes of their parameters in forward order, and the work of a token."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zenflow_compile.checks.printable import printable
from zenflow_compile.checks.validate import check_flag, check_integer, nearest
from zenflow_compile.planning.dtypes import BFLOAT16, FLOAT16, FLOAT32
from zenflow_compile.planning.planners import ParamSpec

if TYPE_CHECKING:
    import torch

_EMBEDDING = "embed_tokens.weight"
_HEAD_DIM = 128
_SMALLEST = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model whose tokens go through all matrices, except those that it names as embeddings.

    Attributes:
        params: in forward order; ``layers`` repeated blocks among them.
        hidden: width of the residual stream, and of all attention heads together.
        context: tokens of a sequence that attention runs over.
        embeddings: names of the parameters in which tokens are looked up where they stand, which costs no FLOPs.
        tied: the one of them that tokens are multiplied with at the forward's end, as the head; None if none is.
        source: where the configuration comes from.

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
        """Elements of parameters that no token is multiplied with."""
        return sum(spec.numel for spec in self.params if spec.name in self.embeddings and spec.name != self.tied)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(spec.numel for spec in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Llama:
    """Llama and what differs from it in sizes and biases only: RMS norms, SwiGLU, grouped keys and values."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    head_dim: int
    tied: bool = False
    qkv_bias: bool = False

    def shape(self, name: str, source: str, dtype: torch.dtype) -> ModelShape:
        embedding = (_EMBEDDING, (self.vocabulary, self.hidden))
        blocks = [(f"layers.{i}.{part}", shape) for i in range(self.layers) for part, shape in self._block()]
        head = [] if self.tied else [("lm_head.weight", (self.vocabulary, self.hidden))]
        return ModelShape(
            name=name,
            params=_specs([embedding, *blocks, ("norm.weight", (self.hidden,)), *head], dtype),
            layers=self.layers,
            hidden=self.heads * self.head_dim,
            context=self.context,
            embeddings=(_EMBEDDING,),
            tied=_EMBEDDING if self.tied else None,
            source=source,
        )

    def _block(self) -> list[tuple[str, tuple[int, ...]]]:
        block: list[tuple[str, tuple[int, ...]]] = []
        for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            block.append((f"self_attn.{part}_proj.weight", (heads * self.head_dim, self.hidden)))
            if self.qkv_bias:
                block.append((f"self_attn.{part}_proj.bias", (heads * self.head_dim,)))
        return [
            *block,
            ("self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim)),
            ("mlp.gate_proj.weight", (self.intermediate, self.hidden)),
            ("mlp.up_proj.weight", (self.intermediate, self.hidden)),
            ("mlp.down_proj.weight", (self.hidden, self.intermediate)),
            ("input_layernorm.weight", (self.hidden,)),
            ("post_attention_layernorm.weight", (self.hidden,)),
        ]


def _gpt2(
    name: str,
    source: str,
    dtype: torch.dtype,
    *,
    hidden: int,
    inner: int,
    layers: int,
    vocabulary: int,
    context: int,
    tied: bool,
) -> ModelShape:
    """GPT-2: weights ``[in, out]``, biases everywhere, learned positions."""
    block: list[tuple[str, tuple[int, ...]]] = [
        ("ln_1.weight", (hidden,)),
        ("ln_1.bias", (hidden,)),
        ("attn.c_attn.weight", (hidden, 3 * hidden)),
        ("attn.c_attn.bias", (3 * hidden,)),
        ("attn.c_proj.weight", (hidden, hidden)),
        ("attn.c_proj.bias", (hidden,)),
        ("ln_2.weight", (hidden,)),
        ("ln_2.bias", (hidden,)),
        ("mlp.c_fc.weight", (hidden, inner)),
        ("mlp.c_fc.bias", (inner,)),
        ("mlp.c_proj.weight", (inner, hidden)),
        ("mlp.c_proj.bias", (hidden,)),
    ]
    blocks = [(f"h.{i}.{part}", shape) for i in range(layers) for part, shape in block]
    params = [
        ("wte.weight", (vocabulary, hidden)),
        ("wpe.weight", (context, hidden)),
        *blocks,
        ("ln_f.weight", (hidden,)),
        ("ln_f.bias", (hidden,)),
        *([] if tied else [("lm_head.weight", (vocabulary, hidden))]),
    ]
    return ModelShape(
        name=name,
        params=_specs(params, dtype),
        layers=layers,
        hidden=hidden,
        context=context,
        embeddings=("wte.weight", "wpe.weight"),
        tied="wte.weight" if tied else None,
        source=source,
    )


def _specs(params: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(name, shape, dtype) for name, shape in params)


# Named models.

_LLAMA2 = "Llama 2 (arXiv 2307.09288); its published config.json"
_QWEN = "Qwen2.5 (arXiv 2412.15115), Table 1; its published config.json"
_DOS = (
    "run script of Deep Optimizer States (github.com/DataStates/artifacts, deep-optimizer-states/master-script.sh): "
    "Llama blocks with 4 heads of keys and values; of 50304 tokens, with which the parameters are those its logs count"
)


def _dos(*, hidden: int, intermediate: int, layers: int, heads: int) -> tuple[_Llama, str]:
    configuration = _Llama(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=4,
        head_dim=hidden // heads,
        vocabulary=50304,
        context=2048,
    )
    return configuration, _DOS


def _llama2(*, hidden: int, intermediate: int, layers: int, kv_heads: int) -> tuple[_Llama, str]:
    configuration = _Llama(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=hidden // _HEAD_DIM,
        kv_heads=kv_heads,
        head_dim=_HEAD_DIM,
        vocabulary=32000,
        context=4096,
    )
    return configuration, _LLAMA2


def _qwen(
    *, hidden: int, intermediate: int, layers: int, kv_heads: int, vocabulary: int, context: int, tied: bool
) -> tuple[_Llama, str]:
    configuration = _Llama(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=hidden // _HEAD_DIM,
        kv_heads=kv_heads,
        head_dim=_HEAD_DIM,
        vocabulary=vocabulary,
        context=context,
        tied=tied,
        qkv_bias=True,
    )
    return configuration, _QWEN


MODELS: Mapping[str, tuple[_Llama, str]] = {
    "dos-7b": _dos(hidden=4096, intermediate=11008, layers=32, heads=32),
    "dos-8.3b": _dos(hidden=3072, intermediate=11008, layers=72, heads=32),
    "dos-10b": _dos(hidden=4096, intermediate=12400, layers=50, heads=32),
    "dos-13b": _dos(hidden=5120, intermediate=13824, layers=40, heads=40),
    "dos-20b": _dos(hidden=5120, intermediate=20480, layers=40, heads=64),
    "llama2-7b": _llama2(hidden=4096, intermediate=11008, layers=32, kv_heads=32),
    "llama2-13b": _llama2(hidden=5120, intermediate=13824, layers=40, kv_heads=40),
    "llama2-70b": _llama2(hidden=8192, intermediate=28672, layers=80, kv_heads=8),
    "qwen2.5-1.5b": _qwen(
        hidden=1536, intermediate=8960, layers=28, kv_heads=2, vocabulary=151936, context=131072, tied=True
    ),
    "qwen2.5-3b": _qwen(
        hidden=2048, intermediate=11008, layers=36, kv_heads=2, vocabulary=151936, context=32768, tied=True
    ),
    "qwen2.5-7b": _qwen(
        hidden=3584, intermediate=18944, layers=28, kv_heads=4, vocabulary=152064, context=131072, tied=False
    ),
}
"""Configurations by name, with their source. ``dos-*`` are the models of the Deep Optimizer States paper (Table 2) as
its authors ran them. Their names are nominal: the logs count 5.95, 9.14, 9.92, 11.32 and 15.33 billion parameters."""


def model(name: str, dtype: torch.dtype | None = None) -> ModelShape:
    """The named model, with weights of ``dtype``; None takes bfloat16.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in MODELS:
        raise ValueError(
            f"model={name!r} is not known{nearest(name, MODELS) or '.'} There are {', '.join(MODELS)}; "
            "the path of a config.json does as well, and so does a number of parameters (--params on the command line)"
        )
    configuration, source = MODELS[name]
    return configuration.shape(name, source, dtype or BFLOAT16)


def flops_per_token(model: ModelShape, context: int | None = None) -> float:
    """FLOPs of a forward and backward for one token, without recomputation.

    6 for each element of a matrix that the token is multiplied with (Kaplan et al., arXiv 2001.08361, Table 1), and
    12 * layers * hidden * context for attention, as if no token were masked (PaLM, arXiv 2204.02311, appendix B).

    Args:
        context: tokens of a sequence; the model's own by default.
    """
    tokens = model.context if context is None else context
    multiplied = sum(spec.numel for spec in model.params if len(spec.shape) >= 2) - model.lookups
    return 6.0 * multiplied + 12.0 * model.layers * model.hidden * tokens


# Other models.


def of_size(numel: int, dtype: torch.dtype | None = None) -> ModelShape:
    """A Llama-like model of about ``numel`` parameters: of those within 1%, the one whose depth is most like Llama's.

    Weights are of ``dtype``; None takes bfloat16.

    Raises:
        ValueError: fewer than a million parameters.
    """
    check_integer("params", numel, _SMALLEST, remedy="; plan a smaller model by its config.json")
    found = [_sized(hidden, numel) for hidden in (64, *range(_HEAD_DIM, 256 * _HEAD_DIM, _HEAD_DIM))]
    possible = [configuration for configuration in found if configuration.layers > 0]
    counts = {configuration: _count(configuration) for configuration in possible}
    closest = min(abs(count - numel) for count in counts.values())
    near = [each for each, count in counts.items() if abs(count - numel) <= max(closest, numel // 100)]
    # Llama has 128 of width per layer from 7 to 34 billion parameters.
    best = min(near, key=lambda each: abs(math.log(each.hidden / each.layers / 128)))
    return best.shape(f"{numel / 1e9:.3g}b", "shape of Llama 2, sizes chosen for the count", dtype or BFLOAT16)


def _sized(hidden: int, numel: int) -> _Llama:
    """Of that width, as deep as ``numel`` allows. Embedding and head get a quarter of a small model at most."""
    vocabulary = min(32000, numel // (8 * hidden))
    head_dim = min(_HEAD_DIM, hidden)
    sizes: dict[str, Any] = {
        "hidden": hidden,
        "intermediate": 64 * round(hidden * 8 / 3 / 64),
        "heads": hidden // head_dim,
        "kv_heads": hidden // head_dim,
        "head_dim": head_dim,
        "vocabulary": vocabulary,
        "context": 4096,
    }
    per_layer = _count(_Llama(**sizes, layers=1)) - _count(_Llama(**sizes, layers=0))
    return _Llama(**sizes, layers=round((numel - 2 * vocabulary * hidden) / per_layer))


def _count(configuration: _Llama) -> int:
    attention = 2 * configuration.hidden * configuration.head_dim * (configuration.heads + configuration.kv_heads)
    block = attention + 3 * configuration.hidden * configuration.intermediate + 2 * configuration.hidden
    return configuration.layers * block + configuration.hidden * (2 * configuration.vocabulary + 1)


def from_config(path: str | Path, dtype: torch.dtype | None = None) -> ModelShape:
    """The model of a Hugging Face ``config.json``, or of a folder that has one: Llama, Mistral, Qwen2 or GPT-2.

    Args:
        dtype: of the weights; None takes the configuration's, and bfloat16 where it has none.

    Raises:
        ValueError: the file cannot be read, is of another kind of model, lacks a key, or has a value that makes no
            model.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error}; give the path of a config.json"
        raise ValueError(f"model configuration {printable(file)} {reason}") from error
    kind = given.get("model_type") if isinstance(given, dict) else None
    if kind not in _KINDS:
        raise ValueError(
            f"model_type={kind!r} in {printable(file)} must be one of {', '.join(_KINDS)}; plan another dense model by "
            "its number of parameters; of a mixture of experts there is no plan"
        )
    config = _Config(given, printable(file))
    config.refuse_experts()
    name, weights = printable(file.parent.name or kind), dtype or config.dtype()
    if kind == "gpt2":
        return _gpt2_of(config, name, weights)
    return _llama_of(config, qkv_bias=kind == "qwen2").shape(name, config.file, weights)


def _gpt2_of(config: _Config, name: str, dtype: torch.dtype) -> ModelShape:
    hidden = config.size("n_embd")
    config.divisor("n_head", 1, of="n_embd")
    return _gpt2(
        name,
        config.file,
        dtype,
        hidden=hidden,
        inner=config.size("n_inner", 4 * hidden),
        layers=config.size("n_layer"),
        vocabulary=config.size("vocab_size"),
        context=config.size("n_positions"),
        tied=config.flag("tie_word_embeddings", default=True),
    )


def _llama_of(config: _Config, *, qkv_bias: bool) -> _Llama:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.given.get("head_dim") is None:
        config.divisor("num_attention_heads", heads, of="hidden_size")
    return _Llama(
        hidden=hidden,
        intermediate=config.size("intermediate_size"),
        layers=config.size("num_hidden_layers"),
        heads=heads,
        kv_heads=config.divisor("num_key_value_heads", heads, of="num_attention_heads"),
        vocabulary=config.size("vocab_size"),
        context=config.size("max_position_embeddings"),
        head_dim=config.size("head_dim", hidden // heads),
        tied=config.flag("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
    )


_KINDS = ("llama", "mistral", "qwen2", "gpt2")
_DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers writes the first from version 4.56 on
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class _Config:
    """The keys of a config.json, with errors that name it. A key that is null counts as absent."""

    given: Mapping[str, Any]
    file: str

    def size(self, key: str, default: int | None = None) -> int:
        """An integer >= 1."""
        value = self.given.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ValueError(
                f'{self.file} has no "{key}", which a {self.given["model_type"]} configuration needs; '
                "add it, or plan by the number of parameters"
            )
        try:
            return check_integer(key, value, 1)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.file}: {error}") from error

    def divisor(self, key: str, default: int, *, of: str) -> int:
        """A size that divides the size ``of``."""
        value, whole = self.size(key, default), self.size(of)
        if whole % value:
            raise ValueError(f"{self.file}: {key}={value} must be a divisor of {of}={whole}; correct one of them")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.given.get(key)
        try:
            return default if value is None else check_flag(key, value)
        except TypeError as error:
            raise ValueError(f"{self.file}: {error}") from error

    def dtype(self) -> torch.dtype:
        """Of the weights."""
        key = next((key for key in _DTYPE_KEYS if self.given.get(key) is not None), None)
        if key is None:
            return BFLOAT16
        value = self.given[key]
        if not isinstance(value, str) or value not in _DTYPES:
            raise ValueError(
                f"{self.file}: {key}={value!r} must be one of {', '.join(_DTYPES)}; correct it, or give the dtype "
                "beside the file"
            )
        return _DTYPES[value]

    def refuse_experts(self) -> None:
        """A token goes through some of the experts only, and through which is not known."""
        for key in _EXPERT_KEYS:
            if (value := self.given.get(key)) not in (None, 0, 1):
                raise ValueError(
                    f"{self.file}: {key}={value!r} must be absent: of a mixture of experts there is no plan; "
                    "plan a dense model"
                )
