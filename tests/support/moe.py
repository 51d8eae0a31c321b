"""Mixture-of-experts models of transformers, which keep all experts of a layer in one stacked parameter.

Random weights, two layers. ``gate_up_proj`` is ``[experts, out, in]``, in Llama 4 and gpt-oss ``[experts, in, out]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, CONTEXT, WIDTH, INNER, EXPERTS = 48, 12, 32, 48, 4
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "attn_implementation": "sdpa",
}  # fmt: skip
_LOCAL: dict[str, Any] = {**_SHARED, "intermediate_size": INNER, "num_local_experts": EXPERTS}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_LOCAL, num_experts_per_tok=2))


def qwen3() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_SHARED, head_dim=16, intermediate_size=INNER, moe_intermediate_size=40, num_experts=2 * EXPERTS,
        num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def llama4() -> nn.Module:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **_LOCAL, head_dim=16, intermediate_size_mlp=INNER, num_experts_per_tok=1, interleave_moe_layer_step=1,
        no_rope_layers=[1, 1], attention_chunk_size=CONTEXT,
    )  # fmt: skip
    return Llama4ForCausalLM(config)


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = {**_LOCAL, "attn_implementation": "eager"}  # its attention sinks have no other one
    return GptOssForCausalLM(
        GptOssConfig(**config, head_dim=16, num_experts_per_tok=2, sliding_window=8, rope_parameters=rope)
    )


def granite() -> nn.Module:
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    return GraniteMoeForCausalLM(GraniteMoeConfig(**_LOCAL, num_experts_per_tok=2))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "mixtral": mixtral, "qwen3": qwen3, "llama4": llama4, "gpt_oss": gpt_oss, "granite": granite,
}  # fmt: skip


def built(family: str) -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(1)
    return FAMILIES[family]()


def tokens(step: int) -> Tensor:
    """``int64[2, CONTEXT]``: so few that some experts get none."""
    return torch.randint(0, VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(step))


def loss_of(call: Callable[..., Any], step: int) -> Tensor:
    ids = tokens(step)
    loss: Tensor = call(input_ids=ids, labels=ids, use_cache=False).loss
    return loss
