"""Copies block, and read host memory, when CUDA's do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.simulated.process import in_simulator
from tests.simulated.simulator import Delays, Simulator, Stream


def _registered(simulator: Simulator, tensor: Tensor) -> Tensor:
    simulator.register(tensor.data_ptr(), tensor.nbytes)
    return tensor


HOST: dict[str, Callable[[Simulator, Tensor], Tensor]] = {
    "pageable": lambda simulator, tensor: tensor,
    "pinned": lambda simulator, tensor: tensor.pin_memory(),
    "registered": _registered,
}


def _hold(simulator: Simulator) -> tuple[Stream, Tensor]:
    """A stream that waits for the host, and the flag that it waits for."""
    stream, flag = Stream(), torch.zeros(1, dtype=torch.int32, pin_memory=True)
    simulator.wait_value(stream, flag.data_ptr(), 1)
    return stream, flag


@pytest.mark.parametrize("kind", HOST)
@in_simulator
def test_source_is_read_when_cuda_reads_it(simulator: Simulator, kind: str) -> None:
    source = HOST[kind](simulator, torch.ones(64))
    assert source.is_pinned() == (kind != "pageable")
    stream, flag = _hold(simulator)
    with stream:
        copied = source.to(simulator.device, non_blocking=True)
    source.fill_(2)  # too early, unless the copy was staged
    flag[0] = 1
    stream.synchronize()
    assert copied.cpu().eq(1 if kind == "pageable" else 2).all()
    assert "H2D" not in simulator.counts()


@pytest.mark.parametrize("kind", ["pinned", "registered"])
@in_simulator
def test_asynchronous_copy_is_written_late(simulator: Simulator, kind: str) -> None:
    target = HOST[kind](simulator, torch.zeros(64))
    values = torch.ones(64, device=simulator.device)
    stream, flag = _hold(simulator)
    with stream:
        target.copy_(values, non_blocking=True)
    assert target.eq(0).all()
    flag[0] = 1
    stream.synchronize()
    assert target.eq(1).all()
    assert "D2H" not in simulator.counts()


@in_simulator
def test_cpu_method_gives_pinned_memory_if_asked(simulator: Simulator) -> None:
    values = torch.ones(64, device=simulator.device)
    assert values.to("cpu", non_blocking=True).is_pinned()
    assert not values.cpu().is_pinned()


WAITS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], object], dict[str, int]]] = {
    "cpu()": (lambda host, pinned, values: values.cpu(), {"D2H": 1}),
    "to pageable": (lambda host, pinned, values: host.copy_(values, non_blocking=True), {"D2H pageable": 1}),
    "to pinned, blocking": (lambda host, pinned, values: pinned.copy_(values), {"D2H": 1}),
    "to pinned": (lambda host, pinned, values: pinned.copy_(values, non_blocking=True), {}),
    "from pageable, blocking": (lambda host, pinned, values: values.copy_(host), {"H2D": 1}),
    "from pageable": (lambda host, pinned, values: values.copy_(host, non_blocking=True), {}),
    "from pinned, blocking": (lambda host, pinned, values: values.copy_(pinned), {"H2D": 1}),
    "on the device": (lambda host, pinned, values: values.clone().copy_(values), {}),
    "item": (lambda host, pinned, values: values.sum().item(), {"item": 1}),
    "bool": (lambda host, pinned, values: bool((values > 0).all()), {"item": 1}),
    "equal": (lambda host, pinned, values: torch.equal(values, values.clone()), {"equal": 1}),
    "nonzero": (lambda host, pinned, values: values.nonzero(), {"nonzero": 1}),
    "mask": (lambda host, pinned, values: values[values > 0], {"nonzero": 1}),
    "fill a mask": (lambda host, pinned, values: values.index_put_((values > 0,), torch.tensor(1.0)), {}),
    "host indices": (
        lambda host, pinned, values: values[torch.tensor([1, 2])],
        {"H2D": 1, "index with host indices": 1},
    ),
    "views": (lambda host, pinned, values: values[1:5].add_(1).mul_(2), {}),
    "device": (lambda host, pinned, values: torch.sim.synchronize(), {"device.synchronize": 1}),
    "stream": (lambda host, pinned, values: Stream(handle=0).synchronize(), {"stream.synchronize": 1}),
    "event": (lambda host, pinned, values: Stream(handle=0).record_event().synchronize(), {"event.synchronize": 1}),
    "accelerator": (lambda host, pinned, values: torch.accelerator.synchronize(), {"device.synchronize": 1}),
}


@pytest.mark.parametrize("name", WAITS)
@in_simulator
def test_waits_of_the_host_are_counted(simulator: Simulator, name: str) -> None:
    function, expected = WAITS[name]
    host, pinned, values = torch.ones(64), torch.ones(64, pin_memory=True), torch.ones(64, device=simulator.device)
    simulator.reset_counts()
    function(host, pinned, values)
    assert simulator.counts() == expected


@pytest.mark.parametrize("non_blocking", [False, True])
@in_simulator
def test_copies_convert_dtypes_and_layouts(simulator: Simulator, non_blocking: bool) -> None:
    values = torch.randn(6, 8)
    for seed in range(3):
        simulator.configure(seed=seed, delays=Delays(default=0.9))
        for target in (torch.bfloat16, torch.float64, torch.float32):
            for source in (values, values.t(), values[::2], values[:, 1:3], values[:1].expand(6, 8)):
                moved = source.to(simulator.device, target, non_blocking=non_blocking)
                back = torch.empty(source.shape[::-1], dtype=torch.float32).t()
                back.copy_(moved)
                assert torch.equal(back, source.to(target).float())
                inner = torch.zeros(8, 8, device=simulator.device)[: source.shape[0], : source.shape[1]]
                inner.copy_(source.to(target), non_blocking=non_blocking)
                assert torch.equal(inner.cpu(), source.to(target).float())


@in_simulator
def test_mixed_devices_are_refused(simulator: Simulator) -> None:
    values, host = torch.ones(4, device=simulator.device), torch.ones(4)
    for function in (
        lambda: values + host,
        lambda: host + values,
        lambda: host.add_(values),
        lambda: torch.add(values, values, out=host),
        lambda: torch.cat([values, host]),
        lambda: torch.mm(values.view(2, 2), host.view(2, 2)),
        lambda: host + values.sum(),
        lambda: host.sum().add_(values.sum()),
        lambda: torch.nn.functional.embedding(torch.tensor([1]), values.view(2, 2)),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            function()


@in_simulator
def test_number_of_the_host_is_that_of_the_launch(simulator: Simulator) -> None:
    values, number = torch.ones(4, device=simulator.device), torch.tensor(2.0)
    stream, flag = _hold(simulator)
    with stream:
        product = values * number
    number.fill_(5)
    flag[0] = 1
    stream.synchronize()
    assert product.cpu().eq(2).all()


@in_simulator
def test_driver_may_refuse_host_memory(simulator: Simulator) -> None:
    memory = torch.zeros(1024)
    simulator.register(memory.data_ptr(), memory.nbytes)
    assert simulator.registered_bytes() == memory.nbytes
    with pytest.raises(RuntimeError, match="already registered"):
        simulator.register(memory.data_ptr(), 8)
    simulator.unregister(memory.data_ptr())
    assert not memory.is_pinned()
    with pytest.raises(RuntimeError, match="not registered"):
        simulator.unregister(memory.data_ptr())
    simulator.configure(registering=False, pinning=False)
    with pytest.raises(RuntimeError, match="refused"):
        simulator.register(memory.data_ptr(), memory.nbytes)
    with pytest.raises(RuntimeError, match="refuses to pin"):
        memory.pin_memory()
