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
from zenflow_compile.backend import split_backend_options
from zenflow_compile.options.options import INSTEAD, OPTION_NAMES, Options, readers


def test_defaults() -> None:
    options = Options()
    assert (options.policy, options.topk_ratio, options.update_interval) == ("zenflow", 0.1, 4)
    assert (options.select_interval, options.gradient_transfer, options.weight_grad_bytes) == ("auto", "each", 0)
    assert (options.overlap_step, options.staleness, options.full_warm_up_rounds) == (True, 0, 0)
    assert (options.max_grad_norm, options.gradient_accumulation_steps) == (None, None)


def test_options_are_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().topk_ratio = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options("zenflow")  # type: ignore[call-arg]


RATIOS = ["topk_ratio", "auto_ratio", "device_share"]
OUTSIDE: list[tuple[str, Any]] = [
    *((name, value) for name in RATIOS for value in (-0.01, 1.01, math.nan, math.inf)),
    *((name, value) for name in ("max_grad_norm",) for value in (0, -1.0, math.nan, math.inf)),
    ("update_interval", 0),
    ("update_interval", -4),
    ("update_interval", (4,)),
    ("select_interval", 0),
    ("workers", 0),
    ("workers", 1.5),
    ("device_share", -1),
    ("device_share", 8.0),
    ("weight_grad_bytes", -1),
    ("gradient_transfer", "sum"),
    ("offload_device", "disk"),
    ("full_warm_up_rounds", -1),
    ("staleness", 2),
    ("staleness", -1),
    ("gradient_accumulation_steps", 0),
    ("min_offload_size", -1),
    ("offload_weights", 0.0),
    ("policy", "offload"),
]
WRONG_TYPE: list[tuple[str, Any]] = [
    *((name, value) for name in RATIOS for value in (True, "0.1", 1j)),
    *((name, None) for name in RATIOS),
    ("max_grad_norm", "1.0"),
    ("max_grad_norm", True),
    ("update_interval", True),
    ("update_interval", 4.0),
    ("update_interval", "4"),
    ("update_interval", "Auto"),
    ("update_interval", None),
    ("select_interval", 8.0),
    ("workers", "all"),
    ("workers", True),
    ("weight_grad_bytes", None),
    ("gradient_transfer", None),
    ("full_warm_up_rounds", "auto"),
    ("full_warm_up_rounds", False),
    ("staleness", True),
    ("staleness", 0.0),
    ("gradient_accumulation_steps", 2.0),
    ("min_offload_size", None),
    ("offload_weights", "all"),
    ("offload_weights", True),
    ("overlap_step", 1),
    ("overlap_step", "auto"),
    ("policy", None),
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
        {"update_interval": (1, 64)},
        {"update_interval": [8, 8]},
        {"update_interval": (None, 1)},
        {"select_interval": 4, "update_interval": 4},
        {"select_interval": 1, "update_interval": "auto"},
        {"select_interval": 1, "update_interval": (1, 8)},
        {"staleness": 1},
        {"policy": "auto", "tokens_per_step": 1},
        {"max_grad_norm": 1},
        {"gradient_accumulation_steps": 1, "min_offload_size": 0, "device_share": 0},
        {"workers": 0.0},
        {"workers": 1.0},
        {"device_share": 2},
        {"device_share": "fill", "policy": "auto", "tokens_per_step": 1},
        {"device_share": "fill", "policy": "twinflow"},
        {"weight_grad_bytes": "auto"},
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
        update_interval=[numpy.int64(2), 3],  # type: ignore[arg-type]
        workers=numpy.float32(0.5),
    )
    for name, value in (("topk_ratio", 0.25), ("auto_ratio", 0.5), ("device_share", 0.0)):
        assert type(getattr(options, name)) is float
        assert getattr(options, name) == value
    assert options.update_interval == (2, 3)
    assert {type(each) for each in options.update_interval} == {int}
    assert (type(options.workers), type(Options(device_share=numpy.int64(8)).device_share)) == (float, int)
    saved = io.BytesIO()
    torch.save(asdict(options), saved)
    saved.seek(0)
    assert Options(**torch.load(saved, weights_only=True)) == options


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"select_interval": 3}, "select_interval=3.*update_interval=4.*raise select_interval"),
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


def test_gone_option_says_what_to_pass() -> None:
    assert INSTEAD.keys().isdisjoint(OPTION_NAMES)
    for name, text in INSTEAD.items():
        for make in (Options.from_keywords, lambda **options: split_backend_options(options)):
            with pytest.raises(TypeError, match=re.escape(f"unknown option {name!r}: {text}")):
                make(**{name: 1})


def test_fill_needs_the_policy_that_predicts() -> None:
    for make in (Options, lambda **options: split_backend_options(options)):
        with pytest.raises(ValueError, match=r'"fill" under policy=.zenflow. is not supported: only policy="auto"'):
            make(device_share="fill")


def test_offloaded_weights_need_a_policy_for_them() -> None:
    with pytest.raises(ValueError, match="choose another policy"):
        Options(offload_weights="auto", policy="auto", tokens_per_step=1)
    files: dict[str, Any] = {"offload_device": "nvme_all", "nvme_path": "."}
    assert Options(offload_weights=1.0, **files).weights_in_files
    assert not Options(offload_weights=1.0, **files | {"offload_device": "nvme"}).weights_in_files
    with pytest.raises(ValueError, match=r'offload_device="nvme_all" has no effect with offload_weights=False'):
        Options(**files)
    with pytest.raises(ValueError, match=r'split_master=True with offload_device="nvme_all" is not supported'):
        Options(offload_weights=1.0, split_master=True, **files)
    with pytest.raises(ValueError, match=r'"nvme_all" under policy=.zero_offload. is not supported'):
        Options(policy="zero_offload", offload_weights=1.0, **files)


def test_intervals_resolve_to_steps() -> None:
    assert Options().resolved_select_interval() == 16
    assert Options(update_interval=40).resolved_select_interval() == 40
    assert Options(update_interval=40).resolved_select_interval(2) == 16
    assert Options(select_interval=6).resolved_select_interval() == 6
    assert Options(update_interval=7).longest_window == 7
    assert Options(update_interval=7).window_bounds == (7, 7)
    assert Options(update_interval="auto").window_bounds == (None, 4)
    assert Options(update_interval=(2, 8)).window_bounds == (2, 8)
    assert [Options(update_interval=each).adaptive for each in (7, "auto", (2, 8))] == [False, True, True]
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
    assert len(files) >= 5
    for path in files:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                own = module.startswith(tuple(f"zenflow_compile.{folder}" for folder in light))
                assert own or module.partition(".")[0] in sys.stdlib_module_names, module
