"""End to end on CUDA: streams, pinned arenas and Triton kernels under a real training loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zenflow_compile as zf
from zenflow_compile.runtime.device_updates import column_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 24


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)]
    return nn.Sequential(*layers).to(device="cuda", dtype=dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, compiled: bool, inner: str = "eager") -> list[Tensor]:
    run = torch.compile(model, backend="zenflow", options={"inner": inner}) if compiled else model
    generator = torch.Generator(device="cuda").manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(STEPS):
        batch = torch.randn(64, 512, device="cuda", generator=generator).to(dtype)
        run(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, zf.ZenFlowAdamW):
        optimizer.synchronize()
    return [param.detach().float().cpu() for param in model.parameters()]


def offloading(model: nn.Module, **options: object) -> zf.ZenFlowAdamW:
    return zf.ZenFlowAdamW(model.named_parameters(), lr=1e-3, device_share=0.0, **options)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "resident"},
        {"policy": "zero_offload"},
        {"update_interval": 1, "select_strategy": "step", "select_interval": 2},
        {"topk_ratio": 1.0},
        {"accumulate_on_device": True, "full_warm_up_rounds": STEPS},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_exact_options_reproduce_adamw(options, compiled):
    reference = make_model()
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), compiled=compiled)
    model = make_model()
    with offloading(model, **options) as optimizer:
        found = train(model, optimizer, compiled=compiled)
        assert bool(optimizer.engine.offloaded) == (options.get("policy") != "resident")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_and_overlap_agree(dtype):
    found = []
    for compiled, overlap in ((True, True), (True, False), (False, True)):
        model = make_model(dtype)
        with offloading(model, overlap_step=overlap) as optimizer:
            found.append(train(model, optimizer, compiled=compiled))
            assert optimizer.engine.windows_flushed > 0
    for ours, blocking, eager in zip(*found, strict=True):
        assert torch.equal(ours, blocking)
        torch.testing.assert_close(ours, eager, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("pending", [{"accumulate_on_device": True}, {"gradient_compression": "int8"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pending_gradients_on_the_device(pending, dtype):
    found = []
    for overlap in (True, False):
        model = make_model(dtype)
        before = [param.detach().float().cpu() for param in model.parameters()]
        with offloading(model, overlap_step=overlap, **pending) as optimizer:
            found.append(train(model, optimizer, compiled=True))
            assert optimizer.engine.windows_flushed > 0
    for ours, blocking, start in zip(*found, before, strict=True):
        assert torch.equal(ours, blocking)
        assert 0 < (ours - start).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compression_on_cuda_matches_the_cpu(dtype):
    gradient = torch.randn(100, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    received = []
    for device in ("cpu", "cuda"):
        residual = torch.full((100, 300), 0.01, dtype=dtype, device=device)
        scales, values = torch.empty(100, device=device), torch.empty(100, 300, dtype=torch.int8, device=device)
        column_ops.quantize_slices_(gradient.to(device), residual, 0.3, scales, values)
        received.append((values * scales[:, None]).cpu())
        exact = 0.3 * gradient.float() + torch.full((100, 300), 0.01, dtype=dtype).float()
        torch.testing.assert_close(received[-1] + residual.float().cpu(), exact, rtol=1e-5, atol=1e-4)
    quantum = exact.abs().amax(1, keepdim=True) / 127
    assert ((received[0] - received[1]).abs() <= 1.01 * quantum).all()  # a tie may round either way


@pytest.mark.slow
def test_slow_copies_read_complete_gradients(monkeypatch):
    """Every D2H copy waits for a millisecond of sleep on its stream, so that a reused gradient buffer would show."""
    from zenflow_compile.runtime.device import stream_lane

    submit = stream_lane.StreamLane.submit

    def slowly(lane, target, source, **keywords):
        with torch.cuda.stream(lane._stream):
            torch.cuda._sleep(2_000_000)
        return submit(lane, target, source, **keywords)

    reference = make_model()
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), compiled=True, inner="inductor")
    monkeypatch.setattr(stream_lane.StreamLane, "submit", slowly)
    model = make_model()
    with offloading(model, update_interval=1) as optimizer:
        found = train(model, optimizer, compiled=True, inner="inductor")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_host_memory_is_pinned_and_profile_sees_device():
    model = make_model(torch.bfloat16)
    with offloading(model) as optimizer:
        train(model, optimizer, compiled=True)
        assert all(state.host.master.is_pinned() for state in optimizer.engine.offloaded.values())
        with zf.profile(optimizer) as profile:
            train(model, optimizer, compiled=True)
        summary = profile.summary()
    assert summary["steps"] == STEPS
    assert summary["d2h_bytes_per_step"] > 0
    assert summary["backward_ms_per_step"] > 0
