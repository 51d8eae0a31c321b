"""``offload_all()`` on CUDA: allocated memory is that of the model, and the bits are those of the run without."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.gpu.training import assert_same, make_model, offloading, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("stream_values"),
]

POLICIES: list[dict[str, object]] = [
    {"policy": "resident"},
    {"policy": "zero_offload"},
    {"policy": "deep_optimizer_states", "update_stride": 2},
    {"update_interval": 1, "select_interval": 2},
    {"update_interval": 4, "gradient_transfer": "mean"},
    {"update_interval": 4, "gradient_transfer": "int8"},
    {"update_interval": 2, "staleness": 1},
]
_WORKSPACE_BYTES = 64 << 20  # of cuBLAS, which PyTorch allocates with the first product and keeps


@pytest.mark.parametrize("options", POLICIES, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_given_back(options: dict[str, object], dtype: torch.dtype) -> None:
    found = []
    for moves in (False, True):
        model = make_model(dtype)
        gc.collect()
        before = torch.cuda.memory_allocated()
        with offloading(model, **options) as optimizer:
            for _ in range(4):
                train(model, optimizer, compiled=False, steps=3)
                if moves:
                    held = torch.cuda.memory_allocated()
                    state_bytes = optimizer.device_bytes
                    optimizer.offload_all()
                    gc.collect()
                    after = torch.cuda.memory_allocated()
                    assert held - after >= state_bytes
                    assert after - before <= _WORKSPACE_BYTES
                    assert optimizer.device_bytes == 0
            found.append(train(model, optimizer, compiled=False, steps=3))
    assert_same(*found)
