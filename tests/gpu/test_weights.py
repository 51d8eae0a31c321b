"""Weights in host memory on CUDA: the bits of the same run with weights on the device, and the memory of a few."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zenflow_compile as zf
from tests.gpu.training import GPU, assert_same, compiled_by, make_model, offloading, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("stream_values"),
]

POLICIES: list[dict[str, object]] = [
    {"policy": "resident"},
    {"policy": "zero_offload"},
    {"update_interval": 1, "select_interval": 2},
    {"update_interval": 4},
    {"staleness": 1},
]
policies = pytest.mark.parametrize("options", POLICIES, ids=lambda options: "-".join(map(str, options.values())))


@policies
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_weights_change_no_number(options: dict[str, object], dtype: torch.dtype, inner: str) -> None:
    found = []
    for offload_weights in (False, 1.0):
        model = make_model(dtype)
        with offloading(model, offload_weights=offload_weights, **options) as optimizer:
            found.append(train(model, optimizer, compiled=True, inner=inner))
            assert bool(optimizer.engine.weights.weights) is bool(offload_weights)
    assert_same(*found)


def large_model() -> nn.Sequential:
    """24 matrices of 32 MiB, on the CPU."""
    torch.manual_seed(0)
    layers = [nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16, device="cpu") for _ in range(24)]
    return nn.Sequential(*[each for layer in layers for each in (layer, nn.Tanh())])


def test_memory_is_that_of_the_plan() -> None:
    """Of a model that is moved without its weights: allocated and reserved memory do not grow over 100 steps."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(GPU)
    model = zf.move_to_device(large_model(), GPU)
    weight_bytes = sum(param.nbytes for param in model.parameters())
    optimizer = zf.ZenFlowAdamW(model.parameters(), lr=1e-4, policy="zero_offload", offload_weights=1.0)
    run = compiled_by(optimizer, model)
    batch = torch.randn(16, 4096, device=GPU, dtype=torch.bfloat16)
    reserved: list[int] = []
    for step in range(100):
        if step == 2:
            torch.cuda.reset_peak_memory_stats(GPU)
        run(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        reserved.append(torch.cuda.memory_reserved(GPU))
    torch.cuda.synchronize(GPU)
    # A weight, three upload buffers, the gradient buffers and a gradient, of one weight's size each, and activations.
    assert torch.cuda.max_memory_allocated(GPU) - before < weight_bytes // 2
    assert reserved[-1] == reserved[9]
    optimizer.close()
