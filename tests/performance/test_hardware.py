"""The named machines: complete, sourced, and physically possible."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from zenflow_compile.performance.hardware import HARDWARE, Hardware, hardware

UNSOURCED = ("name", "nodes", "devices", "sources")
NUMBERS = [field.name for field in dataclasses.fields(Hardware) if field.name not in UNSOURCED]


@pytest.mark.parametrize("machine", HARDWARE.values(), ids=list(HARDWARE))
def test_numbers_and_sources_match(machine: Hardware) -> None:
    given = {name for name in NUMBERS if getattr(machine, name) is not None}
    assert given == set(machine.sources)
    assert all(machine.sources.values())


@pytest.mark.parametrize("machine", HARDWARE.values(), ids=list(HARDWARE))
def test_numbers_are_plausible(machine: Hardware) -> None:
    assert all(getattr(machine, name) > 0 for name in machine.sources)
    assert 0 < machine.utilization < 1
    assert machine.link_to_host < machine.device_bandwidth
    assert machine.host_bandwidth < machine.device_bandwidth
    assert (machine.peer_bandwidth is None) == (machine.devices == 1)
    assert machine.name == machine.name.lower()


def test_assumptions_are_labeled() -> None:
    for machine in HARDWARE.values():
        assert machine.sources["utilization"].startswith("assumption")
        assert machine.sources["adam_per_core"].startswith("assumption")


@pytest.mark.parametrize(
    ("name", "near"), [("4xA100-PCIe4", "4xa100-40g-pcie4"), ("gh-200", "gh200"), ("4090", "rtx-4090")]
)
def test_unknown_name_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"hardware='{name}' is not known; did you mean \"{near}\""):
        hardware(name)


def test_name_without_a_near_one_lists_all() -> None:
    with pytest.raises(ValueError, match=r"is not known\. There are 4xa100-40g-pcie4, "):
        hardware("abacus")


def test_nodes_are_as_one_of_them() -> None:
    node = hardware("8xh100-80g")
    four = node.across(4)
    assert (four.nodes, four.devices, four.all_devices) == (4, 8, 32)
    assert replace(four, nodes=1) == node == node.across(1)


def test_nodes_need_a_network() -> None:
    with pytest.raises(ValueError, match=r"network_bandwidth=None of hardware 'gh200' .* nodes=2"):
        hardware("gh200").across(2)


@pytest.mark.parametrize("nodes", [0, -1])
def test_fewer_than_one_node_is_refused(nodes: int) -> None:
    with pytest.raises(ValueError, match=rf"nodes={nodes} must be an integer >= 1; 1 predicts a single node"):
        hardware("8xh100-80g").across(nodes)
