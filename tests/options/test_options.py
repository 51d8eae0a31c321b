"""The options: defaults, ranges, and the rules between them."""

from __future__ import annotations

import ast
import io
import json
import math
import re
import sys
from dataclasses import FrozenInstanceError, asdict, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import zenflow_compile
from zenflow_compile.options.options import OPTION_NAMES, Options
from zenflow_compile.options.unread import readers


def test_defaults() -> None:
    options = Options()
    assert (options.policy, options.topk_ratio, options.update_interval) == ("zenflow", 0.1, 4)
    assert (options.select_strategy, options.select_interval) == ("auto", "auto")
    assert (options.overlap_step, options.staleness, options.full_warm_up_rounds) == (True, 0, 0)
    assert (options.max_grad_norm, options.gradient_accumulation_steps) == (None, None)


def test_options_are_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().topk_ratio = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options("zenflow")  # type: ignore[call-arg]


RATIOS = ["topk_ratio", "auto_ratio", "pt_reserved_cores_perc", "device_share"]
OUTSIDE: list[tuple[str, Any]] = [
    *((name, value) for name in RATIOS for value in (-0.01, 1.01, math.nan, math.inf)),
    *((name, value) for name in ("max_grad_norm",) for value in (0, -1.0, math.nan, math.inf)),
    ("update_interval", 0),
    ("update_interval", -4),
    ("min_update_interval", 0),
    ("min_update_interval", 5),
    ("max_update_interval", 0),
    ("select_interval", 0),
    ("full_warm_up_rounds", -1),
    ("staleness", 2),
    ("staleness", -1),
    ("steps_per_epoch", 0),
    ("gradient_accumulation_steps", 0),
    ("min_offload_size", -1),
    ("device_memory_bytes", 0),
    ("offload_weights", 0.0),
    ("policy", "offload"),
    ("select_strategy", "steps"),
]
WRONG_TYPE: list[tuple[str, Any]] = [
    *((name, value) for name in RATIOS for value in (True, "0.1", 1j)),
    *((name, None) for name in RATIOS if name != "pt_reserved_cores_perc"),
    ("max_grad_norm", "1.0"),
    ("max_grad_norm", True),
    ("update_interval", True),
    ("update_interval", 4.0),
    ("update_interval", "4"),
    ("update_interval", "Auto"),
    ("update_interval", None),
    ("min_update_interval", "auto"),
    ("max_update_interval", None),
    ("select_interval", 8.0),
    ("full_warm_up_rounds", "auto"),
    ("full_warm_up_rounds", False),
    ("staleness", True),
    ("staleness", 0.0),
    ("steps_per_epoch", "auto"),
    ("gradient_accumulation_steps", 2.0),
    ("min_offload_size", None),
    ("device_memory_bytes", 1.5),
    ("device_memory_bytes", "auto"),
    ("offload_weights", "all"),
    ("offload_weights", True),
    ("overlap_step", 1),
    ("overlap_step", "auto"),
    ("offload", 0),
    ("policy", None),
    ("select_strategy", 3),
]


@pytest.mark.parametrize("policy", ["zenflow", "zero_offload", "resident"])
@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_value_outside_its_range_is_named(policy: str, name: str, value: Any) -> None:
    keywords = {"policy": policy, name: value}
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")) as error:
        Options(**keywords)
    assert re.search(r"must be|is not one of", str(error.value))


@pytest.mark.parametrize(("name", "value"), WRONG_TYPE)
def test_value_of_the_wrong_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{name}={value!r} must be")):
        Options(**{name: value})


@pytest.mark.parametrize(
    "keywords",
    [
        {"topk_ratio": 0},
        {"topk_ratio": 1},
        {"update_interval": 1},
        {"update_interval": "auto"},
        {"update_interval": "auto", "min_update_interval": 1},
        {"update_interval": "auto", "min_update_interval": 8, "max_update_interval": 8},
        {"select_strategy": "step", "select_interval": 4, "update_interval": 4},
        {"select_strategy": "step", "select_interval": 1, "update_interval": "auto"},
        {"select_strategy": "epoch", "select_interval": 1, "steps_per_epoch": 4},
        {"staleness": 1},
        {"policy": "auto", "tokens_per_step": 1},
        {"max_grad_norm": 1},
        {"gradient_accumulation_steps": 1, "min_offload_size": 0, "device_share": 0},
        {"pt_reserved_cores_perc": 1.0},
    ],
)
def test_ends_of_the_ranges_are_valid(keywords: dict[str, Any]) -> None:
    Options(**keywords)


def test_numbers_of_other_types_become_plain_ones() -> None:
    numpy = pytest.importorskip("numpy", reason="checks NumPy's numbers")
    options = Options(
        topk_ratio=numpy.float32(0.25),
        auto_ratio=Fraction(1, 2),  # type: ignore[arg-type]
        device_share=0,
        update_interval=numpy.int64(3),
    )
    for name, value in (("topk_ratio", 0.25), ("auto_ratio", 0.5), ("device_share", 0.0)):
        assert type(getattr(options, name)) is float
        assert getattr(options, name) == value
    assert type(options.update_interval) is int
    saved = io.BytesIO()
    torch.save(asdict(options), saved)
    saved.seek(0)
    assert Options(**torch.load(saved, weights_only=True)) == options


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"select_interval": 8}, 'select_interval=8 has no unit.*"step" or "epoch"'),
        ({"select_strategy": "step"}, 'select_interval="auto" under.*"step".*select_strategy="auto"'),
        ({"select_strategy": "epoch"}, 'select_interval="auto" under.*"epoch"'),
        ({"select_strategy": "epoch", "select_interval": 1}, r"steps_per_epoch=len\(loader\)"),
        (
            {"select_strategy": "step", "select_interval": 3},
            "3 steps.*update_interval=4.*raise select_interval",
        ),
        (
            {"select_strategy": "epoch", "select_interval": 2, "steps_per_epoch": 3, "update_interval": 7},
            "6 steps.*update_interval=7",
        ),
        ({"offload": True}, 'this version.*topk_ratio.*policy="zero_offload"'),
    ],
)
def test_cross_option_rules_hold_for_zenflow_only(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**keywords)
    for policy in ("resident", "zero_offload"):
        Options(policy=policy, **keywords)


@pytest.mark.parametrize(
    ("keywords", "nearest"),
    [
        ({"topk_ration": 0.1}, "topk_ratio"),
        ({"updateinterval": 4}, "update_interval"),
        ({"Staleness": 1}, "staleness"),
        ({"topk": 0.1}, "topk_ratio"),
        ({"max_norm": 1.0}, "max_grad_norm"),
        ({"weightdecay": 0.1}, "weight_decay"),
    ],
)
def test_unknown_option_suggests_the_nearest(keywords: dict[str, Any], nearest: str) -> None:
    with pytest.raises(TypeError, match=f'unknown option .*did you mean "{nearest}"'):
        Options.from_keywords(**keywords)


def test_unknown_option_error_lists_all_options() -> None:
    with pytest.raises(TypeError, match="valid options are policy, tokens_per_step") as error:
        Options.from_keywords(zzz=1)
    assert all(name in str(error.value) for name in OPTION_NAMES)


@pytest.mark.parametrize(
    ("policy", "nearest"),
    [("zero-offload", "zero_offload"), ("ZenFlow", "zenflow"), ("residant", "resident")],
)
def test_unknown_policy_suggests_the_nearest(policy: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f'policy.*did you mean "{nearest}"'):
        Options.from_keywords(policy=policy)


def test_device_memory_needs_measured_weights() -> None:
    assert Options(offload_weights="auto", device_memory_bytes=1).device_memory_bytes == 1
    with pytest.raises(ValueError, match=r'device_memory_bytes=1 has no effect.*pass offload_weights="auto"'):
        Options(offload_weights=0.5, device_memory_bytes=1)
    with pytest.raises(ValueError, match="choose another policy"):
        Options(offload_weights="auto", policy="auto", tokens_per_step=1)


def test_intervals_resolve_to_steps() -> None:
    assert Options().resolved_select_interval() == 16
    assert Options(update_interval=40).resolved_select_interval() == 40
    assert Options(update_interval=40).resolved_select_interval(2) == 16
    assert Options(select_strategy="step", select_interval=6).resolved_select_interval() == 6
    epochs = Options(select_strategy="epoch", select_interval=3, steps_per_epoch=100)
    assert epochs.resolved_select_interval() == 300
    assert Options(update_interval=7).longest_window == 7
    assert Options(update_interval="auto").longest_window == 4
    assert Options(policy="zero_offload", update_interval=7).longest_window == 1


def test_every_option_is_documented() -> None:
    documented = Options.__doc__ or ""
    table = (Path(__file__).parents[2] / "docs/options.md").read_text()
    for field in fields(Options):
        assert re.search(rf"^        {field.name}: ", documented, re.MULTILINE), f"{field.name} in the docstring"
        row = re.search(rf"^\| `{field.name}` \| (?:[^|]|\\\|)+ \| `([^`]*)` \|", table, re.MULTILINE)
        assert row, f"{field.name} in docs/options.md"
        written = json.dumps(field.default) if not isinstance(field.default, bool | None) else repr(field.default)
        assert row[1] == written, f"default of {field.name} in docs/options.md"


def test_documented_readers_match_the_warnings() -> None:
    table = (Path(__file__).parents[2] / "docs/options.md").read_text()
    for name in OPTION_NAMES:
        row = re.search(rf"^\| `{name}` \| .*", table, re.MULTILINE)
        assert row, f"{name} in docs/options.md"
        assert row[0].split(" | ")[4] == readers(name), name


def test_options_import_neither_torch_nor_the_runtime() -> None:
    package = Path(zenflow_compile.__file__).parent
    light = ("options", "checks")
    files = [path for folder in light for path in (package / folder).glob("*.py")]
    assert len(files) > 5
    for path in files:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                own = module.startswith(tuple(f"zenflow_compile.{folder}" for folder in light))
                assert own or module.partition(".")[0] in sys.stdlib_module_names, module
