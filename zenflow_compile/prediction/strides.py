"""The stride with the shortest simulated step, from that of Deep Optimizer States' Equation 1 on.

The equation balances the host's updates and the device's while nothing else runs. It counts neither the end of the
backward, whose gradients arrive late, nor the memory that copies and updates share. Simulations count both.
"""

from __future__ import annotations

from dataclasses import replace

from zenflow_compile.options.options import Options
from zenflow_compile.performance.equations import NEVER
from zenflow_compile.prediction.estimate import Estimator
from zenflow_compile.prediction.forecast import Scenario, resolve_stride

STRIDES = (1, 2, 3, 4, 6, 8, 12)
"""Strides that are tried wherever Equation 1's is, next to its neighbors and none."""


def fastest_stride(options: Options, scenario: Scenario) -> Options:
    """``options`` with a number for an ``update_stride`` that is left to the planner: the fastest of a few.

    Those with which the plan fits come first. A stride that is not faster than Equation 1's does not replace it.

    Args:
        scenario: of the run, with its tokens; its options are not read.
    """
    first = resolve_stride(options, scenario.hardware, scenario.model.params)
    if first is options:
        return options
    estimator = Estimator(scenario)
    recompute = scenario.recompute is True
    equation = first.stride
    assert equation is not None
    near = (each for each in (equation - 1, equation, equation + 1) if each >= 1)
    found = []
    for stride in dict.fromkeys((equation, *near, *STRIDES, NEVER)):
        tried = replace(options, update_stride=min(stride, NEVER))
        needed = estimator.needs(tried, recompute=recompute)
        forecast = estimator.forecast(tried, needed, recompute=recompute)
        assert forecast is not None
        found.append((bool(forecast.shortages), forecast.step_s, tried))
    return min(found, key=lambda each: each[:2])[2]
