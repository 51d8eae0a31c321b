"""Ranks with a device each train on the fake GPU as one process does, with collectives that run in stream order."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import pytest

from tests.fake_gpu.environment import on_fake_gpu, run
from tests.ranks.models import ALL_POLICIES, WINDOWED

pytestmark = on_fake_gpu

EXACT = 1e-6


def train(switches: dict[str, str] | None = None, **given: Any) -> dict[str, float]:
    """How far apart the weights of two ranks end, and those of one process on the CPU."""
    program = ["-m", "tests.fake_gpu.programs.ranks", json.dumps(given)]
    with tempfile.TemporaryDirectory() as logs:  # torchrun leaves a folder behind, unless it is told where
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--log-dir", logs]
        done = run([*launcher, *program], switches={"DEVICES": "2", **(switches or {})})
    assert done.returncode == 0, done.stdout[-4000:]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert given.get("sharded") or found["ranks"] == 0.0
    return found


@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "graph"])
@pytest.mark.parametrize("sharded", [False, True], ids=["process_group", "FSDP2"])
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_exact_policies_equal_adamw(policy: str, sharded: bool, compiled: bool) -> None:
    found = train(options=ALL_POLICIES[policy], sharded=sharded, compiled=compiled, clip=0.1)
    assert found["one"] < EXACT


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_equal_those_of_one_process(name: str) -> None:
    options = WINDOWED[name]
    found = train(options=options, reference=options, steps=24, clip=0.1)
    # Noise of 1e-8 may round an element to the next int8 value, a hundredth of the gradient.
    assert found["one"] < (EXACT if name != "int8" else 2e-3)


@pytest.mark.parametrize("name", [name for name in WINDOWED if name != "int8"])  # its scales are those of parts
def test_windows_of_shards_equal_those_of_one_process(name: str) -> None:
    """Each rank has a part of every slice, so that slices are selected by norms over all ranks."""
    options = WINDOWED[name]
    found = train(options=options, reference=options, steps=24, clip=0.1, sharded=True, across=True)
    assert found["one"] < EXACT


@pytest.mark.parametrize("sharded", [False, True], ids=["process_group", "FSDP2"])
@pytest.mark.parametrize("queue", [8, 1000])
def test_queues_of_devices_change_nothing(queue: int, sharded: bool) -> None:
    """The host is a few calls ahead of the device, or many."""
    switches = {"QUEUE": str(queue), "KERNEL_NS": "50000"}
    assert train(switches, options=ALL_POLICIES["zenflow"], sharded=sharded, compiled=True)["one"] < EXACT
