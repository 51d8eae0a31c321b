"""Models whose weights do not fit into the simulated accelerator's memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow_compile as zf
from tests.simulated.accelerator import serve
from tests.simulated.process import SimulatedProcess, in_simulator
from tests.simulated.simulator import Simulator, load_simulator
from tests.support.training import EAGER_BACKEND
from zenflow_compile.runtime.parameters.moved_weights import is_left_on_host

WIDTH = 160  # a layer has 100 KiB
LAYERS = 60
WEIGHT_BYTES = LAYERS * WIDTH * WIDTH * 4
CAPACITY = WEIGHT_BYTES // 2
EXACT: dict[str, Any] = {
    "zero_offload": {"policy": "zero_offload"},
    "resident": {"policy": "resident"},
    "zenflow": {"update_interval": 1, "topk_ratio": 0.02, "device_share": 0.0},
    "windows": {"update_interval": 4, "topk_ratio": 0.02, "device_share": 0.0},
}


LONG = ["resident", "windows"]


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def train(
    device: torch.device, *, model: nn.Module | None = None, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the state dict before the optimizer is closed."""
    torch._dynamo.reset()
    model = zf.move_to_device(model or build(), device)
    batches = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(device) for step in range(6)]
    optimizer = zf.ZenFlowAdamW(model.named_parameters(), lr=1e-2, workers=2, min_offload_size=1000, **options)
    call = model if device.type == "cpu" else torch.compile(model, **EAGER_BACKEND)
    losses = []
    for x in batches:
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    if device.type != "cpu":
        torch.sim.synchronize()  # type: ignore[attr-defined]
    optimizer.close()
    if device.type != "cpu" and options.get("policy") != "resident":
        left = [param for param in model.parameters() if is_left_on_host(param)]
        assert left, "the device has no room for all of the weights"
    return [float(each) for each in losses], found


def outcome(policy: str) -> bool:
    """Whether the device, which has room for half of the weights, gives the bits of the CPU."""
    simulator = load_simulator()
    serve()
    gc.collect()  # memory of the device that a test before left in a circle
    state_and_gradients = 3 * WEIGHT_BYTES if policy == "resident" else 0
    simulator.configure(capacity=CAPACITY + state_and_gradients)
    losses, weights = train(simulator.device, offload_weights=1.0, **EXACT[policy])
    expected_losses, expected = train(torch.device("cpu"), **EXACT[policy])
    return losses == expected_losses and all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "policy", ["zero_offload", "zenflow", *[pytest.param(name, marks=pytest.mark.long) for name in LONG]]
)
def test_model_that_does_not_fit_trains(simulated: SimulatedProcess, policy: str) -> None:
    assert simulated.call(outcome, policy, timeout=120)


@in_simulator
def test_model_that_is_moved_as_a_whole_does_not_fit(simulator: Simulator) -> None:
    simulator.configure(capacity=CAPACITY)
    with pytest.raises(RuntimeError, match="out of memory"):
        build().to(simulator.device)


@in_simulator
def test_left_weight_is_not_read_before_it_is_served(simulator: Simulator) -> None:
    serve()
    simulator.configure(capacity=CAPACITY)
    model = zf.move_to_device(build(), simulator.device)
    assert all(param.device == simulator.device for param in model.parameters())
    with pytest.raises(RuntimeError, match="move_to_device"):
        model[0].weight.sum()  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match="takes a model on the CPU"):
        zf.move_to_device(model, simulator.device)


@in_simulator
def test_optimizer_without_offloading_loads_weights(simulator: Simulator) -> None:
    serve()
    model, plain = zf.move_to_device(build(), simulator.device), build()
    optimizer = zf.ZenFlowAdamW(model.parameters(), policy="resident")
    assert optimizer.engine.weights.weights == {}
    assert all(torch.equal(one.cpu(), other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    optimizer.close()


@in_simulator
def test_model_from_a_file_is_moved(simulator: Simulator, tmp_path: Path) -> None:
    serve()
    torch.save(build().state_dict(), tmp_path / "model.pt")
    model = build()
    model.load_state_dict(torch.load(tmp_path / "model.pt", mmap=True), assign=True)
    assert not model[0].weight.untyped_storage().resizable()  # type: ignore[index, union-attr]
    simulator.configure(capacity=CAPACITY)
    found = train(simulator.device, model=model, offload_weights=1.0, **EXACT["zero_offload"])
    assert found[0] == train(torch.device("cpu"), **EXACT["zero_offload"])[0]


@in_simulator
def test_pinned_weights_are_trained(simulator: Simulator) -> None:
    """On the CPU: PyTorch cannot resize pinned memory."""
    serve()
    model = build()
    for param in model.parameters():
        param.data = param.data.pin_memory()
    assert not model[0].weight.untyped_storage().resizable()  # type: ignore[index, union-attr]
    cpu = torch.device("cpu")
    found = train(cpu, model=model, offload_weights=1.0, **EXACT["zero_offload"])
    assert found[0] == train(cpu, **EXACT["zero_offload"])[0]
