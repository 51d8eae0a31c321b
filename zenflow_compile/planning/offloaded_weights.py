"""Which weights are in host memory, and how much of them may be on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SMALLEST_WEIGHT_BYTES = 1 << 16
"""Smaller weights stay on the device: a copy of so many bytes takes as long as the call that starts it, at 16 GB/s."""


@dataclass(frozen=True, slots=True)
class OffloadedWeights:
    """Weights that are in host memory, and on the device only around their uses.

    Attributes:
        ps: indices in the plan.
        ring_bytes: of them on the device at a time, where uses allow it: what one operator reads is there together.
        strict: an operator that reads more than that together is an error.
    """

    ps: frozenset[int]
    ring_bytes: int
    strict: bool = False


def weight_budget(option: float | Literal[False, "auto"], weight_bytes: Mapping[str, int]) -> int:
    """Bytes of device memory for weights that can be offloaded: kept and loaded ones together.

    Args:
        option: ``offload_weights``; under ``"auto"``, the budget before anything is measured.
        weight_bytes: of each weight that can be offloaded, by name.

    Raises:
        ValueError: the largest weight does not fit.
    """
    name, largest = max(weight_bytes.items(), key=lambda item: item[1], default=("", 0))
    if option == "auto":
        return largest
    if isinstance(option, float):
        return max(int((1.0 - option) * sum(weight_bytes.values())), largest)
    if option < largest:
        raise ValueError(
            f"offload_weights={option} bytes must be at least {largest}, the size of {name}, which is loaded as a "
            "whole; pass more, or a share such as 1.0, which loads as few weights at a time as operators read"
        )
    return int(option)
