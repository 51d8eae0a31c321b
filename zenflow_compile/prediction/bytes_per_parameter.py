"""Memory per parameter with each combination of the options that store state and gradients in fewer bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from zenflow_compile.options.options import Options
from zenflow_compile.options.unread import reads
from zenflow_compile.performance.memory import Needs
from zenflow_compile.prediction.forecast import needs
from zenflow_compile.prediction.scenario import Scenario

STATE: tuple[Mapping[str, Any], ...] = tuple(
    {"state_dtype": dtype, "split_master": split} for dtype, split in product(("fp32", "bf16", "fp8"), (False, True))
)
"""Ways to store the state."""

_WAYS: tuple[dict[str, Any], ...] = ({}, {"gradient_compression": "int8"}, {"accumulate_on_device": True})
GRADIENTS: tuple[Mapping[str, Any], ...] = tuple(
    {"shared_buffers": shared, **way} for way, shared in product(_WAYS, (False, True))
)
"""Ways to keep the gradients of update windows."""

_NOT_OF_THE_OPTIMIZER = ("weights", "loaded weights", "activations")


@dataclass(frozen=True, slots=True)
class Combination:
    """One combination of ``STATE`` and ``GRADIENTS``.

    Attributes:
        options: the changed ones.
        host, disk: bytes per parameter of the model, of the node.
        device: likewise of all devices, without weights and activations.
    """

    options: Mapping[str, Any]
    host: float
    device: float
    disk: float


def bytes_per_parameter(options: Options, scenario: Scenario) -> list[Combination]:
    """The memory of each combination that goes together, under the policy of ``options`` and its other values."""
    found = []
    options = replace(options, gradient_compression=None, accumulate_on_device=False)
    for state, gradients in product(STATE, GRADIENTS):
        changes = {**state, **gradients}
        if not all(reads(options.policy, name) for name, value in changes.items() if value):
            continue
        try:
            needed = needs(replace(options, **changes), scenario)
        except ValueError:  # these exclude each other, or the model cannot have them: no combination
            continue
        found.append(_combination(changes, needed, scenario))
    return found


def _combination(changes: Mapping[str, Any], needed: Needs, scenario: Scenario) -> Combination:
    count = max(1, scenario.model.numel)
    of_optimizer = [size for name, size in needed.device.items() if name not in _NOT_OF_THE_OPTIMIZER]
    return Combination(
        options=changes,
        host=sum(needed.host.values()) / count,
        device=sum(of_optimizer) * scenario.hardware.devices / count,
        disk=sum(needed.disk.values()) / count,
    )
