"""The stride with the shortest simulated step, from that of Deep Optimizer States' Equation 1 on.

The equation balances the host's updates and the device's while nothing else runs. It counts neither the end of the
backward, whose gradients arrive late, nor the memory that copies and updates share. Simulations count both.
"""

from __future__ import annotations

from dataclasses import replace

from zenflow_compile.options.options import Options
from zenflow_compile.performance.equations import NEVER
from zenflow_compile.prediction.estimate import Estimator
from zenflow_compile.prediction.forecast import WORTH_IT, Scenario, resolve_stride

STRIDES = (1, 2, 3, 4, 6, 8, 12)
"""Strides that are tried wherever Equation 1's is, next to its neighbors and none."""


def fastest_stride(options: Options, scenario: Scenario) -> Options:
    """``options`` with a number for an ``update_stride`` that is left to the planner: the fastest of a few.

    Those with which the plan fits come first. Equation 1's stays unless another one saves ``WORTH_IT`` of the step.

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
    near = (each for each in (equation - 1, equation + 1) if each >= 1)

    def step(stride: int) -> tuple[bool, float]:
        tried = replace(options, update_stride=stride)
        needed = estimator.needs(tried, recompute=recompute)
        found = estimator.forecast(tried, needed, recompute=recompute)
        assert found is not None
        return not found.fits, found.step_s

    steps = {stride: step(min(stride, NEVER)) for stride in dict.fromkeys((equation, *near, *STRIDES, NEVER))}
    best = min(steps, key=lambda stride: steps[stride])
    (lacks, before), (_, after) = steps[equation], steps[best]
    return replace(options, update_stride=best) if lacks or after < (1 - WORTH_IT) * before else first
