"""DeepSpeed's JSON becomes keywords; some keys have no counterpart, and some are refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zenflow_compile as zf
from zenflow_compile.backend import split_backend_options
from zenflow_compile.options.deepspeed import read_deepspeed_config
from zenflow_compile.options.options import Options

# What DeepSpeed's ZenFlow tutorial recommends.
TUTORIAL: dict[str, dict[str, Any]] = {
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zenflow": {
            "topk_ratio": 0.05,
            "select_strategy": "auto",
            "select_interval": "auto",
            "update_interval": 4,
            "full_warm_up_rounds": 0,
            "overlap_step": True,
        },
    },
}


def adam(**optimizer: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", **optimizer}}


def read_quietly(config: Any) -> dict[str, Any]:
    """Reads a configuration in which nothing may be ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read_deepspeed_config(config)


def test_tutorial_carries_over() -> None:
    with pytest.warns(UserWarning, match=r"ignored.*: zero_optimization\.stage, .*\.pin_memory$"):
        keywords = read_deepspeed_config(TUTORIAL)
    zenflow = {**TUTORIAL["zero_optimization"]["zenflow"]}
    del zenflow["select_strategy"]
    assert keywords == {"policy": "zenflow", **zenflow}
    options = Options.from_keywords(**keywords)
    assert options.topk_ratio == 0.05
    assert options.resolved_select_interval() == 16


def test_file_and_dict_read_the_same(tmp_path: Path) -> None:
    config = {
        **TUTORIAL,
        **adam(params={"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}),
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 8,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "train_batch_size": 32,
    }
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="ignored") as caught:
        keywords = read_deepspeed_config(file)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith(str(file))
    assert "bf16 is not read: weights and activations keep the model's dtype; use torch.autocast" in message
    pinned = "zero_optimization.offload_optimizer.pin_memory"
    assert f"no effect here: zero_optimization.stage, {pinned}, train_batch_size" in message
    assert "fp16" not in message
    assert keywords["lr"] == 2e-5
    assert keywords["betas"] == (0.9, 0.95)
    assert keywords["eps"] == 1e-6
    assert keywords["weight_decay"] == 0.1
    assert keywords["max_grad_norm"] == 1.0
    assert keywords["gradient_accumulation_steps"] == 8
    with pytest.warns(UserWarning, match=r"the DeepSpeed configuration: .*ignored"):
        assert read_deepspeed_config(config) == keywords
    with pytest.warns(UserWarning, match="ignored"):
        assert read_deepspeed_config(str(file)) == keywords


@pytest.mark.parametrize(
    ("zero", "policy"),
    [
        ({}, "resident"),
        ({"offload_optimizer": {"device": "none"}}, "resident"),
        ({"offload_optimizer": None}, "resident"),
        ({"offload_optimizer": {"device": "cpu"}}, "zero_offload"),
        ({"cpu_offload": True}, "zero_offload"),
        ({"cpu_offload": False}, "resident"),
        ({"offload_optimizer": {"device": "cpu"}, "zenflow": None}, "zero_offload"),
        ({"offload_optimizer": {"device": "cpu"}, "zenflow": {}}, "zenflow"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 1.0}}, "zero_offload"),
        ({"offload_optimizer": {"device": "cpu", "ratio": "auto"}}, "zero_offload"),
        ({"offload_optimizer": {"device": "nvme"}}, "zero_infinity"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": None}}, "zero_infinity"),
    ],
)
def test_policy_follows_the_offload_blocks(zero: dict[str, Any], policy: str) -> None:
    assert read_quietly({"zero_optimization": zero}) == {"policy": policy}


@pytest.mark.parametrize(
    ("zero", "keywords"),
    [
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.3}}, {"policy": "twinflow", "ratio": 0.3}),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0}}, {"policy": "twinflow", "ratio": 0}),
        (
            {"offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"}},
            {"policy": "zero_infinity", "nvme_path": "/scratch"},
        ),
        (
            {"offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"}, "zenflow": {"topk_ratio": 0.05}},
            {"policy": "zenflow", "offload_device": "nvme", "nvme_path": "/scratch", "topk_ratio": 0.05},
        ),
        ({"sub_group_size": "auto"}, {"policy": "resident"}),
    ],
)
def test_place_of_state_carries_over(zero: dict[str, Any], keywords: dict[str, Any]) -> None:
    found = read_quietly({"zero_optimization": zero})
    assert found == keywords
    options = Options.from_keywords(**found)
    assert {name: getattr(options, name) for name in keywords} == keywords


@pytest.mark.parametrize(
    ("zero", "ignored"),
    [
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.3}, "zenflow": {}}, "ratio"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/scratch", "ratio": 0.3}}, "ratio"),
        ({"offload_optimizer": {"device": "cpu", "nvme_path": "/scratch"}}, "nvme_path"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/scratch", "buffer_count": 4}}, "buffer_count"),
    ],
)
def test_unused_device_settings_are_listed(zero: dict[str, Any], ignored: str) -> None:
    with pytest.warns(UserWarning, match=rf"no effect here: zero_optimization\.offload_optimizer\.{ignored}$"):
        assert ignored not in read_deepspeed_config({"zero_optimization": zero})


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"offload_optimizer": {"device": "cpu", "ratio": 1.5}}, r"ratio=1\.5 must be"),
        ({"offload_optimizer": {"device": "cpu", "ratio": "half"}}, "ratio='half' must be"),
        ({"offload_optimizer": {"device": "nvme"}}, "nvme_path=None must be a directory"),
        ({"offload_optimizer": {"device": "nvme"}, "zenflow": {}}, "nvme_path=None must be a directory"),
    ],
)
def test_out_of_range_value_is_named_at_use(zero: dict[str, Any], message: str) -> None:
    keywords = read_quietly({"zero_optimization": zero})
    with pytest.raises((ValueError, TypeError), match=message):
        Options.from_keywords(**keywords)


def test_blanks_for_another_program_are_left_out() -> None:
    config = {
        "zero_optimization": {"zenflow": {"topk_ratio": "auto", "overlap_step": "auto", "update_interval": "auto"}},
        "gradient_accumulation_steps": "auto",
    }
    assert read_quietly(config) == {"policy": "zenflow", "update_interval": "auto"}
    assert read_quietly({"gradient_clipping": 0.0}) == {"policy": "resident"}


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
def test_auto_of_the_optimizer_needs_a_value(name: str) -> None:
    config = adam(params={"lr": 1e-4, "weight_decay": 0.1, name: "auto"})
    message = rf'optimizer\.params\.{name}="auto" in the DeepSpeed configuration .*pass {name}= with the file'
    with pytest.raises(ValueError, match=message):
        read_deepspeed_config(config)
    with pytest.raises(ValueError, match=message):
        split_backend_options({"config": config})
    value = (0.8, 0.9) if name == "betas" else 0.25
    assert read_deepspeed_config(config, **{name: value})[name] == value
    found = split_backend_options({"config": config, name: value}).optimizer
    assert found is not None
    assert found[name] == value


@pytest.mark.parametrize(
    ("device", "found"),
    [
        ("none", {}),
        ("cpu", {"offload_weights": 1.0}),
        ("nvme", {"offload_weights": 1.0, "offload_device": "nvme_all"}),
    ],
)
def test_offload_param_is_read(device: str, found: dict[str, Any], tmp_path: Path) -> None:
    path = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_optimizer": path, "offload_param": {**path, "device": device, "pin_memory": False}}
    keywords = read_quietly({"zero_optimization": zero})
    assert keywords == {"policy": "zero_infinity", "nvme_path": str(tmp_path), **found}
    assert Options.from_keywords(**keywords).weights_in_files == (device == "nvme")


@pytest.mark.parametrize(
    ("offload", "found"),
    [
        ({"prefetch_optimizer": True, "prefetch_optimizer_gap": 2, "ratio": 0.8}, {"ratio": 0.8, "update_stride": 2}),
        ({"prefetch_optimizer": 1, "prefetch_optimizer_gap": 0}, {"update_stride": "auto"}),
        ({"prefetch_optimizer": False, "prefetch_optimizer_gap": 0, "ratio": 0.5}, None),
    ],
)
def test_prefetched_subgroups_are_deep_optimizer_states(offload: dict[str, Any], found: dict[str, Any] | None) -> None:
    """The keys of the paper's authors."""
    expected = {"policy": "twinflow", "ratio": 0.5} if found is None else {"policy": "deep_optimizer_states", **found}
    keywords = read_quietly({"zero_optimization": {"offload_optimizer": {"device": "cpu", **offload}}})
    assert keywords == expected
    Options.from_keywords(**keywords)
    zenflow = {"zenflow": {}, "offload_optimizer": {"device": "cpu", "prefetch_optimizer": True}}
    with pytest.warns(UserWarning, match=r"no effect here: zero_optimization\.offload_optimizer\.prefetch_optimizer"):
        assert read_deepspeed_config({"zero_optimization": zenflow})["policy"] == "zenflow"
    wrong = {"device": "cpu", "prefetch_optimizer": True, "prefetch_optimizer_gap": -1}
    with pytest.raises(ValueError, match=r"prefetch_optimizer_gap=-1"):
        read_deepspeed_config({"zero_optimization": {"offload_optimizer": wrong}})


def test_optimizer_reads_a_file_for_what_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    numbers = {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": "auto"}
    file.write_text(json.dumps({**TUTORIAL, **adam(params=numbers), "gradient_clipping": 1.0}))
    with pytest.warns(UserWarning, match="ignored"):
        optimizer = zf.ZenFlowAdamW(
            [nn.Parameter(torch.ones(4, 4))], eps=1e-8, weight_decay=0.1, topk_ratio=0.2, config=file
        )
    (group,) = optimizer.param_groups
    found = {name: group[name] for name in ("lr", "betas", "weight_decay")}
    assert found == {"lr": 2e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}
    assert group["eps"] == 1e-8
    assert (optimizer.options.topk_ratio, optimizer.options.max_grad_norm) == (0.2, 1.0)
    with pytest.raises(ValueError, match='weight_decay="auto"'):
        zf.ZenFlowAdamW([nn.Parameter(torch.ones(4, 4))], config=str(file))
    with pytest.raises(FileNotFoundError, match="there is no such DeepSpeed configuration file"):
        zf.ZenFlowAdamW([nn.Parameter(torch.ones(4, 4))], config="nowhere.json")
    assert zf.read_deepspeed_config is read_deepspeed_config


def test_offload_param_needs_the_same_directory() -> None:
    blocks = {f"offload_{name}": {"device": "nvme", "nvme_path": name} for name in ("optimizer", "param")}
    with pytest.raises(ValueError, match=r"nvme_path='param' .*must be one directory"):
        read_deepspeed_config({"zero_optimization": blocks})
    with pytest.raises(ValueError, match=r"offload_param\.device='gds'.*use \"cpu\""):
        read_deepspeed_config({"zero_optimization": {"offload_param": {"device": "gds"}}})


@pytest.mark.parametrize("zero", [{"zenflow": {}, "offload_optimizer": {"device": "cpu"}}, {}])
def test_weights_in_files_need_state_in_files(zero: dict[str, Any]) -> None:
    config = {"zero_optimization": {**zero, "offload_param": {"device": "nvme", "nvme_path": "/scratch"}}}
    message = (
        r'offload_param\.device="nvme" in .* needs offload_optimizer\.device="nvme".*or offload_param\.device="cpu"'
    )
    with pytest.raises(ValueError, match=message):
        read_deepspeed_config(config)
    assert Options(**read_deepspeed_config(config, policy="zero_infinity")).weights_in_files


def test_keywords_replace_those_of_the_file() -> None:
    config = {**adam(params={"lr": 1e-4}), "gradient_clipping": "auto"}
    assert read_quietly_with(config, lr=1e-3, max_grad_norm=2.0) == {
        "policy": "resident", "lr": 1e-3, "weight_decay": 0.0, "max_grad_norm": 2.0,
    }  # fmt: skip


def read_quietly_with(config: Any, **keywords: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read_deepspeed_config(config, **keywords)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, r"scheduler is not read: the learning rate stays as it is"),
        ({"fp16": {"enabled": True}}, r"fp16 is not read: .*torch\.amp\.GradScaler"),
        ({"bf16": {"enabled": True}}, r"bf16 is not read: .*torch\.bfloat16"),
        ({"gradient_clipping": "auto"}, r"gradients are not clipped unless max_grad_norm is passed"),
        ({"zero_optimization": {"sub_group_size": 1e9}}, r"sub_group_size is not read: update_stride decides"),
    ],
)
def test_ignored_sections_have_sentences(config: dict[str, Any], sentence: str) -> None:
    with pytest.warns(UserWarning, match=sentence) as caught:
        read_deepspeed_config({**config, "steps_per_print": 3})
    assert "no effect here: steps_per_print" in str(caught[0].message)


def test_warning_names_the_users_line(tmp_path: Path) -> None:
    """The reader is called directly, and through the compile backend, many frames of Dynamo's away."""
    config = {"steps_per_print": 3, **adam(params={"lr": 1e-3})}
    with pytest.warns(UserWarning, match="steps_per_print") as caught:
        read_deepspeed_config(config)
    model = torch.nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="steps_per_print") as compiled:
        torch.compile(model, backend="zenflow", options={"inner": "eager", "config": config})(torch.ones(1, 4))
    assert [each.filename for each in (*caught, *compiled)] == [__file__] * 2


def test_missing_weight_decay_is_zero() -> None:
    assert read_quietly(adam(params={"lr": 1e-4}))["weight_decay"] == 0.0
    assert "weight_decay" not in read_quietly({})


@pytest.mark.parametrize(
    ("zenflow", "found"),
    [
        ({"select_strategy": "step", "select_interval": 8}, {"select_interval": 8}),
        ({"select_strategy": "epoch", "select_interval": 2, "steps_per_epoch": 50}, {"select_interval": 100}),
        ({"select_strategy": "auto", "steps_per_epoch": 50}, {}),
        ({"offload": False, "pt_reserved_cores_perc": 0.25}, {"workers": 0.75}),
        ({"pt_reserved_cores_perc": "auto", "steps_per_epoch": "auto"}, {}),
    ],
)
def test_names_of_deepspeed_alone_are_translated(zenflow: dict[str, Any], found: dict[str, Any]) -> None:
    keywords = read_quietly({"zero_optimization": {"zenflow": zenflow}})
    assert keywords == {"policy": "zenflow", **found}
    Options.from_keywords(**keywords)


@pytest.mark.parametrize(
    ("zenflow", "message"),
    [
        ({"select_interval": 8}, 'select_interval=8 in .* has no unit under select_strategy="auto"; write "step"'),
        ({"select_strategy": "step"}, 'select_interval="auto" in .*"step" must be an integer'),
        ({"select_strategy": "epoch"}, 'select_interval="auto" in .*"epoch" must be an integer'),
        ({"select_strategy": "epoch", "select_interval": 1}, r"steps_per_epoch is missing.*1 \* len\(loader\)"),
        ({"select_strategy": "epoch", "select_interval": 0, "steps_per_epoch": 4}, "select_interval=0 must be"),
        ({"select_strategy": "steps"}, "block of .*select_strategy='steps' is not one of .*\"step\""),
        (
            {"select_strategy": "step", "select_interval": 4, "steps_per_epoch": 0},
            "block of .*: steps_per_epoch=0 must",
        ),
        ({"offload": True}, "offload=True in .* is not supported in this version.*topk_ratio"),
        ({"pt_reserved_cores_perc": 50}, "pt_reserved_cores_perc=50 must be a number"),
    ],
)
def test_unclear_settings_of_zenflow_are_refused(zenflow: dict[str, Any], message: str) -> None:
    config = {"zero_optimization": {"zenflow": zenflow}}
    with pytest.raises(ValueError, match=message):
        read_deepspeed_config(config)
    if "interval" in message or "steps_per_epoch is missing" in message:
        assert read_deepspeed_config(config, select_interval=6) == {"policy": "zenflow", "select_interval": 6}


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"zero_optimization": {"zenflow": {"topk": 0.1}}}, TypeError, 'zenflow block of .*"topk_ratio"'),
        ({"zero_optimization": {"zenflow": {"policy": "resident"}}}, TypeError, "unknown option 'policy'"),
        ({"zero_optimization": {"zenflow": True}}, TypeError, "zenflow=True .*JSON object"),
        ({"zero_optimization": {"zenflow": {"select_strategy": None}}}, TypeError, "block of .*: select_strategy=None"),
        ({"zero_optimization": 2}, TypeError, "zero_optimization=2 .*JSON object"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gds"}}}, ValueError, "'gds'.*use \"cpu\""),
        ({"optimizer": {"type": "Lamb"}}, ValueError, "optimizer.type='Lamb'.*\"AdamW\""),
        ({"optimizer": {"params": {}}}, ValueError, "optimizer.type=None"),
        (adam(params={"amsgrad": True}), ValueError, "amsgrad=True .*must be False"),
        (adam(params={"bias_correction": False}), ValueError, "bias_correction=False .*must be True"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
            ValueError,
            "adam_w_mode=False .*must be True",
        ),
        (3, TypeError, "config=3"),
    ],
)
def test_unsupported_settings_are_refused(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_deepspeed_config(config)


def test_adam_without_decay_is_adamw() -> None:
    optimizer = {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.0, "torch_adam": True}}
    assert read_quietly({"optimizer": optimizer}) == {"policy": "resident", "weight_decay": 0.0}


def test_ignored_adam_settings_are_listed() -> None:
    with pytest.warns(UserWarning, match=r"optimizer\.params\.freeze_step, optimizer\.legacy_fusion$"):
        read_deepspeed_config(adam(params={"freeze_step": 3}, legacy_fusion=True))


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such DeepSpeed configuration"):
        read_deepspeed_config(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"optimizer": ')
    with pytest.raises(ValueError, match=r"broken\.json' is not valid JSON: .*line 1"):
        read_deepspeed_config(broken)
    broken.write_bytes(b'\xff\xfe{"a": 1}')
    with pytest.raises(ValueError, match="is not valid JSON"):
        read_deepspeed_config(broken)
    broken.write_text('{"optimizer": {"type": "Adam", "type": "AdamW"}}')
    with pytest.raises(ValueError, match=r"the key 'type' is there twice; keep one of the two"):
        read_deepspeed_config(broken)
    broken.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"broken\.json' is not a DeepSpeed configuration: it is nested too deep"):
        read_deepspeed_config(broken)
    broken.write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, not list"):
        read_deepspeed_config(broken)


def test_names_in_a_file_are_escaped(tmp_path: Path) -> None:
    name = "a\x1b[31m\u202e\x9b"
    file = tmp_path / "\x1b[2J.json"
    file.write_text(json.dumps({name: 1, "optimizer": {"type": "AdamW", name: 1, "params": {name: 1}}}))
    with pytest.warns(UserWarning, match="no effect") as caught:
        read_deepspeed_config(file)
    assert str(caught[0].message).isprintable()
    file.write_text(json.dumps({"zero_optimization": {"zenflow": {name: 1}}}))
    with pytest.raises(TypeError) as error:
        read_deepspeed_config(file)
    assert str(error.value).isprintable()
