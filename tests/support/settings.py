"""Option sets that tests of the engine share, by name."""

from __future__ import annotations

from typing import Any

_EVERY_SECOND_STEP: dict[str, Any] = {"update_interval": 2, "select_interval": 2}
_STREAMED: dict[str, Any] = {"policy": "deep_optimizer_states"}
_SUMMED: dict[str, Any] = {"gradient_transfer": "mean"}
_COMPRESSED: dict[str, Any] = {"gradient_transfer": "int8"}

SETTINGS: dict[str, dict[str, Any]] = {
    "resident": {"policy": "resident"},
    "zero_offload": {"policy": "zero_offload"},
    "zero_infinity": {"policy": "zero_infinity"},
    "twinflow": {"policy": "twinflow", "ratio": 0.6},
    "device_share": {"device_share": 0.6},
    "clipped": {"max_grad_norm": 0.1},
    "tightly_clipped": {"max_grad_norm": 0.01},
    "each_step": {"update_interval": 1},
    "windows": {"update_interval": 4},
    "selecting_windows": {"update_interval": 4, "select_interval": 4},
    "warm_up": {"full_warm_up_rounds": 5},
    "all_selected": {"topk_ratio": 1.0},
    "none_selected": {"topk_ratio": 0.0},
    "reselecting": _EVERY_SECOND_STEP,
    "auto": {"update_interval": (1, 4), "auto_ratio": 0.6},
    "long_auto": {"update_interval": "auto", "auto_ratio": 0.6},
    "bounded_auto": {"update_interval": (1, 4)},
    "stale_windows": {"update_interval": 4, "staleness": 1},
    "stale": {"update_interval": 1, "staleness": 1},
    "stale_every_step": {"update_interval": 1, "staleness": 1, "select_interval": 3},
    "streamed": {**_STREAMED, "update_stride": 1},
    "every_second_streamed": {**_STREAMED, "update_stride": 2, "ratio": 0.8},
    "windows_and_streamed": {"update_stride": 2, "update_interval": 2},
    "summed": {**_SUMMED, "update_interval": 2},
    "summed_windows": {**_SUMMED, "update_interval": 4},
    "summed_clipped": {**_SUMMED, "max_grad_norm": 0.1},
    "summed_auto": {**_SUMMED, "update_interval": "auto", "auto_ratio": 0.6},
    "summed_warm_up": {**_SUMMED, "update_interval": 2, "full_warm_up_rounds": 2},
    "summed_stale": {**_SUMMED, "staleness": 1, "update_interval": 3},
    "summed_stale_warm_up": {**_SUMMED, "update_interval": 2, "staleness": 1, "full_warm_up_rounds": 3},
    "compressed": {**_COMPRESSED, "update_interval": 4},
    "compressed_clipped": {**_COMPRESSED, "max_grad_norm": 0.1},
    "compressed_stale": {**_COMPRESSED, "update_interval": 2, "staleness": 1},
    "compressed_reselecting": {**_COMPRESSED, **_EVERY_SECOND_STEP, "staleness": 1},
}


def settings(names: str, **others: str) -> dict[str, dict[str, Any]]:
    """The option sets with these names, which blanks divide, in this order; then ``others`` under their keywords."""
    return {own: SETTINGS[name] for own, name in [*((name, name) for name in names.split()), *others.items()]}
