"""PyTorch's own training on the simulated device equals that on the CPU, in whatever order the device runs."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.simulated.plain_training import equal, mlp, mlp_loss, train, trained_on_cpu
from tests.simulated.process import in_simulator
from tests.simulated.simulator import PATTERNS, Delays, Simulator, Stream

SIDE_LATE = Delays(by_order={1: 0.98})
DEFAULT_LATE = Delays(default=0.98)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
@in_simulator
def test_training_equals_that_on_the_cpu(simulator: Simulator, model: str, compiled: bool, pattern: str) -> None:
    for fused in (False, True):
        expected = trained_on_cpu(model, compiled, fused)
        for seed in range(3):
            simulator.configure(seed=seed, delays=pattern)
            assert equal(train(model, simulator.device, compiled=compiled, fused=fused), expected), (seed, fused)
            slow = {name for name in simulator.counts() if name.startswith(("SLOW", "LAYOUT"))}
            assert not slow


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@in_simulator
def test_training_in_order_equals_the_cpu(simulator: Simulator, compiled: bool) -> None:
    simulator.configure(in_order=True)
    assert equal(train("mlp", simulator.device, compiled=compiled), trained_on_cpu("mlp", compiled, False))


@pytest.mark.parametrize("delays", [SIDE_LATE, DEFAULT_LATE], ids=["side late", "default late"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@in_simulator
def test_forward_in_another_stream_equals(simulator: Simulator, compiled: bool, delays: Delays) -> None:
    """PyTorch allows it: backward() joins the forward's stream with its caller's."""
    for seed in range(3):
        simulator.configure(seed=seed, delays=delays)
        side = Stream()
        side.wait_stream(Stream(handle=0))
        result = train("mlp", simulator.device, compiled=compiled, forward_in=_after_default(side))
        assert equal(result, trained_on_cpu("mlp", compiled, False))


@in_simulator
def test_step_in_a_stream_that_waits_equals(simulator: Simulator) -> None:
    simulator.configure(delays=DEFAULT_LATE)
    assert equal(train("mlp", simulator.device, step_in=_after_default(Stream())), trained_on_cpu("mlp", False, False))


@in_simulator
def test_step_in_a_stream_without_wait_differs(simulator: Simulator) -> None:
    simulator.configure(delays=Delays(default=1.0))
    assert not equal(train("mlp", simulator.device, step_in=Stream()), trained_on_cpu("mlp", False, False))


@in_simulator
def test_backward_runs_in_the_devices_thread(simulator: Simulator) -> None:
    threads = {}
    for device in (torch.device("cpu"), simulator.device):
        model = mlp().to(device)
        next(model.parameters()).register_hook(lambda grad: threads.update({grad.device.type: threading.get_ident()}))
        mlp_loss(model, 0, device).backward()
    assert threads["cpu"] == threading.get_ident()
    assert threads["sim"] != threading.get_ident()


class _after_default:  # noqa: N801 - used as a context
    """A context for a stream that waits for the default one at its begin, and that the default one waits for after."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.stream.wait_stream(Stream(handle=0))
        self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        self.stream.__exit__(None, None, None)
        Stream(handle=0).wait_stream(self.stream)
