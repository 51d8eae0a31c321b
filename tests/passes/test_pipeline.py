from __future__ import annotations

import pytest

from zenflow_compile.passes.context import Phase
from zenflow_compile.passes.fetch_parameters import FetchParameters
from zenflow_compile.passes.fuse_nodes import FuseNodes
from zenflow_compile.passes.pipeline import PIPELINES, check_order
from zenflow_compile.passes.update_parameters import UpdateParameters


@pytest.mark.parametrize("phase", PIPELINES)
def test_the_pipelines_are_in_order(phase: Phase) -> None:
    check_order(PIPELINES[phase], phase)


def test_a_pass_in_the_wrong_phase() -> None:
    with pytest.raises(ValueError, match="fetch_parameters rewrites forward, inference graphs, not backward"):
        check_order((FetchParameters(),), Phase.BACKWARD)


def test_a_pass_without_what_it_needs() -> None:
    with pytest.raises(ValueError, match="update_parameters needs offloaded gradients first"):
        check_order((UpdateParameters(),), Phase.BACKWARD)


def test_a_pass_behind_the_fusing() -> None:
    with pytest.raises(ValueError, match="fetch_parameters comes behind the one that fuses"):
        check_order((FuseNodes(), FetchParameters()), Phase.FORWARD)


def test_names_are_unique() -> None:
    names = [graph_pass.name for passes in PIPELINES.values() for graph_pass in set(passes)]
    assert len(set(names)) == len({type(each) for passes in PIPELINES.values() for each in passes})


@pytest.mark.parametrize("phase", PIPELINES)
def test_every_pipeline_ends_with_fusing(phase: Phase) -> None:
    assert isinstance(PIPELINES[phase][-1], FuseNodes)
