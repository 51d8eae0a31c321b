"""Models, data and cases of the comparisons."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from benchmarks.systems.case import Case
from benchmarks.systems.llama import Llama
from benchmarks.systems.workloads import BATCHES, WORKLOADS


def test_gpt_has_a_hundred_million_parameters() -> None:
    with torch.device("meta"):
        assert sum(param.numel() for param in WORKLOADS["gpt"].build().parameters()) >= 100_000_000


@pytest.mark.parametrize(("name", "billions"), [("qwen2.5-3b", 3.09), ("llama-3b-32k", 2.91), ("llama-1b", 1.04)])
def test_sizes_of_the_language_models(name: str, billions: float) -> None:
    with torch.device("meta"):
        parameters = {id(param): param.numel() for param in WORKLOADS[name].build().parameters()}
    assert sum(parameters.values()) / 1e9 == pytest.approx(billions, abs=0.01)


def test_batches_depend_on_the_seed_only() -> None:
    def batches(seed: int) -> list[tuple[torch.Tensor, ...]]:
        return WORKLOADS["tiny"].batches(seed, torch.float32, torch.device("cpu"))

    first, again, other = batches(0), batches(0), batches(1)
    assert len(first) == BATCHES
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    assert not torch.equal(first[0][0], first[1][0])


def test_tokens_become_sequences() -> None:
    assert WORKLOADS["qwen2.5-3b"].with_tokens(16384).rows == 4
    short = WORKLOADS["llama-tiny"].with_tokens(16)
    assert (short.rows, short.context) == (1, 16)
    with pytest.raises(ValueError, match="tokens=5000 must be a multiple of the 4096"):
        WORKLOADS["qwen2.5-3b"].with_tokens(5000)
    with pytest.raises(ValueError, match="tokens=8 has no meaning"):
        WORKLOADS["tiny"].with_tokens(8)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_llama_equals_that_of_transformers(tied: bool) -> None:
    """The loss, in parts of the tokens and with recomputation, and the gradients of all weights."""
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    config = WORKLOADS["llama-tiny"].llama
    assert config is not None
    torch.manual_seed(0)
    model = Llama(replace(config, tied=tied, bias=True, head_tokens=24))
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_value_heads,
            tie_word_embeddings=tied,
            attention_bias=True,
        )
    )
    names = [("embedding.", "model.embed_tokens."), ("blocks.", "model.layers."), ("head.", "lm_head.")]
    names += [("attention_norm.", "input_layernorm."), ("feed_forward_norm.", "post_attention_layernorm.")]
    names += [(f"{each}_proj.", f"mlp.{each}_proj.") for each in ("gate", "up", "down")]
    names += [("attention.", "self_attn.")]

    def name_of(name: str) -> str:
        for ours, other in names:
            name = re.sub(rf"(^|\.){re.escape(ours)}", rf"\g<1>{other}", name)
        return re.sub(r"^norm\.", "model.norm.", name)

    theirs.load_state_dict({name_of(name): value for name, value in model.state_dict().items()})
    tokens, targets = WORKLOADS["llama-tiny"].batches(0, torch.float32, torch.device("cpu"))[0]
    loss = model(tokens, targets)
    expected = functional.cross_entropy(theirs(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    gradients = {name: param.grad for name, param in theirs.named_parameters()}
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, gradients[name_of(name)])


def test_case_survives_its_command_line() -> None:
    case = Case(system="zenflow", model="tiny", cores=(0, 1), clip=1.0, options={"device_share": 0.5})
    assert Case.from_json(case.to_json()) == case


@pytest.mark.parametrize(("name", "value"), [("system", "zenflw"), ("model", "gtp"), ("dtype", "fp8")])
def test_unknown_values_of_a_case_are_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{value}' must be one of"):
        Case(**{"system": "zenflow", "model": "tiny", name: value})
