"""End to end on CUDA: streams, pinned arenas and Triton kernels under a real training loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zenflow_compile as zf
from tests.gpu.training import (
    CPU,
    GPU,
    LR,
    STEPS,
    assert_equal_but_for_rounding,
    assert_same,
    compiled_by,
    distance,
    make_model,
    offloading,
    rounding_to_int8,
    train,
    weights_of,
)
from zenflow_compile.runtime.device import stream_lane
from zenflow_compile.runtime.device.cuda import CudaDevice
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.step.run_ahead import STEP_BEFORE_LAST

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("stream_values"),
]

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
entries = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@entries
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "resident"},
        {"policy": "zero_offload"},
        {"update_interval": 1, "select_interval": 2},
        {"topk_ratio": 1.0},
        {"full_warm_up_rounds": STEPS},
        {"gradient_transfer": "mean", "full_warm_up_rounds": STEPS},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_exact_options_reproduce_adamw(options: dict[str, object], compiled: bool) -> None:
    reference = make_model()
    fused = torch.optim.AdamW(reference.parameters(), lr=LR, fused=True)
    expected = train(reference, fused, compiled=compiled)
    model = make_model()
    with offloading(model, **options) as optimizer:
        found = train(model, optimizer, compiled=compiled)
        assert bool(optimizer.engine.offloaded) == (options.get("policy") != "resident")
    if options.get("policy") == "resident" and not compiled:
        assert_same(found, expected)  # the same kernels everywhere
    else:
        assert_equal_but_for_rounding(found, expected, torch.float32)


@entries
@dtypes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"staleness": 1},
        {"gradient_transfer": "mean"},
        {"gradient_transfer": "int8"},
        {"policy": "twinflow", "ratio": 0.5},
        {"policy": "deep_optimizer_states", "update_stride": 2},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()) or "defaults",
)
def test_cuda_trains_as_the_cpu(options: dict[str, object], dtype: torch.dtype, compiled: bool) -> None:
    found = []
    for device in (GPU, CPU):
        model = make_model(dtype, device)
        with offloading(model, **options) as optimizer:
            found.append(train(model, optimizer, compiled=compiled))
    if options.get("gradient_transfer") == "int8" and dtype == torch.float32:
        assert distance(*found) <= rounding_to_int8()
    else:
        assert_equal_but_for_rounding(found[0], found[1], dtype)


@dtypes
def test_entries_and_overlap_agree(dtype: torch.dtype) -> None:
    found = []
    for compiled, overlap in ((True, True), (True, False), (False, True)):
        model = make_model(dtype)
        with offloading(model, overlap_step=overlap) as optimizer:
            found.append(train(model, optimizer, compiled=compiled))
            assert optimizer.engine.steps.windows_flushed > 0
    assert_same(found[0], found[1])
    assert_equal_but_for_rounding(found[0], found[2], dtype)


@pytest.mark.parametrize("pending", [{"gradient_transfer": "mean"}, {"gradient_transfer": "int8"}])
@dtypes
def test_pending_gradients_and_overlap_agree(pending: dict[str, object], dtype: torch.dtype) -> None:
    found = []
    for overlap in (True, False):
        model = make_model(dtype)
        start = weights_of(model)
        with offloading(model, overlap_step=overlap, **pending) as optimizer:
            found.append(train(model, optimizer, compiled=True))
            assert optimizer.engine.steps.windows_flushed > 0
    assert_same(*found)
    assert distance(found[0], start) > 0


def test_slow_copies_read_complete_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy waits for a millisecond of sleep on its stream, so that a reused gradient buffer would show."""
    submit = stream_lane.StreamLane.submit

    def slowly(lane, target, source, **keywords):  # type: ignore[no-untyped-def]
        with torch.cuda.stream(lane.stream):
            torch.cuda._sleep(2_000_000)
        return submit(lane, target, source, **keywords)

    found = []
    for slow in (False, True):
        with monkeypatch.context() as patch:
            if slow:
                patch.setattr(stream_lane.StreamLane, "submit", slowly)
            model = make_model()
            with offloading(model) as optimizer:
                found.append(train(model, optimizer, compiled=True, inner="inductor"))
    assert_same(*found)


def test_host_memory_is_pinned_and_profile_sees_device() -> None:
    model = make_model(torch.bfloat16)
    with offloading(model) as optimizer:
        train(model, optimizer, compiled=True)
        for offloaded in optimizer.engine.offloaded.values():
            host = offloaded.host
            uploads = [upload.content() for upload in host.uploads]
            assert all(tensor.is_pinned() for tensor in (*host.state(), *host.gradients, *uploads))
        with zf.profile(optimizer) as profile:
            train(model, optimizer, compiled=True)
        summary = profile.summary()
    assert summary["steps"] == STEPS
    assert (summary["d2h_bytes_per_step"] or 0) > 0
    assert (summary["backward_ms_per_step"] or 0) > 0


def waits() -> dict[str, int]:
    """How often the host has waited for the device, except for the step before last: that wait depends on times."""
    return {why: count for why, count in device_of(GPU).blocking.items() if why != STEP_BEFORE_LAST}


@entries
def test_steady_step_does_not_synchronize(compiled: bool) -> None:
    model = make_model(torch.bfloat16)
    generator = torch.Generator(device="cpu").manual_seed(2)
    batch = torch.randn(64, 512, generator=generator, device="cpu").to(GPU, torch.bfloat16)

    def step() -> None:
        run(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with offloading(model, select_interval=1000) as optimizer:
        run = compiled_by(optimizer, model) if compiled else model
        for _ in range(8):  # selects one time, in the first update windows
            step()
        torch.cuda.synchronize()
        waited, flushed = waits(), optimizer.engine.steps.windows_flushed
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert waits() == waited
        assert optimizer.engine.steps.windows_flushed > flushed


def run_with(options: dict[str, object], *, device: torch.device = GPU, compiled: bool = True) -> list[Tensor]:
    model = make_model(device=device)
    with offloading(model, **options) as optimizer:
        return train(model, optimizer, compiled=compiled)


@entries
def test_default_device_is_cuda(compiled: bool) -> None:
    expected = run_with({}, compiled=compiled)
    torch.set_default_device(GPU)
    try:
        found = run_with({}, compiled=compiled)
    finally:
        torch.set_default_device(None)
    assert_same(found, expected)


@entries
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_current_device_is_not_the_model_s(compiled: bool) -> None:
    second = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    found = run_with({}, device=second, compiled=compiled)
    assert torch.cuda.current_device() == 0
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert_same(found, run_with({}, compiled=compiled))
    else:
        assert_equal_but_for_rounding(found, run_with({}, compiled=compiled), torch.float32)


@entries
@pytest.mark.parametrize("where", ["all", "forward"])
def test_training_in_a_side_stream(where: str, compiled: bool) -> None:
    expected = run_with({}, compiled=compiled)
    side = torch.cuda.Stream()
    model = make_model()
    with offloading(model) as optimizer:
        if where == "all":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                found = train(model, optimizer, compiled=compiled)
            torch.cuda.current_stream().wait_stream(side)
        else:
            found = train(model, optimizer, compiled=compiled, forward_stream=side)
    assert_same(found, expected)


@entries
def test_refused_pinning_changes_no_numbers(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_with({}, compiled=compiled)

    def refuse(device: CudaDevice, address: int, size_bytes: int) -> None:
        raise RuntimeError("cudaHostRegister: refused by a test")

    monkeypatch.setattr(CudaDevice, "register", refuse)
    with pytest.warns(RuntimeWarning, match="refused by a test"):
        found = run_with({}, compiled=compiled)
    assert_same(found, expected)
