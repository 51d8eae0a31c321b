"""Reads the shapes of a model from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zenflow_compile.checks.printable import printable
from zenflow_compile.checks.validate import check_flag, check_integer
from zenflow_compile.performance.model_shapes import LlamaSizes, ModelShape, NamedShape, specs_of
from zenflow_compile.planning.dtypes import BFLOAT16, FLOAT16, FLOAT32

if TYPE_CHECKING:
    import torch


def from_config(path: str | Path, dtype: torch.dtype | None = None) -> ModelShape:
    """The model of a Hugging Face ``config.json``, or of a folder with one: Llama, Mistral, Qwen2, Qwen3 or GPT-2.

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
            "its number of parameters; a mixture of experts cannot be planned"
        )
    config = _Config(given, printable(file))
    config.refuse_experts()
    name, weights = printable(file.parent.name or kind), dtype or config.dtype()
    if kind == "gpt2":
        return _gpt2_of(config, name, weights)
    return _llama_of(config, qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3").shape(name, weights)


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


def _llama_of(config: _Config, *, qkv_bias: bool, qk_norm: bool) -> LlamaSizes:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.given.get("head_dim") is None:
        config.divisor("num_attention_heads", heads, of="hidden_size")
    return LlamaSizes(
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
        qk_norm=qk_norm,
        source=config.file,
    )


_KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
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
        """Refuse a mixture of experts: the experts of a token are not known."""
        for key in _EXPERT_KEYS:
            if (value := self.given.get(key)) not in (None, 0, 1):
                raise ValueError(
                    f"{self.file}: {key}={value!r} must be absent: a mixture of experts cannot be planned; "
                    "plan a dense model"
                )
