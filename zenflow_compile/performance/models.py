"""Models by name, by size, and from a ``config.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from zenflow_compile.checks.validate import check_flag, check_integer, nearest, printable
from zenflow_compile.performance.diffusion import DiffusionSizes
from zenflow_compile.performance.model_shape import ModelShape, NamedShape, specs_of
from zenflow_compile.planning.dtypes import BFLOAT16, FLOAT16, FLOAT32

if TYPE_CHECKING:
    import torch


_EMBEDDING = "embed_tokens.weight"


class Sizes(Protocol):
    """The sizes of a kind of model."""

    def shape(self, name: str, dtype: torch.dtype) -> ModelShape: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSizes:
    """Sizes of a model like Llama: RMS norms, SwiGLU, grouped keys and values.

    Attributes:
        qkv_bias: queries, keys and values have biases (Qwen2).
        qk_norm: queries and keys are normalized, per head (Qwen3, Gemma 3).
        sandwich_norms: attention and MLP are also normalized behind them (Gemma 2 and 3).
        experts: of a layer, each of ``intermediate`` size, in one parameter; 0: the MLP is dense.
        chosen: experts of a token.
        biased: biases of attention, router and experts, sinks of attention, and experts as ``[experts, in, out]``
            (gpt-oss).
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
    experts: int = 0
    chosen: int = 0
    biased: bool = False

    def shape(self, name: str, dtype: torch.dtype) -> ModelShape:
        embedding = (_EMBEDDING, (self.vocabulary, self.hidden))
        active = self.chosen / self.experts if self.experts else 1.0
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
            shares={part: active if len(shape) == 3 else 0.0 for part, shape in blocks if ".experts." in part},
            source=self.source,
        )

    def _block(self) -> list[NamedShape]:
        block: list[NamedShape] = [("self_attn.sinks", (self.heads,))] if self.biased else []
        for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            block.append((f"self_attn.{part}_proj.weight", (heads * self.head_dim, self.hidden)))
            if self.qkv_bias or self.biased:
                block.append((f"self_attn.{part}_proj.bias", (heads * self.head_dim,)))
        names = ["q_norm", "k_norm"] if self.qk_norm else []
        block += [(f"self_attn.{name}.weight", (self.head_dim,)) for name in names]
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if self.sandwich_norms else []
        return [
            *block,
            ("self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim)),
            *([("self_attn.o_proj.bias", (self.hidden,))] if self.biased else []),
            *(self._experts() if self.experts else self._mlp()),
            *((f"{name}.weight", (self.hidden,)) for name in norms),
        ]

    def _mlp(self) -> list[NamedShape]:
        return [
            ("mlp.gate_proj.weight", (self.intermediate, self.hidden)),
            ("mlp.up_proj.weight", (self.intermediate, self.hidden)),
            ("mlp.down_proj.weight", (self.hidden, self.intermediate)),
        ]

    def _experts(self) -> list[NamedShape]:
        up, down = (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)
        if not self.biased:
            return [
                ("mlp.gate.weight", (self.experts, self.hidden)),
                ("mlp.experts.gate_up_proj", (self.experts, *up)),
                ("mlp.experts.down_proj", (self.experts, *down)),
            ]
        return [
            ("mlp.router.weight", (self.experts, self.hidden)),
            ("mlp.router.bias", (self.experts,)),
            ("mlp.experts.gate_up_proj", (self.experts, *up[::-1])),
            ("mlp.experts.gate_up_proj_bias", (self.experts, up[0])),
            ("mlp.experts.down_proj", (self.experts, *down[::-1])),
            ("mlp.experts.down_proj_bias", (self.experts, down[0])),
        ]


_HEAD_DIM = 128
_SMALLEST = 1_000_000

_LLAMA2 = "Llama 2 (arXiv 2307.09288); its published config.json"
_LLAMA3 = "The Llama 3 Herd of Models (arXiv 2407.21783), Table 3; the published config.json of Llama 3"
_QWEN = "Qwen2.5 (arXiv 2412.15115), Table 1; its published config.json"
_LLAMA32 = "the published config.json of Llama 3.2 (2024)"
_QWEN3 = "Qwen3 (arXiv 2505.09388), Table 1; its published config.json"
_MISTRAL = "the published config.json of Mistral 7B v0.3, Mistral Nemo and Mistral Small 24B"
_GEMMA2 = "Gemma 2 (arXiv 2408.00118), Table 1; its published config.json"
_GEMMA3 = "Gemma 3 (arXiv 2503.19786); its published config.json"
_MIXTRAL = "Mixtral of Experts (arXiv 2401.04088), Table 1; its published config.json"
_GPT_OSS = "gpt-oss model card (arXiv 2508.10925), Table 1; its published config.json"
_FLUX = "the published transformer/config.json of FLUX.1 [dev] (2024); images of 1024 x 1024 and texts of 512 tokens"
_SD3 = (
    "the published transformer/config.json of Stable Diffusion 3.5 Large (2024), an MMDiT (arXiv 2403.03206); images "
    "of 1024 x 1024 and texts of 77 tokens for CLIP and 256 for T5"
)
_DOS = (
    "run script of Deep Optimizer States (github.com/DataStates/artifacts, deep-optimizer-states/master-script.sh): "
    "Llama blocks with 4 heads of keys and values; of 50304 tokens, with which the parameters are those its logs count"
)


_dos = partial(LlamaSizes, source=_DOS, kv_heads=4, vocabulary=50304, context=2048)
_llama2 = partial(LlamaSizes, source=_LLAMA2, head_dim=_HEAD_DIM, vocabulary=32000, context=4096)
_llama3 = partial(LlamaSizes, source=_LLAMA3, head_dim=_HEAD_DIM, kv_heads=8, vocabulary=128256, context=8192)
_qwen = partial(LlamaSizes, source=_QWEN, head_dim=_HEAD_DIM, qkv_bias=True)
_tied = partial(_qwen, kv_heads=2, vocabulary=151936, tied=True)
_llama32 = partial(LlamaSizes, source=_LLAMA32, kv_heads=8, vocabulary=128256, context=131072, tied=True)
_qwen3 = partial(
    LlamaSizes, source=_QWEN3, kv_heads=8, head_dim=_HEAD_DIM, vocabulary=151936, context=40960, qk_norm=True
)
_mistral = partial(LlamaSizes, source=_MISTRAL, kv_heads=8, head_dim=_HEAD_DIM)
_mixtral = partial(LlamaSizes, source=_MIXTRAL, kv_heads=8, vocabulary=32000, context=32768, experts=8, chosen=2)
_gpt_oss = partial(
    LlamaSizes, source=_GPT_OSS, kv_heads=8, vocabulary=201088, context=131072, experts=32, chosen=4, biased=True
)
_gemma2 = partial(LlamaSizes, source=_GEMMA2, vocabulary=256000, context=8192, tied=True, sandwich_norms=True)

MODELS: Mapping[str, Sizes] = {
    "dos-7b": _dos(hidden=4096, intermediate=11008, layers=32, heads=32, head_dim=128),
    "dos-8.3b": _dos(hidden=3072, intermediate=11008, layers=72, heads=32, head_dim=96),
    "dos-10b": _dos(hidden=4096, intermediate=12400, layers=50, heads=32, head_dim=128),
    "dos-13b": _dos(hidden=5120, intermediate=13824, layers=40, heads=40, head_dim=128),
    "dos-20b": _dos(hidden=5120, intermediate=20480, layers=40, heads=64, head_dim=80),
    "llama2-7b": _llama2(hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32),
    "llama2-13b": _llama2(hidden=5120, intermediate=13824, layers=40, heads=40, kv_heads=40),
    "llama2-70b": _llama2(hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8),
    "llama3-8b": _llama3(hidden=4096, intermediate=14336, layers=32, heads=32),
    "llama3-70b": _llama3(hidden=8192, intermediate=28672, layers=80, heads=64),
    "llama3.2-1b": _llama32(hidden=2048, intermediate=8192, layers=16, heads=32, head_dim=64),
    "llama3.2-3b": _llama32(hidden=3072, intermediate=8192, layers=28, heads=24, head_dim=_HEAD_DIM),
    "mistral-7b": _mistral(hidden=4096, intermediate=14336, layers=32, heads=32, vocabulary=32768, context=32768),
    "mistral-nemo-12b": _mistral(
        hidden=5120, intermediate=14336, layers=40, heads=32, vocabulary=131072, context=131072
    ),
    "mistral-small-24b": _mistral(
        hidden=5120, intermediate=32768, layers=40, heads=32, vocabulary=131072, context=32768
    ),
    "gemma2-2b": _gemma2(hidden=2304, intermediate=9216, layers=26, heads=8, kv_heads=4, head_dim=256),
    "gemma2-9b": _gemma2(hidden=3584, intermediate=14336, layers=42, heads=16, kv_heads=8, head_dim=256),
    "gemma2-27b": _gemma2(hidden=4608, intermediate=36864, layers=46, heads=32, kv_heads=16, head_dim=128),
    "gemma3-1b": LlamaSizes(
        hidden=1152,
        intermediate=6912,
        layers=26,
        heads=4,
        kv_heads=1,
        head_dim=256,
        vocabulary=262144,
        context=32768,
        tied=True,
        qk_norm=True,
        sandwich_norms=True,
        source=_GEMMA3,
    ),
    "qwen2.5-1.5b": _tied(hidden=1536, intermediate=8960, layers=28, heads=12, context=131072),
    "qwen2.5-3b": _tied(hidden=2048, intermediate=11008, layers=36, heads=16, context=32768),
    "qwen2.5-7b": _qwen(
        hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4, vocabulary=152064, context=131072
    ),
    "qwen2.5-32b": _qwen(
        hidden=5120, intermediate=27648, layers=64, heads=40, kv_heads=8, vocabulary=152064, context=131072
    ),
    "qwen2.5-14b": _qwen(
        hidden=5120, intermediate=13824, layers=48, heads=40, kv_heads=8, vocabulary=152064, context=131072
    ),
    "qwen2.5-72b": _qwen(
        hidden=8192, intermediate=29568, layers=80, heads=64, kv_heads=8, vocabulary=152064, context=131072
    ),
    "qwen3-0.6b": _qwen3(hidden=1024, intermediate=3072, layers=28, heads=16, tied=True),
    "qwen3-1.7b": _qwen3(hidden=2048, intermediate=6144, layers=28, heads=16, tied=True),
    "qwen3-4b": _qwen3(hidden=2560, intermediate=9728, layers=36, heads=32, tied=True),
    "qwen3-8b": _qwen3(hidden=4096, intermediate=12288, layers=36, heads=32),
    "qwen3-14b": _qwen3(hidden=5120, intermediate=17408, layers=40, heads=40),
    "qwen3-32b": _qwen3(hidden=5120, intermediate=25600, layers=64, heads=64),
    "mixtral-8x7b": _mixtral(hidden=4096, intermediate=14336, layers=32, heads=32, head_dim=_HEAD_DIM),
    "qwen3-30b-a3b": _qwen3(hidden=2048, intermediate=768, layers=48, heads=32, kv_heads=4, experts=128, chosen=8),
    "gpt-oss-20b": _gpt_oss(hidden=2880, intermediate=2880, layers=24, heads=64, head_dim=64),
    "flux.1-dev": DiffusionSizes(
        hidden=3072, joint=19, single=38, head_dim=128, pooled=768, text_tokens=512, guidance=True, source=_FLUX
    ),
    "sd3.5-large": DiffusionSizes(
        hidden=2432, joint=38, head_dim=64, pooled=2048, text_tokens=333, convolved=True, source=_SD3
    ),
}
"""Configurations by name, with their source. ``dos-*`` are the models of the Deep Optimizer States paper (Table 2) as
its authors ran them. Their names are nominal: the logs count 5.95, 9.14, 9.92, 11.32 and 15.33 billion parameters."""


def model(name: str, dtype: torch.dtype = BFLOAT16) -> ModelShape:
    """The named model, with weights of ``dtype``.

    Raises:
        ValueError: no model has this name.
    """
    if name not in MODELS:
        raise ValueError(
            f"model={name!r} is not known{nearest(name, MODELS) or '.'} There are {', '.join(MODELS)}; "
            "or pass the path of a config.json, or a number of parameters (--params on the command line)"
        )
    return MODELS[name].shape(name, dtype)


def of_size(numel: int, dtype: torch.dtype = BFLOAT16) -> ModelShape:
    """A Llama-like model of about ``numel`` parameters: within 1%, the one with the depth nearest to Llama's.

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
    return best.shape(f"{numel / 1e9:.3g}b", dtype)


def _sized(hidden: int, numel: int) -> LlamaSizes:
    """Sizes of this width, as deep as ``numel`` allows. Embedding and head get a quarter of a small model at most."""
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
        "source": "shape of Llama 2, sizes chosen for the count",
    }
    per_layer = _count(LlamaSizes(**sizes, layers=1)) - _count(LlamaSizes(**sizes, layers=0))
    return LlamaSizes(**sizes, layers=round((numel - 2 * vocabulary * hidden) / per_layer))


def _count(configuration: LlamaSizes) -> int:
    attention = 2 * configuration.hidden * configuration.head_dim * (configuration.heads + configuration.kv_heads)
    block = attention + 3 * configuration.hidden * configuration.intermediate + 2 * configuration.hidden
    return configuration.layers * block + configuration.hidden * (2 * configuration.vocabulary + 1)


def from_config(path: str | Path, dtype: torch.dtype | None = None) -> ModelShape:
    """The model of a Hugging Face ``config.json``, or of a folder with one.

    Llama, Mistral, Qwen2, Qwen3, GPT-2, and the mixtures of experts Mixtral, Qwen3-MoE and gpt-oss.

    Args:
        dtype: of the weights; None takes the configuration's, or bfloat16 if it has none.

    Raises:
        ValueError: the file cannot be read, describes another kind of model, lacks a key, or has an invalid value.
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
            "its number of parameters; no other mixture of experts can be planned"
        )
    config = _Config(given, printable(file))
    name, weights = printable(file.parent.name or kind), dtype or config.dtype()
    if kind in _EXPERTS:
        return _mixture_of(config, kind).shape(name, weights)
    config.refuse_experts()
    if kind == "gpt2":
        return _gpt2_of(config, name, weights)
    return _llama_of(config, qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3").shape(name, weights)


def _mixture_of(config: _Config, kind: str) -> LlamaSizes:
    """All layers have experts: others are not known here."""
    if config.size("decoder_sparse_step", 1) > 1 or config.given.get("mlp_only_layers"):
        raise ValueError(
            f"{config.file}: decoder_sparse_step and mlp_only_layers must be absent, 1 and []: only models whose "
            "layers all have experts can be planned"
        )
    count, intermediate = _EXPERTS[kind]
    sizes = _llama_of(config, qkv_bias=False, qk_norm=kind == "qwen3_moe", intermediate=intermediate)
    experts, chosen = config.size(count), config.size("num_experts_per_tok")
    if chosen > experts:
        raise ValueError(
            f"{config.file}: num_experts_per_tok={chosen} must be at most {count}={experts}; correct one of them"
        )
    return replace(sizes, experts=experts, chosen=chosen, biased=kind == "gpt_oss")


def _gpt2_of(config: _Config, name: str, dtype: torch.dtype) -> ModelShape:
    """GPT-2: weights ``[in, out]``, biases everywhere, learned positions."""
    hidden = config.size("n_embd")
    config.divisor("n_head", 1, of="n_embd")
    inner, layers = config.size("n_inner", 4 * hidden), config.size("n_layer")
    vocabulary, context = config.size("vocab_size"), config.size("n_positions")
    tied = config.flag("tie_word_embeddings", default=True)
    block: list[NamedShape] = [
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
    params = [
        ("wte.weight", (vocabulary, hidden)),
        ("wpe.weight", (context, hidden)),
        *((f"h.{i}.{part}", shape) for i in range(layers) for part, shape in block),
        ("ln_f.weight", (hidden,)),
        ("ln_f.bias", (hidden,)),
        *([] if tied else [("lm_head.weight", (vocabulary, hidden))]),
    ]
    return ModelShape(
        name=name,
        params=specs_of(params, dtype),
        layers=layers,
        hidden=hidden,
        context=context,
        embeddings=("wte.weight", "wpe.weight"),
        tied="wte.weight" if tied else None,
        source=config.file,
    )


def _llama_of(config: _Config, *, qkv_bias: bool, qk_norm: bool, intermediate: str = "intermediate_size") -> LlamaSizes:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.given.get("head_dim") is None:
        config.divisor("num_attention_heads", heads, of="hidden_size")
    return LlamaSizes(
        hidden=hidden,
        intermediate=config.size(intermediate),
        layers=config.size("num_hidden_layers"),
        heads=heads,
        kv_heads=config.divisor("num_key_value_heads", heads, of="num_attention_heads"),
        vocabulary=config.size("vocab_size"),
        context=config.size("max_position_embeddings"),
        head_dim=config.size("head_dim", hidden // heads),
        tied=config.flag("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        source=config.file,
    )


_EXPERTS = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
}
"""The keys of a layer's number of experts, and of their width."""
_KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt2", *_EXPERTS)
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
        """The dtype of the weights."""
        key = next((key for key in _DTYPE_KEYS if self.given.get(key) is not None), None)
        if key is None:
            return BFLOAT16
        value = self.given[key]
        if not isinstance(value, str) or value not in _DTYPES:
            raise ValueError(
                f"{self.file}: {key}={value!r} must be one of {', '.join(_DTYPES)}; correct it, or pass the dtype"
            )
        return _DTYPES[value]

    def refuse_experts(self) -> None:
        """Refuse a mixture of experts under the name of a dense model."""
        for key in _EXPERT_KEYS:
            if (value := self.given.get(key)) not in (None, 0, 1):
                raise ValueError(
                    f"{self.file}: {key}={value!r} must be absent: a mixture of experts cannot be planned; "
                    "plan a dense model"
                )
