"""Searches the options of a run: which of them fit, and how long their steps take, by simulation.

The options have too many combinations to simulate all of them. The search begins with every policy and changes one
option at a time, from each plan that no other one beats (Pareto local search: Paquete, Chiarandini and Stuetzle 2004).
So an option more costs simulations in proportion to its values, and is one line of ``dimensions``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zenflow_compile.options.options import Options
from zenflow_compile.performance.memory import Needs
from zenflow_compile.prediction.auto_policy import WORTH_IT, resolve_stride
from zenflow_compile.prediction.forecast import Forecast, changed, departures, forecast, needs
from zenflow_compile.prediction.scenario import Scenario

Dimension = tuple[Mapping[str, Any], ...]
"""Alternatives of an option, or of several together. Those next to each other differ the least."""

Choice = tuple[int, ...]
"""Number of the chosen alternative, by dimension."""

Memory = Callable[[Forecast], tuple[int, int]]

ALIKE = 0.04
"""Difference of memory, as a share of the frontier's largest, below which a plan is not shown next to another one."""

NEAR = 1.1
"""The fastest plan is searched from those whose step takes at most so many times as long as the fastest known one."""

PATIENCE = 8
"""The search for the fastest plan ends after the neighbors of this many plans in a row were not faster."""

_PLACES: Dimension = (
    {"policy": "resident"},
    {"policy": "twinflow"},
    {"policy": "zero_offload"},
    {"policy": "deep_optimizer_states"},
    {"policy": "zenflow"},
    {"policy": "zenflow", "offload_device": "nvme"},
    {"policy": "zero_infinity"},
)
_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # of all optimizer state


def dimensions(scenario: Scenario, given: Collection[str] = ()) -> tuple[Dimension, ...]:
    """What is searched: first where the state lives, then an option a line.

    The first alternative is the simplest one, and exact where others are not.

    Args:
        given: names of options that the user chose. They keep the values that the scenario has.
    """
    searched: tuple[Dimension, ...] = (
        _PLACES,
        _residents(scenario, given),
        tuple({"ratio": ratio} for ratio in (1.0, 0.75, 0.5, 0.25)),
        ({"update_stride": None}, {"update_stride": "auto"}),
        ({"offload_weights": False}, *({"offload_weights": share} for share in (0.5, 1.0))),
        tuple({"topk_ratio": ratio} for ratio in (0.1, 0.05, 0.02)),
        tuple(
            {"update_interval": steps} for steps in (1, 2, 4)
        ),  # longer ones cost too much loss (docs/convergence.md)
        _fewer_bytes(scenario),
        ({"gradient_compression": None}, {"gradient_compression": "int8"}),
        ({"accumulate_on_device": False}, {"accumulate_on_device": True}),
        ({"host_window_bytes": None}, *({"host_window_bytes": size} for size in _state_shares(scenario))),
    )
    fixed = {name: getattr(scenario.options, name) for name in given}
    if scenario.policy != "auto":
        fixed["policy"] = scenario.policy
    free = [[each for each in found if _agrees(each, fixed)] for found in searched]
    return tuple(tuple(found) for found in free if found)


def _agrees(alternative: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
    return all(fixed.get(name, value) == value for name, value in alternative.items())


def _fewer_bytes(scenario: Scenario) -> Dimension:
    """Ways to store state and share buffers, by falling bytes, exact ones first.

    They are one dimension, since most of these plans differ in memory alone.
    """
    split = scenario.dtype == "bf16"
    ways = [("fp32", False, False), ("fp32", False, True), ("fp32", split, True), ("bf16", split, True)]
    return tuple(
        {"state_dtype": dtype, "split_master": split_master, "shared_buffers": shared}
        for dtype, split_master, shared in dict.fromkeys([*ways, ("fp8", split, True)])
    )


def _residents(scenario: Scenario, given: Collection[str]) -> Dimension:
    """From no resident parameters to seven eighths of them."""
    most = scenario.options.device_share
    shares = [most] if "device_share" in given or not most else [0.0, most]
    spare = [{"device_share": most, "spare_device_bytes": size} for size in _state_shares(scenario)]
    return (
        *({"device_share": share} for share in shares),
        *(each for each in spare if "spare_device_bytes" not in given),
    )


def _state_shares(scenario: Scenario) -> list[int]:
    """Bytes of shares of the optimizer state, of each device, in whole GB if it is large."""
    state = sum(param.numel for param in scenario.model.params) * 12 // scenario.hardware.devices
    unit = 10**9 if state > 20e9 else 1
    return sorted({round(share * state / unit) * unit for share in _SHARES} - {0})


@dataclass(frozen=True, slots=True)
class Candidate:
    """Options and the memory that they need; ``missing``: bytes of it that the hardware does not have."""

    options: Options
    needs: Needs
    missing: int

    @property
    def pasted(self) -> dict[str, Any]:
        """The options to paste."""
        return changed(self.options)

    @property
    def device(self) -> int:
        """Bytes of a device."""
        return sum(self.needs.device.values())

    @property
    def host(self) -> int:
        """Bytes of the node."""
        return sum(self.needs.host.values())


class Search:
    """Candidates and forecasts of one scenario, each computed one time.

    Args:
        scenario: with the memory of the hardware that a plan may use.
        given: see ``dimensions``.
        exact: only plans that give AdamW's numbers, to rounding.
    """

    def __init__(self, scenario: Scenario, given: Collection[str] = (), *, exact: bool = False) -> None:
        self.scenario = scenario
        self.exact = exact
        self.dimensions = dimensions(scenario, given)
        self._candidates: dict[str, Candidate | None] = {}
        self._found: dict[str, tuple[Choice, Forecast]] = {}

    @property
    def forecasts(self) -> list[Forecast]:
        """All that were simulated; each of them fits."""
        return [found for _, found in self._found.values()]

    def starts(self) -> Iterator[Choice]:
        """The simplest choice of every place for the state; where it does not fit, a smaller one that nearly does."""
        for place in range(len(self.dimensions[0])):
            choice = (place, *(0 for _ in self.dimensions[1:]))
            if (candidate := self.candidate(choice)) is not None:
                yield self._smaller(choice, candidate, 0)

    def neighbors(self, choice: Choice) -> Iterator[Choice]:
        """Choices that differ in one dimension: in any place, else in the next alternative.

        One that does not fit also differs in other dimensions, which make it smaller.
        """
        for number, found in enumerate(self.dimensions):
            near = range(len(found)) if number == 0 else (choice[number] - 1, choice[number] + 1)
            for index in near:
                other = (*choice[:number], index, *choice[number + 1 :])
                if index in range(len(found)) and (candidate := self.candidate(other)) is not None:
                    yield self._smaller(other, candidate, number)

    def candidate(self, choice: Choice) -> Candidate | None:
        """The memory of a choice; None for options that exclude each other, or have no effect together."""
        options = self._options(choice)
        if options is None:
            return None
        key = _key(options)
        if key not in self._candidates:
            self._candidates[key] = self._needed(options)
        return self._candidates[key]

    def _needed(self, options: Options) -> Candidate | None:
        try:
            needed = needs(options, self.scenario)
        except ValueError:  # the model cannot have them, such as split masters of fp32 weights
            return None
        return Candidate(options, needed, sum(needed.shortages(self.scenario.hardware).values()))

    def simulate(self, choice: Choice) -> Forecast | None:
        """The forecast of a choice; None if it does not fit, or if a known plan with less memory has no stall."""
        candidate = self.candidate(choice)
        if candidate is None or candidate.missing:
            return None
        key = _key(candidate.options)
        if key not in self._found:
            if self._beaten(candidate):
                return None
            self._found[key] = (choice, forecast(candidate.options, self.scenario))
        return self._found[key][1]

    def nearest(self) -> Candidate:
        """The candidate with the fewest missing bytes.

        Raises:
            ValueError: no options are left to search.
        """
        found = [candidate for candidate in self._candidates.values() if candidate is not None]
        if not found:
            raise ValueError("the given options exclude each other in every plan; leave some of them out")
        return min(found, key=lambda each: each.missing)

    def fastest(self) -> Forecast | None:
        """The fastest plan that fits, found by the neighbors of the fastest ones in turn; None if none fits.

        The search ends at the first plan in which the device does not wait, or by ``PATIENCE``. Of plans that are
        hardly slower than the fastest, it returns the one that is nearest to AdamW.
        """
        for choice in self.starts():
            found = self.simulate(choice)
            if found is not None and _is_free(found):
                return found
        explored: set[str] = set()
        not_faster = 0
        while self._found:
            best = min(self.forecasts, key=lambda each: each.step_s)
            near = [
                (found.step_s, key)
                for key, (_, found) in self._found.items()
                if found.step_s <= NEAR * best.step_s and key not in explored
            ]
            if not near or _is_free(best) or not_faster == PATIENCE:
                return min(as_fast(self.forecasts), key=_departure)
            _, key = min(near)
            explored.add(key)
            for neighbor in self.neighbors(self._found[key][0]):
                self.simulate(neighbor)
            not_faster = not_faster + 1 if min(each.step_s for each in self.forecasts) == best.step_s else 0
        return None

    def explore(self) -> list[Forecast]:
        """Change one option at a time from every plan on a frontier, until no better one is found.

        Returns:
            All plans that were simulated.
        """
        for choice in self.starts():
            self.simulate(choice)
        explored: set[str] = set()
        while keys := self._on_frontiers() - explored:
            explored |= keys
            for key in sorted(keys):
                for choice in self.neighbors(self._found[key][0]):
                    self.simulate(choice)
        return self.forecasts

    def _on_frontiers(self) -> set[str]:
        best = [each for memory in (device_first, host_first) for each in chain(self.forecasts, memory)]
        return {key for key, (_, found) in self._found.items() if any(found is each for each in best)}

    def _options(self, choice: Choice) -> Options | None:
        changes: dict[str, Any] = {}
        for number, found in zip(choice, self.dimensions, strict=True):
            changes |= found[number]
        scenario = self.scenario
        try:
            options = replace(scenario.options, **changes)
        except ValueError:  # the options exclude each other: no candidate
            return None
        if (options.accumulate_on_device and options.longest_window == 1) or (self.exact and departures(options)):
            return None
        resolved = resolve_stride(options, scenario.hardware, scenario.model.params)
        # Every subgroup has a parameter at least: such a stride streams nothing, as None does.
        nothing = resolved.stride is not None and resolved.stride > len(scenario.model.params)
        return None if nothing else resolved

    def _smaller(self, choice: Choice, candidate: Candidate, fixed: int) -> Choice:
        """The choice that is reached by the alternatives with the fewest missing bytes, a dimension after another.

        The place and the dimension ``fixed`` stay.
        """
        before = None
        while candidate.missing and candidate.missing != before:
            before = candidate.missing
            for number, found in enumerate(self.dimensions[1:], start=1):
                for index in range(len(found)) if number != fixed and candidate.missing else ():
                    other = (*choice[:number], index, *choice[number + 1 :])
                    changed_one = self.candidate(other)
                    if changed_one is not None and changed_one.missing < candidate.missing:
                        choice, candidate = other, changed_one
        return choice

    def _beaten(self, candidate: Candidate) -> bool:
        """Whether plans in which the device does not wait need less of each memory: more memory saves no time."""
        free = [found for _, found in self._found.values() if _is_free(found)]
        return any(found.device_bytes <= candidate.device for found in free) and any(
            found.host_bytes <= candidate.host for found in free
        )


def _is_free(found: Forecast) -> bool:
    """Whether the device waits for nothing, or hardly."""
    return found.stall_s <= WORTH_IT * found.step_s


def _departure(found: Forecast) -> tuple[int, int, float]:
    """Number of departures from AdamW and length of an update window, then the time of a step."""
    return len(found.departures), Options.from_keywords(**found.options).longest_window, found.step_s


def _key(options: Options) -> str:
    return repr(changed(options))


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
        if memory(each)[0] <= memory(kept[-1])[0] - ALIKE * memory(first)[0] and each.step_s > first.step_s:
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
