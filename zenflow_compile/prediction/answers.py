"""What is asked of a search: the fastest plan, the frontier of memory and time, and with what a model would fit.

``zf.plan``, ``plan --frontier`` and ``plan --models`` have their answers from here; ``policy="auto"`` from
``auto_policy.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zenflow_compile.prediction.auto_policy import kept_by_auto
from zenflow_compile.prediction.forecast import SOME_DISK, Forecast, Scenario, node_plan
from zenflow_compile.prediction.search import Candidate, Search, SearchSpace, chain, device_first, host_first


@dataclass(frozen=True, slots=True)
class Frontier:
    """Plans that fit, the fastest first; each one is slower than the one before and needs less memory.

    Attributes:
        fastest: the shortest step of all plans that were simulated. Others are slower than it.
        device: the first needs the least device memory of those that are hardly slower than ``fastest``; then less of
            it, down to the least of all. Each takes the host memory that it needs.
        host: likewise with host memory.
        nearest: the plan that lacks the least; it fits if any does.
        remedies: see ``Fit``.
    """

    scenario: Scenario
    fastest: Forecast | None
    device: tuple[Forecast, ...]
    host: tuple[Forecast, ...]
    nearest: Candidate
    remedies: Mapping[str, int]

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
            "shortages": dict(self.nearest.shortages),
            "fits_with": dict(self.remedies),
        }


def frontier(scenario: Scenario, given: Collection[str] = (), *, exact: bool = False) -> Frontier:
    """Search the plans of a model on given hardware.

    Args:
        scenario: with the memory that a plan may use.
        given: names of options that the user chose. All others are searched.
        exact: only plans that give the rule's numbers in every step, to rounding.

    Raises:
        ValueError: the given options exclude each other under every policy, or the hardware lacks a number.
    """
    search = Search(SearchSpace(scenario, given, exact=exact))
    estimates = search.explore()
    shown = [*chain(estimates, device_first), *chain(estimates, host_first)]
    if estimates:
        shown.append(min(estimates, key=lambda each: each.step_s))
    forecasts = {id(each): search.forecast(each) for each in shown}
    found = [each for each in forecasts.values() if each.fits]
    return Frontier(
        scenario=scenario,
        fastest=min(found, key=lambda each: each.step_s, default=None),
        device=tuple(chain(found, device_first)),
        host=tuple(chain(found, host_first)),
        nearest=search.space.nearest(),
        remedies={} if found else _remedies(search.space),
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model can be trained.

    Attributes:
        best: its fastest plan, None if none fits. nearest: the plan that lacks the least.
        remedies: if none fits, what one would fit with: by memory its least bytes, ``"files"`` on a disk where the
            hardware has none, and ``"tokens"`` of a step.
    """

    scenario: Scenario
    best: Forecast | None
    nearest: Candidate
    remedies: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Plain data: bytes, seconds, tokens per second."""
        best = None if self.best is None else self.best.as_dict() | {"departures": list(self.best.departures)}
        return {
            "model": self.scenario.model.name,
            "parameters": self.scenario.model.numel,
            "best": best,
            "shortages": dict(self.nearest.shortages),
            "fits_with": dict(self.remedies),
        }


def fit(scenario: Scenario, given: Collection[str] = (), *, exact: bool = False) -> Fit:
    """The fastest plan of a model on given hardware; arguments and errors as for ``frontier``."""
    space = SearchSpace(scenario, given, exact=exact)
    best = Search(space).fastest()
    return Fit(scenario, best, space.nearest(), _remedies(space) if best is None else {})


def _remedies(space: SearchSpace) -> dict[str, int]:
    """What a plan would fit with, see ``Fit``."""
    remedies = space.remedies() | _with_a_disk(space)
    return remedies | (_with_fewer_tokens(space) if space.nearest().shortages.keys() == {"device"} else {})


def _with_a_disk(space: SearchSpace) -> dict[str, int]:
    """Bytes of state in files with which a plan fits if hardware without a disk has one."""
    scenario, given = space.scenario, space.given
    if scenario.hardware.disk_read is not None or "offload_device" in given:
        return {}
    hardware = replace(scenario.hardware, disk_read=1.0, disk_write=1.0, disk_bytes=math.inf)
    options = replace(scenario.options, nvme_path=SOME_DISK)
    fitting = SearchSpace(replace(scenario, hardware=hardware, options=options), given, exact=space.exact).fitting()
    return {} if fitting is None else {"files": fitting.needs.sums()["disk"]}


def _with_fewer_tokens(space: SearchSpace) -> dict[str, int]:
    """Tokens of a step with which a plan fits: a half, a quarter and so on, down to a sequence."""
    tokens = space.scenario.tokens // 2
    while tokens >= max(1, space.scenario.model.context):
        if SearchSpace(replace(space.scenario, tokens=tokens), space.given, exact=space.exact).fitting() is not None:
            return {"tokens": tokens}
        tokens //= 2
    return {}


def divide(scenario: Scenario) -> Forecast:
    """The fastest way to divide the tokens of a step under the scenario's options; the nearest to fitting if none fits.

    ``update_stride`` is resolved.

    Raises:
        ValueError: the model cannot have the options.
    """
    node_plan(scenario.options, replace(scenario, recompute=False))
    search = Search(SearchSpace(scenario, divide_only=True))
    best = search.fastest()
    return search.by_place(None)[0] if best is None else best


def compare(scenario: Scenario) -> tuple[list[Forecast], Forecast | None]:
    """The fastest plan of each place for the state, also where none fits, and the one that ``choose`` takes."""
    search = Search(SearchSpace(scenario, kept_by_auto(scenario.options)))
    best = search.fastest(rows=True)
    return search.by_place(best), best
