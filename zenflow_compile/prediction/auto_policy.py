"""Chooses what ``policy="auto"`` leaves open: the fastest plan that fits, nearest to AdamW."""

from __future__ import annotations

from dataclasses import fields

from zenflow_compile.options.options import Options
from zenflow_compile.prediction.forecast import Scenario
from zenflow_compile.prediction.search import Search, SearchSpace

_LEFT_TO_AUTO = ("policy", "offload_device", "ratio", "update_stride")
"""Options that ``policy="auto"`` searches where they are at their defaults. It keeps those that steer convergence."""


def kept_by_auto(options: Options) -> set[str]:
    """Names of the options that are given under ``policy="auto"``."""
    return {
        each.name
        for each in fields(Options)
        if each.name not in _LEFT_TO_AUTO or getattr(options, each.name) != each.default
    } - {"policy"}


def choose(scenario: Scenario) -> Options:
    """The options that ``policy="auto"`` stands for. Those that their policy does not read stay.

    Raises:
        ValueError: no policy fits.
    """
    search = Search(SearchSpace(scenario, kept_by_auto(scenario.options)))
    if (best := search.fastest()) is not None:
        return search.options_of(best)
    near = search.space.nearest()
    lacks = " and ".join(f"{size / 1e9:.1f} GB of {memory} memory" for memory, size in near.shortages.items())
    raise ValueError(
        f"no policy fits {scenario.hardware.name!r}: {near.options.policy} comes nearest and lacks {lacks}; use fewer "
        "tokens per step, recompute activations, give nvme_path for state in files, or take a smaller model"
    )
