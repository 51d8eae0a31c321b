"""Bytes, slices and gradient buffers of a plan."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from zenflow_compile.planning.cached_state import (
    FILE_WINDOW_BYTES,
    FILES_IN_TURN,
    resident_in_window,
    weight_window_bytes,
)
from zenflow_compile.planning.plan import ParamPlan, Placement, Plan
from zenflow_compile.runtime.device_updates.resident_updates import ResidentState
from zenflow_compile.runtime.gradients.pending_gradient import Residual, Scales, WindowSum
from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.host.host_kernel import HostKernel
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.host_state import HostState
from zenflow_compile.runtime.state_forms import StateForm


def split(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> ParamPlan:
    sizes = {"slices": 100, "length": 40, "k": 10, "interval": 4, "staleness": 0, **changes}
    return ParamPlan(index=0, name="w", shape=(40, 100), dtype=dtype, placement=Placement.SPLIT_COLUMNS, dim=1, **sizes)


def test_slices_are_selected_or_deferred() -> None:
    plan = split()
    assert (plan.deferred, plan.numel, plan.offloaded) == (90, 4000, True)
    assert split(k=0).deferred == 100
    assert split(k=100).deferred == 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_summed_window_has_one_gradient_buffer(staleness: int) -> None:
    plan = split(interval=4, staleness=staleness, summed=True)
    assert (plan.gradient_buffers.count, plan.uploads) == (1 + staleness, 1 + staleness)
    assert plan.host_bytes == (12 + 2 * (plan.gradient_buffers.count + plan.uploads)) * 3600
    assert plan.device_bytes == split(interval=4).device_bytes + 4 * 3600


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_gradient_bytes(dtype: torch.dtype) -> None:
    plan, plain = split(dtype, compressed=True), split(dtype)
    assert plan.gradient_buffers.nbytes == 90 * (40 + 4)
    assert plain.gradient_buffers.nbytes == 90 * 40 * dtype.itemsize
    assert plain.host_bytes - plan.host_bytes == 4 * (plain.gradient_buffers.nbytes - plan.gradient_buffers.nbytes)
    residual = Residual.allocate(plan, torch.device("cpu"))
    assert plan.device_bytes - plain.device_bytes == residual.lost.nbytes


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("interval", [1, 4])
def test_gradient_buffers_and_uploads(interval: int, staleness: int) -> None:
    """One more of each per step of staleness: the update of a flushed window is not applied yet."""
    plan = split(interval=interval, staleness=staleness)
    assert plan.gradient_buffers.count == interval + staleness
    assert plan.uploads == 1 + staleness


def test_host_bytes_per_parameter() -> None:
    """Master and moments in fp32, S gradients and one upload buffer in the model's dtype: 14 + 2 S bytes in bf16."""
    for interval in (1, 2, 4, 8):
        assert split(interval=interval, k=0).host_bytes == (14 + 2 * interval) * 4000
        assert split(torch.float32, interval=interval, k=0).host_bytes == (16 + 4 * interval) * 4000
    assert split(k=100).host_bytes == 0
    assert split(k=10).host_bytes == split(k=0).host_bytes * 90 // 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes", [{}, {"staleness": 1}, {"k": 0}, {"k": 100}, {"interval": 1, "k": 37}, {"compressed": True}]
)
def test_runtime_allocates_the_planned_bytes(dtype: torch.dtype, sizes: dict[str, int]) -> None:
    plan = split(dtype, **sizes)
    arena = HostArena(HostState.arena_bytes(plan))
    kernel = HostKernel(plan.gradient_buffers.dtype, dtype, plan.gradient_buffers.count)
    host = HostState.allocate(plan, arena, kernel, ctypes.c_void_p())
    tensors = [*host.state(), *host.gradients, *[each.content() for each in host.uploads]]
    assert sum(tensor.nbytes for tensor in tensors) == plan.host_bytes
    assert plan.host_bytes <= HostState.arena_bytes(plan) <= plan.host_bytes + 64 * len(tensors)
    assert arena.used_bytes == HostState.arena_bytes(plan)
    device = DeviceState.allocate(plan, torch.device("cpu"))
    lost = Residual.allocate(plan, torch.device("cpu")).lost.nbytes if plan.compressed else 0
    assert sum(tensor.nbytes for tensor in device.rows.stored) + lost == plan.device_bytes
    summed = split(dtype, **{"interval": 4, **sizes, "summed": True})
    window_sum = WindowSum.allocate(summed, torch.device("cpu"), Scales())
    assert summed.device_bytes == plan.device_bytes + window_sum.total.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_device_bytes_of_resident_parameters(dtype: torch.dtype) -> None:
    """fp32 weights are their own master."""
    plan = ParamPlan(index=0, name="w", shape=(40, 100), dtype=dtype, placement=Placement.DEVICE)
    assert plan.host_bytes == 0
    assert not plan.offloaded
    state = ResidentState.zeros_like(torch.zeros(40, 100, dtype=dtype))
    assert plan.device_bytes == sum(tensor.nbytes for tensor in state.tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("moments", "of_moments"), [("bf16", 4), ("fp8", 2 + 2 * 2 / 40)])
def test_device_bytes_with_moments_in_fewer_bytes(dtype: torch.dtype, moments: str, of_moments: float) -> None:
    """Of selected slices and of a resident parameter, whose rows have 40 elements: two quantization blocks."""
    plan = split(dtype, k=37, moments=moments)
    device = DeviceState.allocate(plan, torch.device("cpu"))
    assert plan.device_bytes == sum(tensor.nbytes for tensor in device.rows.stored) == 37 * 40 * (4 + of_moments)
    whole = ParamPlan(index=0, name="w", shape=(100, 40), dtype=dtype, placement=Placement.DEVICE, moments=moments)
    state = ResidentState.zeros_like(torch.zeros(100, 40, dtype=dtype), form=StateForm.of_whole(whole))
    master = 0 if dtype == torch.float32 else 4
    assert whole.device_bytes == sum(tensor.nbytes for tensor in state.tensors())
    assert whole.device_bytes == 4000 * (master + of_moments)


def test_plan_sums_its_parameters() -> None:
    scalar = ParamPlan(index=2, name="b", shape=(), dtype=torch.float32, placement=Placement.DEVICE)
    params = (split(), split(k=0), scalar)
    plan = Plan(policy="zenflow", params=params)
    assert plan.host_bytes == params[0].host_bytes + params[1].host_bytes
    assert plan.device_bytes == sum(param.device_bytes for param in params)
    assert params[2].numel == 1


# State in files.


@pytest.mark.parametrize(
    ("sizes", "window", "resident"),
    [
        ([], 0, []),
        ([5, 3, 2], 10, [True, True, True]),
        ([5, 3, 2], 9, [False, False, False]),
        ([3, 3, 3, 3, 3], 3, [False] * 5),
        ([3, 3, 3, 3, 3], 14, [False] * 5),
        ([3] * 7, 18, [True, True] + [False] * 5),
        ([3] * 7, 20, [True, True] + [False] * 5),
        ([3, 6, 1, 4, 5, 6, 6], 28, [True, False, True] + [False] * 4),
    ],
)
def test_first_states_stay_in_the_window(sizes: list[int], window: int, resident: list[bool]) -> None:
    """Those that fit into what four times the largest leaves."""
    assert resident_in_window(sizes, window) == resident


@pytest.mark.parametrize(
    ("given", "window"),
    [
        (None, 40),  # all of them
        (60 + 10, 10),  # the least: one of each
        (60 + 25, 25),  # what one state leaves
        (60 + 50, 40),  # all, and the rest is the state's
        (180 + 35, 40),  # four of them come before the last bytes of the state
    ],
)
def test_weights_have_a_part_of_the_window(given: int | None, window: int) -> None:
    assert weight_window_bytes([10, 10, 10, 10], [60, 60, 60], given) == window


def test_default_window_of_weights_has_four_turns() -> None:
    large = FILE_WINDOW_BYTES
    assert weight_window_bytes([large] * 9, [6 * large] * 9, None) == FILES_IN_TURN * large
    assert weight_window_bytes([large // 16] * 99, [large] * 99, None) == large
    assert weight_window_bytes([large] * 9, [6 * large] * 9, 8 * large) == 2 * large
    assert weight_window_bytes([large] * 9, [6 * large] * 9, 20 * large) == FILES_IN_TURN * large


def in_files(*sizes: int, window: int | None) -> Plan:
    """Parameters with ``sizes`` times 120 bytes of state in files, between two whose state is not."""
    filed = [
        ParamPlan(
            index=index,
            name=f"w{index}",
            shape=(size, 10),
            dtype=torch.bfloat16,
            placement=Placement.FILE,
            dim=0,
            slices=size,
            length=10,
            in_file=True,
        )
        for index, size in enumerate(sizes, start=1)
    ]
    others = [split(), split()]
    return Plan(policy="zero_infinity", params=(others[0], *filed, others[1]), host_window_bytes=window)


def test_rest_takes_turns_in_the_rest_of_the_window() -> None:
    plan = in_files(3, 3, 3, 3, 3, 3, 3, window=20 * 120)
    assert [param.name for param in plan.params_in_turn] == ["w3", "w4", "w5", "w6", "w7"]
    assert plan.bytes_in_turn == 15 * 120
    assert plan.file_ring_bytes == 14 * 120
    assert plan.file_window_bytes == 20 * 120


@pytest.mark.parametrize("window", [None, 21 * 120, 10**9])
def test_no_state_takes_turns_if_all_fits(window: int | None) -> None:
    plan = in_files(3, 3, 3, 3, 3, 3, 3, window=window)
    assert (plan.params_in_turn, plan.bytes_in_turn, plan.file_ring_bytes) == ((), 0, 0)


def test_all_state_takes_turns_in_a_small_window() -> None:
    plan = in_files(3, 5, 2, window=1)
    assert plan.bytes_in_turn == plan.file_bytes == 10 * 120
    assert plan.file_ring_bytes == plan.file_window_bytes == 5 * 120


def test_nothing_takes_turns_without_files() -> None:
    plan = Plan(policy="zenflow", params=(split(),))
    assert (plan.params_in_turn, plan.bytes_in_turn, plan.file_ring_bytes) == ((), 0, 0)
