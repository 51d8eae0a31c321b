"""Named models, each with the source of its sizes, and models of which only the number of parameters is known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from zenflow_compile.checks.validate import check_integer, nearest
from zenflow_compile.performance.model_shapes import LlamaSizes, ModelShape
from zenflow_compile.planning.dtypes import BFLOAT16

if TYPE_CHECKING:
    import torch

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
_gemma2 = partial(LlamaSizes, source=_GEMMA2, vocabulary=256000, context=8192, tied=True, sandwich_norms=True)

MODELS: Mapping[str, LlamaSizes] = {
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
