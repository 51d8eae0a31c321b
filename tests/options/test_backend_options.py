"""``options=`` and ``mode=`` of ``torch.compile``, taken apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zenflow_compile.backend import BackendOptions, split_backend_options
from zenflow_compile.options.options import ADAM_KEYWORDS


def test_no_options_mean_no_optimizer() -> None:
    assert split_backend_options() == BackendOptions(optimizer=None, inner="inductor", inductor={})
    assert split_backend_options({}, mode="default").optimizer is None
    assert split_backend_options({"inner": "eager"}) == BackendOptions(inner="eager")


@pytest.mark.parametrize("name", [*ADAM_KEYWORDS, "topk_ratio", "policy"])
def test_keyword_means_optimizer_in_backward(name: str) -> None:
    value = {"betas": (0.9, 0.95), "policy": "resident"}.get(name, 0.1)
    assert split_backend_options({name: value}).optimizer == {name: value}


def test_options_are_split_by_reader() -> None:
    options = {
        "lr": 2e-5,
        "update_interval": 2,
        "inner": "inductor",
        "max_autotune": True,
        "cpp-wrapper": True,
        "triton.cudagraphs": False,
    }
    before = dict(options)
    split = split_backend_options(options)
    assert split.optimizer == {"lr": 2e-5, "update_interval": 2}
    assert split.inductor == {"max_autotune": True, "cpp_wrapper": True, "triton.cudagraphs": False}
    assert options == before


def test_keywords_override_the_config(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"zenflow": {"topk_ratio": 0.05, "update_interval": 2}}}))
    split = split_backend_options({"config": str(file), "topk_ratio": 0.2, "lr": 1e-4})
    assert split.optimizer == {"policy": "zenflow", "topk_ratio": 0.2, "update_interval": 2, "lr": 1e-4}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"topk_ration": 0.1}, TypeError, 'did you mean "topk_ratio"'),
        ({"cpp_wraper": True}, TypeError, 'did you mean "cpp_wrapper"'),
        ({"confg": "x.json"}, TypeError, 'did you mean "config"'),
        ({"inner": "eagre"}, ValueError, 'did you mean "eager"'),
        ({"policy": "zeroflow"}, ValueError, 'policy=.*did you mean "zenflow"'),
        ({"lr": 1e-3, "topk_ratio": 1.5}, ValueError, "topk_ratio=1.5"),
        ({"config": "/no/such.json"}, FileNotFoundError, "/no/such.json"),
        ({"triton.cudagraphs": True}, ValueError, "CUDA graphs.*max-autotune-no-cudagraphs"),
        ({"mode": "reduce-overhead"}, ValueError, "CUDA graphs"),
        ({"mode": "max-autotun"}, ValueError, 'mode=.*did you mean "max-autotune'),
        ({"inner": "eager", "max_autotune": True}, ValueError, "max_autotune would have no effect"),
    ],
)
def test_bad_backend_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        split_backend_options(options)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_with_cuda_graphs_are_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=r"CUDA graphs.*max-autotune-no-cudagraphs"):
        split_backend_options(mode=mode)
    split = split_backend_options({"mode": mode, "triton.cudagraphs": False})
    assert split.inductor["triton.cudagraphs"] is False


def test_mode_without_cuda_graphs_passes_through() -> None:
    split = split_backend_options({"lr": 1e-3}, mode="max-autotune-no-cudagraphs")
    assert split.inductor["max_autotune"] is True
    assert split.optimizer == {"lr": 1e-3}
    explicit = split_backend_options({"max_autotune": False}, mode="max-autotune-no-cudagraphs")
    assert explicit.inductor["max_autotune"] is False
