"""Device memory that systems are planned to take, so that a part starts no more of them at once than fit."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from benchmarks.systems.case import Case

CONTEXT_BYTES = 600 * 2**20
"""Of CUDA in each process, with the kernels that are loaded."""

_FILLED = 0.95  # of the device's memory
_BETWEEN_TURNS: dict[str, float] = {
    "forward_backward": 2,  # weights
    "adamw": 14,  # and masters and moments
    "resident": 14,
    "zero_offload": 3.5,  # and what is resident by default: a tenth of the parameters
    "deep_optimizer_states": 3.5,
    "zenflow": 5,  # and a tenth of the slices
    "torchao_offload": 2,
    "fsdp2_offload": 0.5,
}
"""Bytes per parameter in bf16, while another system takes its turn."""


def together_bytes(cases: Iterable[Case], *, at_once: bool = False) -> int:
    """The most that processes of these cases hold at once, of which one trains at a time, or all ``at_once``.

    What trains has its gradients, two bytes per parameter, and its activations, too.
    """
    cases = list(cases)
    between = sum(int(_BETWEEN_TURNS[case.system] * _parameters(case.model)) + CONTEXT_BYTES for case in cases)
    training = [2 * _parameters(case.model) + _activation_bytes(case) for case in cases]
    return between + (sum(training) if at_once else max(training))


def fit(cases: Iterable[Case], memory_bytes: int, *, at_once: bool = False) -> bool:
    """Whether a device of so much memory holds them."""
    return together_bytes(cases, at_once=at_once) <= _FILLED * memory_bytes


def device_bytes(case: Case) -> int | None:
    """The memory of the case's device; None for the CPU."""
    return torch.cuda.get_device_properties(0).total_memory if case.device == "cuda" else None


@cache
def _parameters(model: str) -> int:
    with torch.device("meta"):
        built = Case(system="adamw", model=model).workload().build()
    return sum(param.numel() for param in built.parameters())


def _activation_bytes(case: Case) -> int:
    workload = case.workload()
    if workload.llama is None:
        return 0
    return workload.llama.activation_bytes(workload.rows * workload.context)
