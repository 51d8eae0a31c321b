"""Predicted device memory of a plan, compared with the memory of a real optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.machines import layers, llama, machine
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.options.options import Options
from zenflow_compile.performance.memory import needs_of
from zenflow_compile.performance.model_shape import shape_of
from zenflow_compile.planning.planners import divide, make_plan
from zenflow_compile.rules.adamw import ADAMW
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient
from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.parameters.capacity import specs_of

ALIGNMENT = 64  # bytes, of every tensor
WIDTH, LAYERS, ROWS = 128, 6, 4
SHARED: dict[str, Any] = {"min_offload_size": 100, "workers": 1}
OPTIONS: list[dict[str, Any]] = [
    {"policy": "resident"},
    {"policy": "zero_offload"},
    {"policy": "twinflow", "ratio": 0.45},
    {"policy": "deep_optimizer_states", "update_stride": 2},
    {"topk_ratio": 0.1, "device_share": 0.0},
    {"topk_ratio": 0.5, "device_share": 0.0},
    {"topk_ratio": 0.5, "staleness": 1},
    {"topk_ratio": 0.1, "gradient_transfer": "int8"},
    {"topk_ratio": 0.1, "gradient_transfer": "mean"},
    {"topk_ratio": 0.1, "update_stride": 2},
    {"topk_ratio": 0.1, "device_share": 60 * WIDTH * WIDTH},
]


def device_tensors(part: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that are reachable from ``part`` of the runtime, but for what works on the host only."""
    if id(part) in seen or isinstance(part, (HostArena, Workers)):
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        yield part
        return
    if isinstance(part, dict):
        members = [*part, *part.values()]
    elif isinstance(part, (str, bytes)):
        members = []
    elif hasattr(part, "__iter__"):
        members = list(part)
    elif type(part).__module__.startswith("zenflow_compile.runtime"):
        slots = {name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())}
        names = slots - {"__weakref__"}  # before Python 3.11.4 that of a dataclass cannot be read
        members = [getattr(part, name, None) for name in names] + list(getattr(part, "__dict__", {}).values())
    else:
        members = []
    for member in members:
        yield from device_tensors(member, seen)


def memory_of(tensors: Iterator[Tensor]) -> dict[int, int]:
    """Return the bytes of storages by address."""
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


def bytes_on_device(model: nn.Module, optimizer: ZenFlowAdamW) -> int:
    """Bytes of everything but weights and their samples: the optimizer's device memory, and gradients."""
    registry = optimizer.engine.registry
    used = memory_of(device_tensors(registry, {id(kernel) for kernel in registry.memory.kernels.values()}))
    hosts = [each.host for each in registry.offloaded.values()]
    not_the_devices = memory_of(device_tensors(hosts, set())) | memory_of(iter(model.parameters()))
    streamed = [(each.host, [param.state for param in each.params]) for each in registry.streamed.subgroups]
    not_the_devices |= memory_of(each for each in device_tensors(streamed, set()) if each.dim())
    samples = MemoryList()
    registry.unseen_writes.list_memory(samples)
    not_the_devices |= {storage.data_ptr(): storage.nbytes() for storage, _ in samples.storages()}
    grads = [param.grad for param in model.parameters()]
    # To ask an offloaded gradient for its storage would give it one.
    gradients = memory_of(grad for grad in grads if grad is not None and not isinstance(grad, OffloadedGradient))
    return sum(size for address, size in (used | gradients).items() if address not in not_the_devices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_device_memory_covers_the_plan(given: dict[str, Any], dtype: torch.dtype) -> None:
    """The peak is between backward and step, when all pending gradients are on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)
    optimizer = ZenFlowAdamW(model.parameters(), **{**SHARED, **given})
    inputs = torch.randn(ROWS, WIDTH, dtype=dtype)
    for step in range(3):
        model(inputs).float().square().mean().backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    used = bytes_on_device(model, optimizer)
    assert optimizer.engine.registry.gradients.dense == 0
    shape = shape_of(specs_of([list(model.named_parameters())], [ADAMW]))
    options = Options(**{**SHARED, **given})
    needs = needs_of(
        make_plan(shape.params, options),
        shape,
        devices=1,
        tokens=ROWS,
        recompute=False,
    ).device
    at_its_moment = WIDTH * WIDTH * dtype.itemsize
    # The CPU exchanges state without buffers.
    not_used = needs["weights"] + needs["activations"] + at_its_moment + optimizer.engine.plan.exchange_bytes
    needed = sum(needs.values()) - not_used
    assert needed <= used <= needed + ALIGNMENT * sum(1 for _ in device_tensors(optimizer.engine.registry, set()))
    optimizer.close()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_devices_divide_as_ranks_do(options: dict[str, Any]) -> None:
    model = llama()
    plan = make_plan(model.params, Options(**{**SHARED, **options}))
    ranks = [divide(replace(plan, rank=rank, ranks=4)) for rank in range(4)]
    one = needs_of(plan, model, devices=4, tokens=1, recompute=False)
    assert one.device["optimizer state"] == pytest.approx(sum(rank.device_bytes for rank in ranks) / 4, rel=0.01)
    host = sum(one.host.values()) - one.host["buffers of exchanges"]
    assert host == pytest.approx(sum(rank.host_bytes for rank in ranks), rel=0.01)


def test_memory_by_hand() -> None:
    model = layers(2)
    plan = make_plan(model.params, Options(policy="zero_offload"))
    needs = needs_of(plan, model, devices=1, tokens=1, recompute=False)
    million = 1_000_000
    assert needs.device["weights"] == 4 * million
    assert needs.device["gradients"] == 2 * million  # one at a time
    assert needs.device["optimizer state"] == 0
    assert needs.device["rings and buffers"] == (2 + 3) * 2 * million
    assert needs.host == {
        "optimizer state": 24 * million,
        "gradients and uploads": 4 * million,
        "weights": 0,
        "buffers of exchanges": 0,
        "window of files": 0,
    }
    assert needs.device["selection"] == 12 * 2 * 1000  # no scores: nothing is selected
    files = make_plan(model.params, Options(policy="zero_infinity", nvme_path="scratch"))
    needs = needs_of(files, model, devices=1, tokens=1, recompute=False)
    assert needs.host["window of files"] == needs.disk["optimizer state"] == 24 * million
    plan = make_plan(model.params, Options(policy="resident"))
    resident = needs_of(plan, model, devices=2, tokens=1, recompute=False)
    assert resident.device["optimizer state"] == 24 * million  # each device has all of it
    assert resident.device["gradients"] == (4 + 2) * million
    short = needs.shortages(machine(host_bytes=28 * million - 1, disk_bytes=None))
    assert short == {"host": 1, "disk": 24 * million}
