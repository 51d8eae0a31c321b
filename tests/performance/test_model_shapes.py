"""Shapes and counts of named models, of configurations, and of models that only have a size."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zenflow_compile.performance.model_shape import flops_per_token
from zenflow_compile.performance.models import MODELS, from_config, model, of_size
from zenflow_compile.planning.dtypes import BFLOAT16, FLOAT16, FLOAT32
from zenflow_compile.planning.model_blocks import repeated_blocks

# Exact where the weights are published, else as the logs of Deep Optimizer States round them.
PUBLISHED = {
    "dos-7b": 5.95e9,
    "dos-8.3b": 9.14e9,
    "dos-10b": 9.92e9,
    "dos-13b": 11.32e9,
    "dos-20b": 15.33e9,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "flux.1-dev": 11_901_408_320,
    "sd3.5-large": 8_056_627_520,
}

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
MIXTURES = {
    "mixtral-8x7b": LLAMA
    | {"model_type": "mixtral", "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 32768}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-30b-a3b": LLAMA
    | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
    | {"num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    | {"max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": []},
    "gpt-oss-20b": LLAMA
    | {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
    | {"max_position_embeddings": 131072, "num_local_experts": 32, "num_experts_per_tok": 4},
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}


def written(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", list(MODELS))
def test_parameter_counts_are_as_published(name: str) -> None:
    tolerance = 1e-3 if name.startswith("dos") else 0.0
    assert model(name).numel == pytest.approx(PUBLISHED[name], rel=tolerance)


DIFFUSION = ("flux.1-dev", "sd3.5-large")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in DIFFUSION])
def test_layers_are_the_repeated_blocks(name: str) -> None:
    shape = model(name)
    found = repeated_blocks([spec.shape for spec in shape.params])
    assert found is not None
    start, period, stop = found
    assert (stop - start) // period == shape.layers
    assert start == 1
    assert shape.source


def test_weights_have_the_requested_dtype() -> None:
    assert {str(spec.dtype) for spec in model("qwen2.5-1.5b").params} == {"torch.bfloat16"}
    assert {str(spec.dtype) for spec in model("qwen2.5-1.5b", FLOAT32).params} == {"torch.float32"}


def test_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="model='llama-2-7b' is not known; did you mean \"llama2-7b\""):
        model("llama-2-7b")


# FLOPs.


def test_flops_are_six_per_weight_and_twelve_per_score() -> None:
    """Llama-2-7B: 6 x (6738415616 - 32000 x 4096 looked up - 65 norms of 4096) + 12 x 32 x 4096 x context."""
    shape = model("llama2-7b")
    weights = 6_738_415_616 - 32000 * 4096 - 65 * 4096
    assert flops_per_token(shape, 0) == 6 * weights
    assert flops_per_token(shape, 2048) - flops_per_token(shape, 0) == 12 * 32 * 4096 * 2048
    assert flops_per_token(shape) == flops_per_token(shape, 4096)


def test_tied_embedding_counts_as_the_head() -> None:
    shape = model("qwen2.5-3b")
    assert flops_per_token(shape, 0) == 6 * sum(spec.numel for spec in shape.params if len(spec.shape) == 2)


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("gpt-oss-20b", 3.6)])
def test_token_does_the_work_of_its_experts(name: str, billions: float) -> None:
    """As published: active parameters, with the embedding but for gpt-oss."""
    shape = model(name)
    embedding = 0 if name == "gpt-oss-20b" else shape.params[0].numel
    assert (flops_per_token(shape, 0) / 6 + embedding) / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_those_of_transformers(name: str) -> None:
    """Names and shapes of a layer, in any order."""
    transformers = pytest.importorskip("transformers")
    given = {**MIXTURES[name], "num_hidden_layers": 1}
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**given))
    layer = "layers.0."
    found = {each: tuple(param.shape) for each, param in theirs.model.named_parameters() if each.startswith(layer)}
    assert found == {spec.name: spec.shape for spec in model(name).params if spec.name.startswith(layer)}


@pytest.mark.parametrize("name", DIFFUSION)
def test_work_of_an_image(name: str) -> None:
    """One pass of an image and its text, added up stream by stream."""
    shape, work = model(name), 0.0
    width, image = shape.hidden, 4096
    text = shape.context - image
    for spec in shape.params:
        if len(spec.shape) < 2:
            continue
        if spec.name.startswith("single"):
            tokens = 1 if ".norm." in spec.name else image + text
        elif spec.name.startswith("transformer_blocks"):
            of_text = "_context" in spec.name or "add_" in spec.name
            tokens = 1 if ".norm1" in spec.name else text if of_text else image
        else:
            tokens = {"context_embedder": text, "x_embedder": image, "pos_embed": image, "proj_out": image}.get(
                spec.name.split(".")[0], 1
            )
        work += 2 * spec.numel * tokens
    assert flops_per_token(shape, 0) * shape.context / 3 == pytest.approx(work, rel=1e-9)
    attention = (flops_per_token(shape) - flops_per_token(shape, 0)) * shape.context / 3
    assert attention == 4 * shape.layers * width * (image + text) ** 2


# Configurations.


@pytest.mark.parametrize("name", MIXTURES)
def test_a_configuration_with_experts(name: str, tmp_path: Path) -> None:
    shape, named = from_config(written(tmp_path, MIXTURES[name])), model(name)
    assert [(spec.name, spec.shape) for spec in shape.params] == [(spec.name, spec.shape) for spec in named.params]
    assert (shape.shares, shape.context, shape.hidden) == (named.shares, named.context, named.hidden)


def test_a_llama_configuration(tmp_path: Path) -> None:
    shape = from_config(written(tmp_path, LLAMA))
    assert [spec.shape for spec in shape.params] == [spec.shape for spec in model("llama2-7b").params]
    assert (shape.layers, shape.hidden, shape.context) == (32, 4096, 4096)
    assert from_config(tmp_path) == shape


def test_grouped_heads_tied_embeddings_and_biases(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "num_hidden_layers": 36}
    changes = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": True}
    shape = from_config(written(tmp_path, LLAMA | sizes | changes))
    assert shape.numel == PUBLISHED["qwen2.5-3b"]
    assert [spec.shape for spec in shape.params] == [spec.shape for spec in model("qwen2.5-3b").params]


def test_heads_may_be_wider_than_the_model(tmp_path: Path) -> None:
    shape = from_config(written(tmp_path, LLAMA | {"model_type": "mistral", "head_dim": 256}))
    assert shape.params[1].shape == (32 * 256, 4096)
    assert shape.hidden == 32 * 256


def test_a_gpt2_configuration(tmp_path: Path) -> None:
    shape = from_config(written(tmp_path, GPT2 | {"n_inner": None}))
    assert shape.numel == 124_439_808
    assert (shape.layers, shape.hidden, shape.context) == (12, 768, 1024)
    assert flops_per_token(shape, 0) == 6 * (124_439_808 - 1024 * 768 - 121_344)  # positions, vectors


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_missing_key_is_named(config: dict[str, Any], tmp_path: Path) -> None:
    for key in set(config) - {"model_type", "n_head"}:
        path = written(tmp_path, {name: value for name, value in config.items() if name != key})
        with pytest.raises(ValueError, match=f'config.json has no "{key}", which a {config["model_type"]} conf'):
            from_config(path)


@pytest.mark.parametrize("value", [0, -1, 2.5, "many"])
def test_invalid_size_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json: vocab_size=.* must be an integer >= 1"):
        from_config(written(tmp_path, LLAMA | {"vocab_size": value}))


@pytest.mark.parametrize("config", [LLAMA | {"model_type": "deepseek_v3"}, {}, []], ids=str)
def test_other_model_types_are_refused(config: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model_type=.* must be one of llama, mistral, qwen2, qwen3, gpt2"):
        from_config(written(tmp_path, config))


def test_unreadable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.json cannot be read: .*; give the path of a config.json"):
        from_config(tmp_path / "nowhere.json")
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(ValueError, match="cannot be read"):
        from_config(tmp_path)


def test_gpt2_configuration_with_untied_head(tmp_path: Path) -> None:
    shape = from_config(written(tmp_path, GPT2 | {"tie_word_embeddings": False}))
    assert shape.numel == 124_439_808 + 50257 * 768
    assert flops_per_token(shape, 0) == 6 * (124_439_808 - 1024 * 768 - 121_344)
    assert shape.tied is None


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("value", "dtype"), [("float32", FLOAT32), ("bfloat16", BFLOAT16), ("float16", FLOAT16), (None, BFLOAT16)]
)
def test_weights_have_the_configurations_dtype(key: str, value: str | None, dtype: Any, tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA | {key: value})
    assert {spec.dtype for spec in from_config(path).params} == {dtype}
    assert {spec.dtype for spec in from_config(path, dtype=FLOAT16).params} == {FLOAT16}


@pytest.mark.parametrize("value", ["auto", "float8_e4m3fn", 16])
def test_other_dtypes_are_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json: torch_dtype=.* must be one of float32, bfloat16, float16"):
        from_config(written(tmp_path, LLAMA | {"torch_dtype": value}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"num_attention_heads": 8192}, "num_attention_heads=8192 must be a divisor of hidden_size=4096"),
        (LLAMA | {"num_attention_heads": 24}, "num_attention_heads=24 must be a divisor of hidden_size=4096"),
        (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads=5 must be a divisor of num_attention_heads=32"),
        (LLAMA | {"num_key_value_heads": 64}, "num_key_value_heads=64 must be a divisor of num_attention_heads=32"),
        (LLAMA | {"head_dim": -64}, "head_dim=-64 must be an integer >= 1"),
        (LLAMA | {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be True or False"),
        (
            LLAMA | {"num_local_experts": 8},
            "num_local_experts=8 must be absent: a mixture of experts cannot be planned",
        ),
        (LLAMA | {"model_type": "jamba", "num_experts": 8}, "model_type='jamba' .*; no other mixture of experts"),
        (
            MIXTURES["mixtral-8x7b"] | {"num_experts_per_tok": 9},
            "num_experts_per_tok=9 must be at most num_local_experts=8",
        ),
        (
            MIXTURES["qwen3-30b-a3b"] | {"decoder_sparse_step": 2},
            "decoder_sparse_step and mlp_only_layers must be absent",
        ),
        (GPT2 | {"n_head": 7}, "n_head=7 must be a divisor of n_embd=768"),
        (GPT2 | {"n_inner": 0}, "n_inner=0 must be an integer >= 1"),
    ],
)
def test_invalid_configuration_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(written(tmp_path, config))


def test_embeddings_are_parameters() -> None:
    shape = model("qwen2.5-1.5b")
    assert (shape.embeddings, shape.tied) == (("embed_tokens.weight",), "embed_tokens.weight")
    with pytest.raises(ValueError, match=r"embeddings=\['wte'\] of 'qwen2.5-1.5b' must be names of its params"):
        replace(shape, embeddings=("wte",), tied=None)
    with pytest.raises(ValueError, match=r"tied='norm.weight' of 'qwen2.5-1.5b' must be one of its embeddings"):
        replace(shape, tied="norm.weight")


# Sizes.


@pytest.mark.parametrize("numel", [1_000_000, 20_000_000, 125_000_000, 1_000_000_000, 7 * 10**9, 70 * 10**9, 10**12])
def test_model_of_a_size_has_about_that_size(numel: int) -> None:
    shape = of_size(numel)
    assert shape.numel == pytest.approx(numel, rel=0.05 if numel < 10**8 else 0.01)
    assert repeated_blocks([spec.shape for spec in shape.params]) is not None


def test_model_of_llamas_size_has_about_its_shape() -> None:
    shape = of_size(6_738_415_616)
    assert math.log2(shape.hidden / 4096) == pytest.approx(0.0, abs=0.1)
    assert shape.layers == pytest.approx(32, abs=3)


def test_model_below_a_million_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"params=1000 must be an integer >= 1000000; plan a smaller model by its"):
        of_size(1000)
