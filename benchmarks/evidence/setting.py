"""What every part of ``gpu_evidence`` is told: device, size, and the machine's rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.systems.case import Case
from zenflow_compile.runtime.host.cores import physical_cores

Row = dict[str, Any]
Emit = Callable[[Row], None]
"""Adds a row to the part's results; it is in the file at once, so that a killed part keeps it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how large a part runs.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        tiny: a model of three layers and few rounds, for tests of the parts themselves: its numbers mean nothing.
        doctor: findings of ``zenflow-compile doctor`` on this machine; None where there are none.
        folder: of the results; files in addition to the rows go there.
    """

    device: str
    tiny: bool
    doctor: dict[str, Any] | None
    folder: Path

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        """Of weights and gradients."""
        return "bf16" if self.cuda else "fp32"

    def case(self, system: str, model: str, **changes: Any) -> Case:
        """``system`` on ``model``; in the tiny mode on the tiny model, which takes no tokens."""
        cores = tuple(core.logical for core in physical_cores())
        if self.tiny:
            changes |= {"tokens": None, "inner": "eager"}
        return Case(
            system=system,
            model="tiny" if self.tiny else model,
            dtype=self.dtype,
            device=self.device,
            cores=cores,
            threads=len(cores) if self.cuda else 1,
            **changes,
        )
