"""What a search varies: where the state lives, how the tokens of a step are divided, and an option a line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from zenflow_compile.planning.planners import Side, lay_out, resident_order
from zenflow_compile.prediction.estimate import Estimator
from zenflow_compile.prediction.forecast import Scenario, resolve_stride
from zenflow_compile.prediction.strides import STRIDES

Dimension = tuple[Mapping[str, Any], ...]
"""Alternatives of an option, or of several together. Those next to each other differ the least."""

_FILLED = 0.9  # share of the free device memory that residents may take: estimates may be too low

_PLACES: Dimension = (
    {"policy": "resident"},
    {"policy": "zero_offload"},
    {"policy": "twinflow"},
    {"policy": "deep_optimizer_states"},
    {"policy": "zenflow"},
    {"policy": "zenflow", "offload_device": "nvme"},
    {"policy": "zero_infinity"},
)
_PLACES_IN_FILES = _PLACES[-2:]
_SHARE = 0.25  # ``device_share`` at its default: what also stays resident if the device is filled
_MOST_MICRO_BATCHES = 64
_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # of all optimizer state


def dimensions(scenario: Scenario, given: Collection[str], estimator: Estimator) -> tuple[Dimension, ...]:
    """What is searched: first where the state lives, then an option a line, and ``recompute``, which is none.

    The first alternative is the simplest one, and exact where others are not.

    Args:
        estimator: of the scenario.
        given: names of options that the user chose. They keep the values that the scenario has; a given share of
            ``device_share`` is the least that stays resident.
    """
    # Equation 1's stride stands for "auto" here, and is one of those that are tried.
    streams = "update_stride" in given and scenario.options.update_stride == "auto"
    searched: tuple[Dimension, ...] = (
        _places(scenario),
        _residents(scenario, given, estimator),
        _divisions(scenario),
        ({"recompute": False}, {"recompute": True}),
        tuple({"ratio": ratio} for ratio in (1.0, 0.75, 0.5, 0.25)),
        tuple({"update_stride": each} for each in (*(() if streams else (None,)), "auto", *STRIDES)),
        ({"offload_weights": False}, *({"offload_weights": share} for share in (0.5, 1.0))),
        tuple({"topk_ratio": ratio} for ratio in (0.1, 0.05, 0.02)),
        # Longer update windows cost too much loss (docs/convergence.md).
        tuple({"update_interval": steps} for steps in (1, 2, 4)),
        _fewer_bytes(scenario),
        ({"gradient_transfer": "each"}, {"gradient_transfer": "int8"}, {"gradient_transfer": "mean"}),
        ({"host_window_bytes": None}, *({"host_window_bytes": size} for size in _windows(scenario))),
    )
    left = {"device_share", *(["gradient_accumulation_steps"] if scenario.divided else [])}
    left |= {"update_stride"} if streams else set()
    fixed = {name: getattr(scenario.options, name) for name in given if name not in left}
    if scenario.policy != "auto":
        fixed["policy"] = scenario.policy
    if scenario.recompute is not None:
        fixed["recompute"] = scenario.recompute
    free = [[each for each in found if _agrees(each, fixed)] for found in searched]
    return tuple(tuple(found) for found in free if found)


def ways_to_divide(scenario: Scenario) -> tuple[Dimension, ...]:
    """What is searched where the scenario has the options: how the tokens of a step are divided, and recomputation.

    Only ``zf.plan`` and the command ask. In a run the program decides both, so ``policy="auto"`` does not search them.
    """
    recomputes = (False, True) if scenario.recompute is None else (scenario.recompute,)
    ways = tuple({"recompute": recompute} for recompute in recomputes)
    return ({"policy": scenario.options.policy},), _divisions(scenario), ways


def _agrees(alternative: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
    return all(fixed.get(name, value) == value for name, value in alternative.items())


def _fewer_bytes(scenario: Scenario) -> Dimension:
    """Ways to store state, by falling bytes, exact ones first.

    They are one dimension, since most of these plans differ in memory alone.
    """
    split = scenario.dtype == "bf16"
    ways = dict.fromkeys([("fp32", False), ("fp32", split), ("bf16", split), ("fp8", split)])
    return tuple({"state_dtype": dtype, "split_master": split_master} for dtype, split_master in ways)


def _places(scenario: Scenario) -> Dimension:
    has_disk = scenario.hardware.disk_read is not None and scenario.hardware.disk_write is not None
    in_files = has_disk and scenario.options.nvme_path is not None
    found = _PLACES if in_files else tuple(each for each in _PLACES if each not in _PLACES_IN_FILES)
    return tuple({"offload_device": "cpu"} | dict(each) for each in found)


def _divisions(scenario: Scenario) -> Dimension:
    """Numbers of micro-batches, each with a sequence at least: divisors of the sequences, and powers of two."""
    if not scenario.divided:
        return ({"gradient_accumulation_steps": scenario.options.gradient_accumulation_steps},)
    sequences = max(1, scenario.tokens // max(1, scenario.model.context))
    counts = {sequences, *(count for count in range(1, _MOST_MICRO_BATCHES + 1) if sequences % count == 0)}
    counts |= {1 << power for power in range(sequences.bit_length())}
    return tuple({"gradient_accumulation_steps": count} for count in sorted(counts) if count <= _MOST_MICRO_BATCHES)


def _residents(scenario: Scenario, given: Collection[str], estimator: Estimator) -> Dimension:
    """From no resident parameters, or the given share of them, to all that fit; ``"fill"`` is the last one alone."""
    share = scenario.options.device_share
    if isinstance(share, int):
        return ({"device_share": share},)
    if share == "fill":
        return ({"device_share": next(reversed(_fitting(scenario, _SHARE, estimator)), _SHARE)},)
    least = () if "device_share" in given else (0.0,)
    more = _resident_bytes(scenario, share, estimator)
    return tuple({"device_share": each} for each in dict.fromkeys((*least, share, *more)))


def _resident_bytes(scenario: Scenario, share: float, estimator: Estimator) -> list[int]:
    fitting = _fitting(scenario, share, estimator)
    state = _state_bytes(scenario)
    sizes = [size for size in _shares_of(state) if size > share * state]
    if not fitting or fitting[-1] >= max(sizes, default=0):
        return sizes
    return sorted({*sizes, *(fitting[max(1, round(part * len(fitting))) - 1] for part in (*_SHARES, 1.0))})


def _fitting(scenario: Scenario, share: float, estimator: Estimator) -> list[int]:
    """Bytes of ``device_share`` with which one parameter more than with ``share`` is resident, as long as all fit.

    A resident parameter takes more than its state: its gradient stays on the device until the step.
    """
    options = replace(scenario.options, policy="zenflow", device_share=share)
    options = resolve_stride(options, scenario.hardware, scenario.model.params)
    device_bytes = scenario.hardware.device_bytes
    recompute = scenario.recompute is not False
    kinds = estimator.kinds(options)
    states = [kinds.planned(kind, Side.DEVICE, 0).whole_state_bytes for kind in kinds.of]
    order = resident_order(kinds)
    kept = lay_out(kinds, options).sides
    least = sum(states[index] for index in order if kept[index] is Side.DEVICE)
    sizes = accumulate(states[index] for index in order)
    more = [size for size in sizes if size > least]
    taken = sum(estimator.needs(options, recompute=recompute).device.values())

    def filled(size: int) -> int:
        return sum(estimator.needs(replace(options, device_share=size), recompute=recompute).device.values())

    return more[: bisect_right(more, taken + _FILLED * (device_bytes - taken), key=filled)]


def _windows(scenario: Scenario) -> list[int]:
    """Bytes that cache files, of each device: shares of its part of the optimizer state."""
    return _shares_of(_state_bytes(scenario) // scenario.hardware.devices)


def _shares_of(state: int) -> list[int]:
    """Shares of so many bytes, in whole GB if they are many."""
    unit = 10**9 if state > 20e9 else 1
    return sorted({round(share * state / unit) * unit for share in _SHARES} - {0})


def _state_bytes(scenario: Scenario) -> int:
    """Bytes of the optimizer state in fp32."""
    return sum(param.numel for param in scenario.model.params) * 12
