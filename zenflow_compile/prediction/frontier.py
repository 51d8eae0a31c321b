"""The frontier of memory against time: the least memory without a slower step, and what each GB less costs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from zenflow_compile.prediction.forecast import Forecast
from zenflow_compile.prediction.scenario import Scenario
from zenflow_compile.prediction.search import Candidate, Search, chain, device_first, host_first


@dataclass(frozen=True, slots=True)
class Frontier:
    """Plans that fit, the fastest first; each one is slower than the one before and needs less memory.

    Attributes:
        fastest: the shortest step of all plans that were simulated. Others are slower than it.
        device: the first needs the least device memory of those that are hardly slower than ``fastest``; then less of
            it, down to the least of all. Each takes the host memory that it needs.
        host: likewise with host memory.
        nearest: the plan that lacks the fewest bytes; it fits if any does.
    """

    scenario: Scenario
    fastest: Forecast | None
    device: tuple[Forecast, ...]
    host: tuple[Forecast, ...]
    nearest: Candidate

    @property
    def points(self) -> list[Forecast]:
        """All plans of both, each one time, those of ``device`` first. Their number is their place plus one."""
        return [*self.device, *(each for each in self.host if each not in self.device)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data: bytes, seconds, tokens per second; ``device`` and ``host`` have indices of ``points``."""
        asked, points = self.scenario, self.points
        return {
            "model": asked.model.name,
            "parameters": asked.model.numel,
            "dtype": asked.dtype,
            "hardware": asked.hardware.name,
            "tokens": asked.tokens,
            "fastest_step_s": None if self.fastest is None else self.fastest.step_s,
            "points": [each.as_dict() | {"departures": list(each.departures)} for each in points],
            "device": [points.index(each) for each in self.device],
            "host": [points.index(each) for each in self.host],
            "shortages": self.nearest.needs.shortages(asked.hardware),
        }


def frontier(scenario: Scenario, given: Collection[str] = (), *, exact: bool = False) -> Frontier:
    """Search the plans of a model on given hardware.

    Args:
        scenario: with the memory that a plan may use.
        given: names of options that the user chose. All others are searched.
        exact: only plans that give AdamW's numbers, to rounding.

    Raises:
        ValueError: the given options exclude each other under every policy, or the hardware lacks a number.
    """
    search = Search(scenario, given, exact=exact)
    found = search.explore()
    return Frontier(
        scenario=scenario,
        fastest=min(found, key=lambda each: each.step_s, default=None),
        device=tuple(chain(found, device_first)),
        host=tuple(chain(found, host_first)),
        nearest=search.nearest(),
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model can be trained: ``best`` is its fastest plan, None if none fits, and ``nearest`` lacks least."""

    scenario: Scenario
    best: Forecast | None
    nearest: Candidate

    def as_dict(self) -> dict[str, Any]:
        """Plain data: bytes, seconds, tokens per second."""
        best = None if self.best is None else self.best.as_dict() | {"departures": list(self.best.departures)}
        return {
            "model": self.scenario.model.name,
            "parameters": self.scenario.model.numel,
            "best": best,
            "shortages": self.nearest.needs.shortages(self.scenario.hardware),
        }


def fit(scenario: Scenario, given: Collection[str] = (), *, exact: bool = False) -> Fit:
    """The fastest plan of a model on given hardware; arguments and errors as for ``frontier``."""
    search = Search(scenario, given, exact=exact)
    best = search.fastest()
    return Fit(scenario, best, search.nearest())
