"""Options that have no effect under the policy in use are named, once, when the optimizer is made."""

from __future__ import annotations

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.machines import scenario
from tests.support.training import mlp
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.options.options import POLICIES, Options
from zenflow_compile.performance.hardware import hardware
from zenflow_compile.performance.models import of_size
from zenflow_compile.prediction.predict import predict


def warned(**options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ZenFlowAdamW(mlp().parameters(), **options).close()
    assert all(each.category is UserWarning and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": "zenflow", "ratio": 0.5}, ["ratio (read by twinflow, deep_optimizer_states)"]),
        ({"policy": "twinflow", "update_stride": 2}, ["update_stride (read by deep_optimizer_states, zenflow)"]),
        (
            {"policy": "zero_offload", "host_window_bytes": 1 << 30, "nvme_path": "/none"},
            [f'{name} (read by zero_infinity, zenflow with offload_device="nvme")'
             for name in ("nvme_path", "host_window_bytes")],
        ),
        ({"policy": "zenflow", "nvme_path": "/none"}, ["nvme_path (read by zero_infinity, zenflow with"]),
        ({"policy": "resident", "topk_ratio": 0.2, "weight_grad_bytes": 1 << 30},
         ["topk_ratio (read by zenflow)", "weight_grad_bytes (read by zero_offload, twinflow, "]),
        ({"policy": "twinflow", "tokens_per_step": 8},
         ["tokens_per_step (read by auto, deep_optimizer_states, zenflow)"]),
    ],
)  # fmt: skip
def test_one_warning_names_unread_options(options: dict[str, Any], named: list[str]) -> None:
    (message,) = warned(**options)
    assert message.startswith(f"policy={options.get('policy', 'zenflow')!r} does not read ")
    assert all(each in message for each in named)
    assert message.count("(read by ") == len(named)


def test_warning_in_compilation_names_the_users_line() -> None:
    """Dynamo's frames lie between the call of the model and the optimizer that is made."""
    options = {"inner": "eager", "policy": "resident", "topk_ratio": 0.2}
    with pytest.warns(UserWarning, match="does not read topk_ratio") as caught:
        torch.compile(mlp(), backend="zenflow", options=options)(torch.ones(1, 16))
    assert [each.filename for each in caught] == [__file__]


def test_read_or_default_options_do_not_warn(tmp_path: Path) -> None:
    defaults = {each.name: each.default for each in fields(Options)}
    for options in (
        {"policy": "zero_offload", "ratio": defaults["ratio"], "topk_ratio": defaults["topk_ratio"]},
        {"policy": "twinflow", "ratio": 0.5, "workers": 1, "max_grad_norm": 1.0},
        {"policy": "zero_infinity", "nvme_path": str(tmp_path), "host_window_bytes": 1 << 20},
        {"offload_device": "nvme", "nvme_path": str(tmp_path), "topk_ratio": 0.2, "update_stride": 2},
        {"policy": "auto", "tokens_per_step": 8, "ratio": 0.5, "topk_ratio": 0.2},
    ):
        assert warned(**options) == []


ALL_OPTIONS: dict[str, Any] = {
    "tokens_per_step": 8, "topk_ratio": 0.2, "select_interval": 8, "update_interval": (2, 8), "full_warm_up_rounds": 1,
    "overlap_step": False, "staleness": 1, "auto_ratio": 0.5, "device_share": 0.0, "min_offload_size": 1, "ratio": 0.5,
    "update_stride": 2, "host_window_bytes": 1 << 20, "weight_grad_bytes": 8, "gradient_transfer": "int8",
}  # fmt: skip


def test_recommended_options_do_not_warn(tmp_path: Path) -> None:
    given = ALL_OPTIONS | {"nvme_path": str(tmp_path)}
    found = predict(scenario(Options(**given), hardware("h200"), of_size(10**7), tokens=64)).forecasts
    assert {each.policy for each in found} == {*POLICIES} - {"auto"}
    for each in found:
        assert warned(**each.options) == [], each.label
    blocks = {each.label: each.options for each in found}
    assert blocks["resident"] == {"policy": "resident", "overlap_step": False, "min_offload_size": 1}
    assert set(blocks["twinflow"]) == {"policy", "ratio", "overlap_step", "min_offload_size", "weight_grad_bytes"}
    read = {*given} - {"ratio"}
    assert set(blocks["zenflow, files"]) - {"policy"} == read | {"offload_device"}
    assert set(blocks["zenflow"]) - {"policy"} == read - {"nvme_path", "host_window_bytes"}


def test_options_object_does_not_warn() -> None:
    """Plans and predictions share one options object between policies."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Options(policy="zero_offload", ratio=0.5)


def test_option_in_a_param_group_is_refused() -> None:
    model = mlp()
    groups = [{"params": model[0].parameters(), "topk_ratio": 0.9}, {"params": model[2].parameters()}]
    with pytest.raises(ValueError, match=r"param group has topk_ratio=0\.9.*pass it to the optimizer itself"):
        ZenFlowAdamW(groups)
    optimizer = ZenFlowAdamW(model[0].parameters())
    with pytest.raises(ValueError, match=r"param group has policy='resident'"):
        optimizer.add_param_group({"params": model[2].parameters(), "policy": "resident"})
    assert len(optimizer.param_groups) == 1
