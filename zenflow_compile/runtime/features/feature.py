"""What a feature of an engine is: a part that no other part knows, in a folder of its own.

A folder of ``features/`` and its two lines beside ``FEATURES`` are all there is of it: without them, the package trains
as before, less the feature. It takes part in the moments that it names, and may add rows to the report.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TypeAlias

import torch

from zenflow_compile.options.options import Options
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.one_rank import OneRank
from zenflow_compile.runtime.step.schedule import Schedule

FeatureCalls: TypeAlias = Mapping[str, Callable[[], object]]
OPEN_MOMENTS = frozenset({"allocated", "begin_backward", "final", "end_step", "abandon", "close"})
"""Moments at which features are called; see ``Moments``."""


class EngineParts(Protocol):
    """What a feature may keep of an engine's core; a reference to the core itself would be a cycle."""

    options: Options
    device: torch.device
    registry: ParamRegistry
    recorder: Recorder
    schedule: Schedule
    graphs: list[Any]
    calls: OneRank

    @property
    def finalizes_in_backward(self) -> bool: ...


class Feature(ABC):
    """A feature of one engine."""

    @classmethod
    @abstractmethod
    def of(cls, engine: EngineParts) -> Self | None:
        """Make the feature of an engine whose core is being built; None: it does not have it."""

    def calls(self) -> FeatureCalls:
        """What to call at which of ``OPEN_MOMENTS``; asked again when a part comes or goes.

        A call must not queue work that changes a gradient, state or weight: features run in any order.
        """
        return {}

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each row that the feature adds to a report. May wait for the device."""
        return []
