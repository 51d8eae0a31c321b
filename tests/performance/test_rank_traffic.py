"""The traffic of ranks against a table that was computed by hand for a model of 7B parameters."""

from __future__ import annotations

from typing import Any

import pytest

from zenflow_compile.options.options import Options
from zenflow_compile.performance import models
from zenflow_compile.performance.traffic import RankTraffic, Sharing, rank_traffic
from zenflow_compile.planning.planners import make_plan

OFFLOAD: dict[str, Any] = {"device_share": 0.0, "min_offload_size": 1}
ZENFLOW: dict[str, Any] = {"topk_ratio": 0.1, "update_interval": 4, **OFFLOAD}
RESIDENT: dict[str, Any] = {"policy": "resident"}
SUMMED: dict[str, Any] = {**ZENFLOW, "gradient_transfer": "mean"}
ZERO_OFFLOAD: dict[str, Any] = {"policy": "zero_offload", **OFFLOAD}

# GB per step on 4 and on 8 ranks: sent, to the host, to the device by one rank; and host memory of the node.
TABLE: dict[str, tuple[dict[str, Any], Sharing, tuple[tuple[float, float], ...]]] = {
    "DDP": (RESIDENT, Sharing.ALL_REDUCE, ((20.2, 23.6), (0, 0), (0, 0), (0, 0))),
    "replicas": (ZENFLOW, Sharing.ALL_REDUCE, ((20.2, 23.6), (12.1, 12.1), (3.0, 3.0), (412, 825))),
    "ZeRO-2": (ZERO_OFFLOAD, Sharing.WHOLE_WEIGHTS, ((20.2, 23.6), (3.4, 1.7), (3.4, 1.7), (94.3, 94.3))),
    "whole": (ZENFLOW, Sharing.WHOLE_WEIGHTS, ((20.2, 23.6), (3.0, 1.5), (0.8, 0.4), (103, 103))),
    "changed": (ZENFLOW, Sharing.CHANGED_SLICES, ((13.4, 15.6), (3.0, 1.5), (0.8, 0.4), (103, 103))),
    "summed": (SUMMED, Sharing.CHANGED_SLICES, ((13.4, 15.6), (0.8, 0.4), (0.8, 0.4), (84.9, 84.9))),
    "sharded": (ZENFLOW, Sharing.SHARDED, ((30.3, 35.4), (3.0, 1.5), (0.8, 0.4), (103, 103))),
}


# GB per step on 2, 8 and 32 nodes of 8 ranks: sent by one rank, leaving a node; and host memory of a node.
NODES: dict[Sharing, tuple[tuple[float, float, float], ...]] = {
    Sharing.CHANGED_SLICES: ((17.3, 18.6, 18.9), (13.5, 23.6, 26.1), (103, 103, 103)),
    Sharing.HYBRID: ((37.1, 38.3, 38.6), (13.5, 23.6, 26.1), (103, 103, 103)),
    Sharing.SHARDED: ((37.9, 39.8, 40.3), (37.9, 39.8, 40.3), (51.6, 12.9, 3.2)),
    Sharing.WHOLE_WEIGHTS: ((25.3, 26.5, 26.8), (25.3, 26.5, 26.8), (51.6, 12.9, 3.2)),
    Sharing.ALL_REDUCE: ((25.3, 26.5, 26.8), (25.3, 26.5, 26.8), (825, 825, 825)),
}


def traffic(options: dict[str, Any], ranks: int, exchange: Sharing, nodes: int = 1) -> RankTraffic:
    model = models.model("llama2-7b")
    return rank_traffic(make_plan(model.params, Options(**options)), ranks, exchange, nodes=nodes)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["16 ranks", "64 ranks", "256 ranks"])
@pytest.mark.parametrize("exchange", NODES)
def test_table_of_nodes(exchange: Sharing, place: int) -> None:
    found = traffic(ZENFLOW, 8, exchange, (2, 8, 32)[place])
    sent, leaving, host = (each[place] for each in NODES[exchange])
    assert found.sent / 1e9 == pytest.approx(sent, abs=0.06)
    assert found.leaving / 1e9 == pytest.approx(leaving, abs=0.06)
    assert found.host_bytes / 1e9 == pytest.approx(host, rel=0.01)


def test_share_goes_around_the_nodes_once() -> None:
    """Two nodes of 4 ranks: each rank sends its quarter of 13.5 GB once, all of a node the model; DDP as much."""
    found = traffic(ZENFLOW, 4, Sharing.CHANGED_SLICES, 2)
    alone = traffic(ZENFLOW, 4, Sharing.CHANGED_SLICES)
    assert found.sent - alone.sent == pytest.approx(found.across, rel=1e-3)
    assert found.leaving == pytest.approx(4 * found.across, rel=1e-3)
    assert found.across == pytest.approx(alone.reduced / 4, rel=1e-3)  # but for the padding


@pytest.mark.parametrize("place", [0, 1], ids=["4 ranks", "8 ranks"])
@pytest.mark.parametrize("name", TABLE)
def test_table_of_7b_parameters(name: str, place: int) -> None:
    options, exchange, numbers = TABLE[name]
    found = traffic(options, (4, 8)[place], exchange)
    sent, to_host, to_device, host = (each[place] for each in numbers)
    assert found.sent / 1e9 == pytest.approx(sent, abs=0.06)
    assert found.to_host / 1e9 == pytest.approx(to_host, abs=0.05)
    assert found.to_device / 1e9 == pytest.approx(to_device, abs=0.05)
    assert found.host_bytes / 1e9 == pytest.approx(host, rel=0.005)


def test_selection_costs_bytes_when_it_changes() -> None:
    assert traffic(ZENFLOW, 4, Sharing.CHANGED_SLICES).selection_bytes / 1e6 == pytest.approx(0.66, abs=0.005)
    assert traffic(ZENFLOW, 4, Sharing.WHOLE_WEIGHTS).selection_bytes == 0


def test_a_third_of_the_weights_changes_in_a_step() -> None:
    found = traffic(ZENFLOW, 4, Sharing.CHANGED_SLICES)
    assert found.gathered / found.reduced == pytest.approx(0.325, abs=0.001)


def test_ranks_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"ranks=0 must be at least 1"):
        traffic(ZENFLOW, 0, Sharing.SHARDED)
    with pytest.raises(ValueError, match=r"nodes=0 must be at least 1"):
        traffic(ZENFLOW, 2, Sharing.SHARDED, 0)
