"""A Llama trains within less device memory than its weights take, and its peak is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import counting_allocator
from benchmarks.counting_allocator import CountedCpu, CountingError, counted_cpu
from examples.stdlib_text import Text, training_batch
from tests.support.small_texts import repeating
from zenflow_compile.runtime.device.devices import CpuDevice, device_of

pytest.importorskip("transformers", reason="needs the hf extra")

from benchmarks.small_device import DeviceConfig, build, losses_of, main, parse, train

CPU = torch.device("cpu")
LOAD_TEXT = "benchmarks.small_device.load_text"
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the program trains on CUDA there")


@pytest.fixture(scope="module")
def repeating_text() -> Text:
    return repeating()


@pytest.mark.parametrize("policy", ["resident", "zero_offload", "zenflow"])
def test_loss_falls(policy: str, repeating_text: Text) -> None:
    torch.compiler.reset()
    config = DeviceConfig(steps=20, batch=2, context=32, width=64, layers=2, lr=3e-3, policy=policy, inner="eager")
    losses = losses_of(config, text=repeating_text)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1.0


def test_zero_offload_is_adamw(repeating_text: Text) -> None:
    runs = []
    for policy in ("resident", "zero_offload"):
        torch.compiler.reset()
        config = DeviceConfig(steps=5, batch=2, context=32, width=64, layers=1, policy=policy, inner="eager")
        runs.append(losses_of(config, text=repeating_text))
    assert runs[1] == pytest.approx(runs[0], abs=1e-5)


# Weights in host memory.

LIMIT = 6_350_000
LARGER = DeviceConfig(
    steps=6, batch=1, context=8, width=192, layers=13, policy="zero_offload", inner="eager", device_memory=LIMIT
)
SMALL = ["--steps", "4", "--batch", "1", "--context", "8", "--width", "64", "--layers", "1", "--inner", "eager"]


def activation_bytes(config: DeviceConfig, text: Text) -> int:
    """Bytes that a forward without compilation leaves for its backward."""
    with counted_cpu(None):
        model = build(config)
        tokens, _ = training_batch(text, seed=0, step=0, batch=config.batch, context=config.context)
        device = device_of(CPU)
        device.reset_peak()
        before = device.peak_bytes()
        loss = model(input_ids=tokens, labels=tokens).loss
        device.reset_peak()
        after = device.peak_bytes()
        assert loss.requires_grad
        assert before is not None
        assert after is not None
        return after - before


@ON_CPU
@pytest.mark.timeout(300)
def test_model_larger_than_the_limit_trains(repeating_text: Text) -> None:
    torch.compiler.reset()
    plain = losses_of(replace(LARGER, device_memory=None), text=repeating_text)
    torch.compiler.reset()
    found = train(replace(LARGER, offload_weights="auto"), text=repeating_text)
    assert found.losses == plain
    assert (memory := found.memory) is not None
    activations = activation_bytes(LARGER, repeating_text)
    assert memory.weights >= 5 * (LIMIT - activations)
    assert activations < memory.peak <= LIMIT
    norms = 2 * LARGER.layers + 1
    assert memory.kept > norms  # "auto" has found room for some
    assert memory.offloaded > 0


def test_tensors_on_the_cpu_are_counted() -> None:
    early = torch.zeros(1000)
    with counted_cpu(1 << 20):
        device = device_of(CPU)
        assert isinstance(device, CountedCpu)
        device.reset_peak()
        before, free = device.peak_bytes(), device.free_bytes()
        assert before is not None
        assert free == (1 << 20) - before
        del early  # from before: its own deleter frees it
        kept = torch.zeros(1 << 16, dtype=torch.uint8)
        torch.zeros(1 << 17, dtype=torch.uint8)
        assert device.peak_bytes() == before + (1 << 16) + (1 << 17)
        kept.untyped_storage().resize_(0)
        device.reset_peak()
        assert device.peak_bytes() == before
        late = torch.zeros(100, dtype=torch.uint8)
    assert type(device_of(CPU)) is CpuDevice
    device.reset_peak()
    assert device.peak_bytes() == before + 100
    del late
    torch.zeros(1 << 16)  # not counted any more
    device.reset_peak()
    assert device.peak_bytes() == before


@mock.patch.object(counting_allocator, "cpp_compiler", mock.Mock(return_value=None))
def test_counting_needs_a_compiler() -> None:
    with pytest.raises(CountingError, match="needs a C\\+\\+ compiler: install g"):
        counting_allocator._library.__wrapped__()


@ON_CPU
def test_peak_above_the_limit_is_an_error(repeating_text: Text) -> None:
    torch.compiler.reset()
    with pytest.raises(SystemExit, match=r"error: the peak of \d+ bytes is above --device-memory=100000: raise it"):
        main([*SMALL, "--offload-weights", "1.0", "--device-memory", "100KB"], text=repeating_text)


@ON_CPU
@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--offload-weights", "auto"], "needs a limit on the CPU.* pass --device-memory"),
        (["--offload-weights", "0.5", "--steps", "3"], "steps=3 must be at least 4"),
        (["--offload-weights", "2.5"], "offload_weights=2.5 must be"),
    ],
)
def test_memory_options_are_checked(given: list[str], error: str, repeating_text: Text) -> None:
    with pytest.raises(SystemExit, match=error):
        main([*SMALL, *given], text=repeating_text)


@pytest.mark.parametrize(
    ("given", "value"),
    [("auto", "auto"), ("0.5", 0.5), ("1.0", 1.0), ("64MB", 64 * 10**6), ("1.5 KiB", 1536), ("1000", 1000)],
)
def test_weights_option_is_read(given: str, value: Any) -> None:
    config, _ = parse(["--offload-weights", given, "--device-memory", "2GiB"])
    assert config.offload_weights == value
    assert type(config.offload_weights) is type(value)
    assert config.device_memory == 2**31


@pytest.mark.parametrize("given", ["", "much", "64XB", "-"])
def test_unreadable_bytes_are_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--offload-weights={given}"])
    assert "must be auto, a share" in capsys.readouterr().err
