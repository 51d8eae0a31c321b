"""Memory and cores of an engine: cores of its workers, pages near them, and the warning for unpinned memory."""

from __future__ import annotations

import gc
import os
import re
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.calls import Call, at_calls
from tests.support.host import four_cores
from tests.support.late_device import LateDevice, served
from tests.support.training import OFFLOAD_ALL, Training, mlp
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.options.options import Options
from zenflow_compile.rules.adamw import ADAMW
from zenflow_compile.runtime.parameters import allocation
from zenflow_compile.runtime.parameters.host_state import HostState
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.recorder import Recorder

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin threads"),
]


def optimizer_on(model: nn.Module, **options: Any) -> ZenFlowAdamW:
    return ZenFlowAdamW(model.parameters(), **OFFLOAD_ALL, **options)


@four_cores()
def test_engines_share_worker_cores_last() -> None:
    gc.collect()  # engines that tests before this one left in a cycle have cores, too
    first, second = optimizer_on(mlp(), workers=2), optimizer_on(mlp(), workers=1)
    in_use = first.engine.worker_cores + second.engine.worker_cores
    assert len(set(in_use)) == 3
    second.close()
    third = optimizer_on(mlp(), workers=2)  # closing freed a core
    assert set(third.engine.worker_cores) == set(range(4)) - set(first.engine.worker_cores)
    fourth = optimizer_on(mlp())
    assert len(fourth.engine.worker_cores) == 2
    for optimizer in (first, third, fourth):
        optimizer.close()


def test_worker_cores_option_is_used_unchanged() -> None:
    core = min(os.sched_getaffinity(0))
    training = Training(None, {"workers": [core]}).run(0, 2)
    assert training.optimizer.engine.worker_cores == (core,)
    threads = [path for path in Path("/proc/self/task").iterdir() if (path / "comm").read_text() == "zenflow-0\n"]
    assert {core} in [os.sched_getaffinity(int(path.name)) for path in threads]
    training.optimizer.close()


@pytest.fixture
def numa(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The NUMA nodes of the cores of engines."""
    nodes = {0, 1}
    monkeypatch.setattr(allocation, "nodes_of", lambda cores: nodes)
    return nodes


def test_workers_touch_their_pages_first_on_numa(numa: set[int]) -> None:
    core = max(os.sched_getaffinity(0))
    seen: list[tuple[int, set[int]]] = []

    def note(call: Call) -> None:
        assert not call.arguments["self"].state().master.any()  # the weights are not in it yet
        seen.append((call.arguments["worker"], os.sched_getaffinity(0)))

    with at_calls(note, HostState.touch, new_threads=True):
        numa.remove(1)
        optimizer_on(mlp(), workers=[core]).close()
        assert seen == []
        numa.add(1)
        optimizer = optimizer_on(mlp(), workers=[core])
        offloaded = optimizer.engine.offloaded
    assert seen == [(0, {core})] * len(offloaded)
    optimizer.close()


def test_weights_are_equal_on_several_numa_nodes(numa: set[int]) -> None:
    numa.remove(1)
    expected = Training(None).run(0, 6).weights()
    numa.add(1)
    for actual, weight in zip(Training(None).run(0, 6).weights(), expected, strict=True):
        assert torch.equal(actual, weight)


class Listener:
    def accept_grad(self, p: int) -> None:
        raise AssertionError("no backward runs here")


def test_unpinned_memory_warns_once_per_engine() -> None:
    """Two groups of parameters have two arenas, and the device refuses to pin both."""
    calls: list[int] = []

    class Refusing(LateDevice):
        def register(self, address: int, size_bytes: int) -> None:
            calls.append(size_bytes)
            raise RuntimeError("cudaHostRegister: out of memory")

        def pinned_buffer(self, size_bytes: int) -> Any:
            raise RuntimeError("cuMemHostAlloc: out of memory")

    cpu, listener = torch.device("cpu"), Listener()
    with served(Refusing), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = Options(**OFFLOAD_ALL)
        found = ParamRegistry(
            [{}, {}], options, [ADAMW] * 2, cpu, Recorder(), weakref.ref(listener), visible_gradients=True
        )
        for group in (0, 1):
            named = [(f"{group}.{name}", param) for name, param in mlp().named_parameters()]
            found.add([named], group)
    assert sum(size > 1 << 14 for size in calls) == 2, "arenas; pages are probed, and buffers of exchanges small"
    assert {each.category for each in caught} == {RuntimeWarning}
    (message,) = (text for each in caught if "refused to pin" in (text := str(each.message)))
    assert "slower, and the training thread waits" in message
    assert "ulimit -l" in message
    assert len(found.offloaded) == 6  # everything works on unpinned memory
    found.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_arenas_are_touched_and_pinned() -> None:
    seen: list[set[int]] = []

    def note(call: Call) -> None:
        assert not call.arguments["self"].state().master.is_pinned()
        seen.append(os.sched_getaffinity(0))

    with at_calls(note, HostState.touch, new_threads=True):
        optimizer = optimizer_on(mlp().cuda())
        engine = optimizer.engine
    assert {core for mask in seen for core in mask} == set(engine.worker_cores)
    assert all(offloaded.host.state().master.is_pinned() for offloaded in engine.offloaded.values())
    optimizer.close()


@pytest.mark.parametrize("shape", [(8, 15), (16, 8), (8, 16, 1), (128,)])
def test_gradient_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """The kernels take shapes on trust: they would read past the gradient's end, or split other slices."""
    model = nn.Linear(16, 8, bias=False)
    with ZenFlowAdamW(model.named_parameters(), min_offload_size=1) as optimizer:
        offloaded = optimizer.engine.offloaded[0]
        with pytest.raises(RuntimeError, match=re.escape(f"gradient of weight has the shape {list(shape)}")):
            offloaded.gradient.matrix_of(torch.zeros(shape))
        assert offloaded.shown.record is None
        assert model.weight.grad is None


@pytest.mark.parametrize("strides", [(1, 8), (32, 2), (0, 1)])
def test_kernels_get_gradients_with_adjacent_elements(strides: tuple[int, int]) -> None:
    """The kernels take layouts on trust: they would read other elements of a transposed gradient."""
    model = nn.Linear(16, 8, bias=False)
    with ZenFlowAdamW(model.named_parameters(), min_offload_size=1) as optimizer:
        gradient = torch.arange(256.0).as_strided((8, 16), strides)
        matrix = optimizer.engine.offloaded[0].gradient.matrix_of(gradient)
        assert matrix.stride(1) == 1
        assert torch.equal(matrix, gradient)
