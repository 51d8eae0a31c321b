from __future__ import annotations

import pytest

from zenflow_compile.passes.base import Phase
from zenflow_compile.passes.fetch_parameters import fetch_parameters
from zenflow_compile.passes.load_weights import load_weights
from zenflow_compile.passes.pipeline import PIPELINES, check_order
from zenflow_compile.passes.update_parameters import update_parameters


@pytest.mark.parametrize("phase", PIPELINES)
def test_pipelines_are_in_order(phase: Phase) -> None:
    check_order(PIPELINES[phase], phase)


def test_pass_in_the_wrong_phase() -> None:
    with pytest.raises(ValueError, match="fetch_parameters rewrites forward, inference graphs, not backward"):
        check_order((fetch_parameters,), Phase.BACKWARD)


def test_pass_without_the_nodes_it_needs() -> None:
    with pytest.raises(ValueError, match="update_parameters needs the nodes of offload_gradients"):
        check_order((update_parameters,), Phase.BACKWARD)


def test_loads_come_behind_fetches_and_updates() -> None:
    with pytest.raises(ValueError, match="load_weights needs the nodes of fetch_parameters"):
        check_order((load_weights, fetch_parameters), Phase.FORWARD)
    with pytest.raises(ValueError, match="load_weights needs the nodes of update_parameters"):
        check_order((load_weights,), Phase.BACKWARD)


def test_pass_names_are_unique() -> None:
    passes = {each for pipeline in PIPELINES.values() for each in pipeline}
    assert len({each.__name__ for each in passes}) == len(passes)
