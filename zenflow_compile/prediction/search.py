"""Searches the options of a run: which of them fit, and how long their steps take, by simulation.

``answers.py`` has what is asked of it; the questions differ in the options that are given.

The options have too many combinations to simulate all of them. The search begins with every policy and changes one
option at a time, from each plan that no other one beats (Pareto local search: Paquete, Chiarandini and Stuetzle 2004).
So an option more costs simulations in proportion to its values, and is one line of ``dimensions``. Estimates are
compared (``estimate.py``), and forecasts are returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import Any

from zenflow_compile.options.options import OPTION_NAMES, Options
from zenflow_compile.performance.memory import MemoryNeeds
from zenflow_compile.prediction.dimensions import dimensions, ways_to_divide
from zenflow_compile.prediction.estimate import Estimator
from zenflow_compile.prediction.forecast import (
    SOME_DISK,
    WORTH_IT,
    Forecast,
    Scenario,
    departures,
    forecast,
    needs,
    resolve_stride,
)

Choice = tuple[int, ...]
"""Number of the chosen alternative, by dimension."""

Key = tuple[Any, ...]
"""All options of a run, and whether it recomputes activations."""

_VALUES = attrgetter(*OPTION_NAMES)

Memory = Callable[[Forecast], tuple[int, int]]

ALIKE = 0.04
"""Difference of memory, as a share of the frontier's largest, below which a plan is not shown next to another one."""

NEAR = 1.1
"""The fastest plan is searched from those whose step takes at most so many times as long as the fastest known one."""

PATIENCE = 6
"""The search for the fastest plan ends after the neighbors of this many plans in a row were not faster."""

_WALKED = {"device_share", "ratio", "update_stride"}  # what is searched for each place, whatever else is


@dataclass(frozen=True, slots=True)
class Candidate:
    """Options, whether activations are recomputed, and the memory that they need.

    Attributes:
        shortages: missing bytes by memory.
        lack: how far they are from fitting, see ``MemoryNeeds.lack``; 0 if they fit.
    """

    options: Options
    recompute: bool
    needs: MemoryNeeds
    shortages: Mapping[str, int]
    lack: float

    @property
    def key(self) -> Key:
        """Equal for candidates that are the same run."""
        return _key(self.options, recompute=self.recompute)


class SearchSpace:
    """The options that a search may choose, and the memory that they need, each computed one time.

    Args:
        scenario: with the memory of the hardware that a plan may use.
        given: see ``dimensions``.
        exact: only plans that give the rule's numbers in every step, to rounding.
        divide_only: only how the tokens of a step are divided, and recomputation; the scenario has the options.
    """

    def __init__(
        self, scenario: Scenario, given: Collection[str] = (), *, exact: bool = False, divide_only: bool = False
    ) -> None:
        self.scenario = scenario
        self.given = given
        self.exact = exact
        self.estimator = Estimator(scenario)
        self.dimensions = ways_to_divide(scenario) if divide_only else dimensions(scenario, given, self.estimator)
        self.places = range(len(self.dimensions[0]))
        self._read = [self._dimensions_of(each) for each in self.dimensions[0]]
        self._strides: dict[tuple[int, str], int | None] = {}
        self._chosen: dict[Choice, Candidate | None] = {}
        self._candidates: dict[Key, Candidate | None] = {}

    @property
    def known(self) -> dict[Choice, Candidate]:
        """The candidates of the choices that were looked at."""
        return {choice: found for choice, found in self._chosen.items() if found is not None}

    def starts(self) -> Iterator[Choice]:
        """The simplest choice of every place for the state; where it does not fit, a smaller one that nearly does.

        TwinFlow begins with a share of the state on the device, since without one it is ``zero_offload``.
        """
        for number in self.places:
            choice = (number, *(0 for _ in self.dimensions[1:]))
            if (candidate := self.candidate(choice)) is not None:
                yield self._smaller(choice, candidate, 0)
            else:
                yield from islice((other for other in self.neighbors(choice) if other[0] == number), 1)

    def neighbors(self, choice: Choice) -> Iterator[Choice]:
        """Choices that differ in one dimension: in any place or division, else in the next alternative.

        One that does not fit also differs in other dimensions, which make it smaller, in two ways: by small changes,
        and by any.
        """
        for number, found in enumerate(self.dimensions):
            anywhere = number == 0 or "gradient_accumulation_steps" in found[0]  # memory is not monotone in it
            indices = range(len(found)) if anywhere else (choice[number] - 1, choice[number] + 1)
            for index in indices if number in self._read[choice[0]] else ():
                other = (*choice[:number], index, *choice[number + 1 :])
                if index in range(len(found)) and (candidate := self.candidate(other)) is not None:
                    yield from dict.fromkeys(
                        self._smaller(other, candidate, number, near=near) for near in (True, False)
                    )

    def _dimensions_of(self, place: Mapping[str, Any]) -> set[int]:
        """Numbers of the dimensions that a place for the state reads."""
        changes = place if "nvme_path" in place else {**place, "nvme_path": SOME_DISK}
        options = Options(**changes)
        unread = {name for name in OPTION_NAMES if not options.reads(name)}
        return {number for number, found in enumerate(self.dimensions) if any(found[0].keys() - unread)}

    def candidate(self, choice: Choice) -> Candidate | None:
        """The memory of a choice; None for options that exclude each other, or have no effect together."""
        read = self._read[choice[0]]
        choice = tuple(index if number in read else 0 for number, index in enumerate(choice))
        if choice not in self._chosen:
            self._chosen[choice] = self._candidate(choice)
        return self._chosen[choice]

    def _candidate(self, choice: Choice) -> Candidate | None:
        changes: dict[str, Any] = {}
        for number, found in zip(choice, self.dimensions, strict=True):
            changes |= found[number]
        recompute = changes.pop("recompute")
        options = self._options(changes)
        if options is None:
            return None
        key = _key(options, recompute=recompute)
        if key not in self._candidates:
            try:
                needed = self.estimator.needs(options, recompute=recompute)
                self._candidates[key] = self._with_needs(options, recompute, needed)
            except ValueError:  # the model cannot have them, such as split masters of fp32 weights
                self._candidates[key] = None
        return self._candidates[key]

    def _with_needs(self, options: Options, recompute: bool, needed: MemoryNeeds) -> Candidate:
        hardware = self.scenario.hardware
        return Candidate(options, recompute, needed, needed.shortages(hardware), needed.lack(hardware))

    def candidate_of(self, key: Key) -> Candidate:
        """The known candidate that is this run."""
        candidate = self._candidates[key]
        assert candidate is not None
        return candidate

    def nearest(self) -> Candidate:
        """The known candidate that lacks the least.

        Raises:
            ValueError: no options are left to search.
        """
        found = [candidate for candidate in self._candidates.values() if candidate is not None]
        if not found:
            raise ValueError("the given options exclude each other in every plan; leave some of them out")
        return self.exactly(min(found, key=lambda each: each.lack))

    def exactly(self, candidate: Candidate) -> Candidate:
        """The candidate with the memory of a forecast."""
        if self.estimator.is_exact:
            return candidate
        scenario = replace(self.scenario, recompute=candidate.recompute)
        return self._with_needs(candidate.options, candidate.recompute, needs(candidate.options, scenario))

    def remedies(self) -> dict[str, int]:
        """By memory, the least bytes of it with which a plan fits, if the hardware has enough of the others."""
        found = {memory: self._least(memory) for memory in ("device", "host", "disk")}
        return {memory: each.needs.sums()[memory] for memory, each in found.items() if each is not None}

    def _least(self, memory: str) -> Candidate | None:
        """The known plan that needs the least of one memory, which it lacks, and fits the others; None if none does."""
        known = [each for each in self._candidates.values() if each is not None and each.shortages.keys() == {memory}]
        exact = map(self.exactly, sorted(known, key=lambda each: each.shortages[memory]))
        return next((each for each in exact if each.shortages.keys() == {memory}), None)

    def frugal(self, place: int) -> Choice | None:
        """A choice of a place that fits, or else the one that lacks the least; None if the place has none.

        Unlike ``_smaller`` it passes choices that lack more in sum: those of which none lacks less of every memory are
        changed in any dimension, the nearest first, until there is no other one.
        """
        known = {choice: found for choice, found in self.known.items() if choice[0] == place}
        best: dict[Choice, Candidate] = {}
        explored: set[Choice] = set()
        while known:
            for choice, new in known.items():
                if not any(_no_worse(each, new) for each in best.values()):
                    best = {other: each for other, each in best.items() if not _no_worse(new, each)} | {choice: new}
            nearest = min(best, key=lambda choice: best[choice].lack)
            if not best[nearest].lack:
                return nearest
            left = best.keys() - explored
            if not left:
                return nearest
            choice = min(left, key=lambda choice: (best[choice].lack, choice))
            explored.add(choice)
            others = (
                (*choice[:number], index, *choice[number + 1 :])
                for number in self._read[place] - {0}
                for index in self._apart(choice, number)
            )
            known = {other: found for other in others if (found := self.candidate(other)) is not None}
        return None

    def _apart(self, choice: Choice, number: int) -> set[int]:
        """The alternatives of a dimension next to a choice's, and the first and the last one."""
        last = len(self.dimensions[number]) - 1
        return {0, max(0, choice[number] - 1), min(last, choice[number] + 1), last}

    def fitting(self) -> Candidate | None:
        """A plan that fits, without its time; None if none does."""
        simple = [*self.starts()]
        of_places = (self.frugal(place) for place in self.places)
        for choice in (choice for found in (simple, of_places) for choice in found if choice is not None):
            candidate = self.candidate(choice)
            if candidate is not None and not candidate.lack and not (exact := self.exactly(candidate)).lack:
                return exact
        return None

    def _options(self, changes: Mapping[str, Any]) -> Options | None:
        scenario = self.scenario
        try:
            options = replace(scenario.options, **changes)
        except ValueError:  # the options exclude each other: no candidate
            return None
        searched = {name for name, value in changes.items() if value and name not in self.given}
        sums = "gradient_transfer" in searched and options.gradient_transfer == "mean"
        in_vain = sums and options.longest_window == 1
        in_vain |= options.policy == "twinflow" and "ratio" in searched and options.ratio == 1.0
        if in_vain or (self.exact and departures(options)):
            return None
        resolved = self._with_stride(options)
        # Every subgroup has a parameter at least: such a stride streams nothing, as None does.
        streams_nothing = resolved.stride is not None and resolved.stride > len(scenario.model.params)
        return None if streams_nothing and "update_stride" in searched else resolved

    def _with_stride(self, options: Options) -> Options:
        """With the stride of Equation 1 if none is given, which depends on few options."""
        if not options.measures_stride:
            return options
        key = (options.longest_window, options.state_dtype)
        if key not in self._strides:
            resolved = resolve_stride(options, self.scenario.hardware, self.scenario.model.params)
            self._strides[key] = resolved.stride
        return replace(options, update_stride=self._strides[key])

    def _smaller(self, choice: Choice, candidate: Candidate, fixed: int, *, near: bool = False) -> Choice:
        """The choice that is reached by the alternatives that lack the least, a dimension after another.

        The place and the dimension ``fixed`` stay.

        Args:
            near: try the next alternatives of a dimension only, as often as that helps.
        """
        before = None
        read = self._read[choice[0]] - {0, fixed}
        while candidate.lack and candidate.lack != before:
            before = candidate.lack
            for number in sorted(read):
                count, at = len(self.dimensions[number]), choice[number]
                for index in (at - 1, at + 1) if near else range(count):
                    if not candidate.lack or not 0 <= index < count:
                        continue
                    other = (*choice[:number], index, *choice[number + 1 :])
                    changed_one = self.candidate(other)
                    if changed_one is not None and changed_one.lack < candidate.lack:
                        choice, candidate = other, changed_one
        return choice

    @cached_property
    def may_keep_activations(self) -> bool:
        """Return whether a plan fits without recomputation."""
        numbers = [number for number, found in enumerate(self.dimensions) if {"recompute": False} in found]
        for number in numbers:
            for start in self.places:
                choice = (start, *(0 for _ in self.dimensions[1:]))
                if (candidate := self.candidate(choice)) is None:
                    continue
                fitting = self.candidate(self._smaller(choice, candidate, number))
                if fitting is not None and not fitting.lack:
                    return True
        return False


class Search:
    """Estimates of a space's candidates, each computed one time, and forecasts of those that are returned."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self._found: dict[Key, tuple[Choice, Forecast]] = {}  # estimates
        self._forecasts: dict[Key, Forecast] = {}

    @property
    def estimates(self) -> list[Forecast]:
        """All that were simulated; each of them fits, as far as estimates say."""
        return [found for _, found in self._found.values()]

    def simulate(self, choice: Choice, *, beaten: bool = False, within: float = math.inf) -> Forecast | None:
        """The estimate of a choice.

        Args:
            beaten: also if less memory suffices.
            within: seconds of a step that are of interest.

        Returns:
            None if it does not fit, is beaten, or takes longer than ``within`` at any schedule.
        """
        candidate = self.space.candidate(choice)
        if candidate is None or candidate.lack:
            return None
        key = candidate.key
        if key not in self._found:
            if not beaten and self._beaten(candidate):
                return None
            found = self.space.estimator.forecast(
                candidate.options, candidate.needs, recompute=candidate.recompute, within=within
            )
            if found is None:
                return None
            self._found[key] = choice, found
        return self._found[key][1]

    def forecast(self, estimate: Forecast) -> Forecast:
        """The forecast of a plan that was estimated."""
        (key,) = (key for key, (_, found) in self._found.items() if found is estimate)
        return self._forecast(self.space.candidate_of(key))

    def _forecast(self, candidate: Candidate) -> Forecast:
        if (key := candidate.key) not in self._forecasts:
            known = self._found.get(key) if self.space.estimator.is_exact else None
            scenario = replace(self.space.scenario, recompute=candidate.recompute)
            self._forecasts[key] = forecast(candidate.options, scenario) if known is None else known[1]
        return self._forecasts[key]

    def fastest(self, *, rows: bool = False) -> Forecast | None:
        """The fastest plan that fits; None if none fits.

        It is found by the neighbors of the fastest ones in turn, until the device does not wait, or by ``PATIENCE``;
        then by walks in each place. Where nothing fits at first, ``frugal`` looks further. Of plans that are hardly
        slower, the one that is nearest to AdamW is returned.

        Args:
            rows: also find the fastest one of each place.
        """
        for choice in self.space.starts():
            self.simulate(choice, within=self._of_interest(rows))
        if rows or not self._found:
            self._try_frugal()
        explored: set[Key] = set()
        not_faster = 0
        while self._found:
            best = min(self.estimates, key=lambda each: each.step_s)
            near = [
                (found.step_s, key)
                for key, (_, found) in self._found.items()
                if found.step_s <= NEAR * best.step_s and key not in explored
            ]
            if not near or self._is_ideal(best) or not_faster == PATIENCE:
                break
            _, key = min(near, key=lambda pair: pair[0])  # keys have None in them, which has no order
            explored.add(key)
            for neighbor in self.space.neighbors(self._found[key][0]):
                self.simulate(neighbor, within=self._of_interest(rows))
            not_faster = not_faster + 1 if min(each.step_s for each in self.estimates) == best.step_s else 0
        for choice in self.space.starts():
            self._walk(choice, rows=rows)
        return self._nearest_of_fastest() or self._any()

    def _try_frugal(self) -> None:
        """Simulate a plan of each place in which nothing else fits."""
        for place in self.space.places:
            if all(choice[0] != place for choice, _ in self._found.values()):
                choice = self.space.frugal(place)
                if choice is not None:
                    self.simulate(choice, beaten=True)

    def _any(self) -> Forecast | None:
        """A known plan that fits by a forecast, where estimates of the fastest ones were too low."""
        fitting = {choice: each for choice, each in self.space.known.items() if not each.lack}
        for choice in sorted(fitting, key=lambda choice: fitting[choice].needs.sums()["host"]):
            if not self.space.exactly(fitting[choice]).lack:
                estimate = self.simulate(choice, beaten=True)
                assert estimate is not None
                return self.forecast(estimate)
        return None

    def _nearest_of_fastest(self) -> Forecast | None:
        """Of plans that are hardly slower than the fastest one, the one that is nearest to AdamW.

        Estimates say which ones to forecast: one for each departure from AdamW.
        """
        while self._found:
            fastest = self.forecast(min(self.estimates, key=lambda each: each.step_s))
            if not fastest.fits:
                self._drop(fastest)
                continue
            tried: set[tuple[int, int]] = set()
            for estimate in sorted(as_fast(self.estimates), key=_departure):
                if (departure := _departure(estimate)[:2]) not in tried:
                    tried.add(departure)
                    found = self.forecast(estimate)
                    if found.fits and found.step_s * (1 - WORTH_IT) <= fastest.step_s:
                        return found
            return fastest
        return None

    def _of_interest(self, rows: bool) -> float:
        """Seconds of a step beyond which a plan is neither returned nor a way to one."""
        if rows or not self._found:
            return math.inf
        return NEAR * min(each.step_s for each in self.estimates)

    def _drop(self, found: Forecast) -> None:
        """Forget the estimate of a forecast that does not fit: packing its gradient buffers takes more."""
        for key, each in self._forecasts.items():
            if each is found:
                del self._found[key]

    def explore(self) -> list[Forecast]:
        """Change one option at a time from every plan on a frontier, until no better one is found.

        Returns:
            Estimates of all plans that were simulated.
        """
        for choice in self.space.starts():
            self.simulate(choice)
        self._try_frugal()
        explored: set[Key] = set()
        while keys := self._on_frontiers() - explored:
            explored |= keys
            for key in [key for key in self._found if key in keys]:
                for choice in self.space.neighbors(self._found[key][0]):
                    self.simulate(choice)
        return self.estimates

    def options_of(self, found: Forecast) -> Options:
        """All options of a plan that was forecast."""
        (key,) = (key for key, plan in self._forecasts.items() if plan is found)
        return self.space.candidate_of(key).options

    def by_place(self, best: Forecast | None) -> list[Forecast]:
        """The fastest known plan of each place, or ``best`` of its own; the nearest to fitting if none fits."""
        of_best = {key for key, plan in self._forecasts.items() if plan is best}
        plans = []
        for place in self.space.places:
            known = {key: plan for key, (choice, plan) in self._found.items() if choice[0] == place}
            ordered = sorted(known, key=lambda key: (key not in of_best, known[key].step_s))
            fitting = (plan for key in ordered if (plan := self._forecast(self.space.candidate_of(key))).fits)
            others = [found for choice, found in self.space.known.items() if choice[0] == place]
            if (fastest := next(fitting, None)) is not None:
                plans.append(fastest)
            elif others:
                plans.append(self._forecast(min(others, key=lambda each: each.lack)))
        return plans

    def _walk(self, start: Choice, *, rows: bool) -> None:
        """Change what stays resident, the ratio or the stride of a place's fastest plan until none is faster."""
        self.simulate(start, beaten=True, within=self._of_interest(rows))
        before: Forecast | None = None
        while known := [each for each in self._found.values() if each[0][0] == start[0]]:
            choice, found = min(known, key=lambda each: each[1].step_s)
            if found is before or found.is_free:
                return
            before = found
            for number, alternatives in enumerate(self.space.dimensions):
                for index in range(len(alternatives)) if alternatives[0].keys() <= _WALKED else ():
                    other = (*choice[:number], index, *choice[number + 1 :])
                    self.simulate(other, beaten=True, within=min(found.step_s, self._of_interest(rows)))

    def _on_frontiers(self) -> set[Key]:
        best = [each for memory in (device_first, host_first) for each in chain(self.estimates, memory)]
        return {key for key, (_, found) in self._found.items() if any(found is each for each in best)}

    def _is_ideal(self, found: Forecast) -> bool:
        """Return whether the device waits for nothing, and recomputes nothing that it might not."""
        return found.is_free and not (found.recompute and self.space.may_keep_activations)

    def _beaten(self, candidate: Candidate) -> bool:
        """Return whether plans in which the device does not wait need less of each memory: more saves no time."""
        free = [found for _, found in self._found.values() if self._is_ideal(found)]
        return any(found.device_bytes <= sum(candidate.needs.device.values()) for found in free) and any(
            found.host_bytes <= sum(candidate.needs.host.values()) for found in free
        )


def _no_worse(one: Candidate, other: Candidate) -> bool:
    """Whether the first lacks no more of any memory."""
    return all(size <= other.shortages.get(memory, 0) for memory, size in one.shortages.items())


def _departure(found: Forecast) -> tuple[int, int, float]:
    """Number of departures from AdamW and length of an update window, then the time of a step."""
    return len(found.departures), Options.from_keywords(**found.options).longest_window, found.step_s


def _key(options: Options, *, recompute: bool) -> Key:
    return (*_VALUES(options), recompute)


def as_fast(forecasts: Collection[Forecast]) -> list[Forecast]:
    """Those that are as fast as the fastest one, but for ``WORTH_IT``."""
    fastest = min(each.step_s for each in forecasts)
    return [each for each in forecasts if each.step_s * (1 - WORTH_IT) <= fastest]


def chain(forecasts: Collection[Forecast], memory: Memory) -> list[Forecast]:
    """What less of one memory costs: plans that are slower the less of it they need.

    The first needs the least of it among those that are as fast as the fastest one, but for ``WORTH_IT``; the last
    needs the least of all. Those in between are not ``ALIKE``.

    Args:
        memory: ``device_bytes`` or ``host_bytes``, and the other one, which decides between equal plans.
    """
    if not forecasts:
        return []
    first = min(as_fast(forecasts), key=lambda each: (*memory(each), each.step_s))
    last = min(forecasts, key=lambda each: (memory(each)[0], each.step_s, memory(each)[1]))
    kept = [first]
    for each in sorted(forecasts, key=lambda each: (each.step_s, *memory(each))):
        less = memory(kept[-1])[0] - memory(each)[0]
        if less > 0 and less >= ALIKE * memory(first)[0] and each.step_s > first.step_s:
            kept.append(each)
    if memory(kept[-1])[0] > memory(last)[0]:
        kept.append(last)
    return kept


def device_first(each: Forecast) -> tuple[int, int]:
    """Device memory, then host memory."""
    return each.device_bytes, each.host_bytes


def host_first(each: Forecast) -> tuple[int, int]:
    """Host memory, then device memory."""
    return each.host_bytes, each.device_bytes
