"""The Triton kernels equal their references.

On a GPU they are compared as they run there. Without one they run in Triton's interpreter, which has to be chosen
before Triton is first imported: ``test_kernels_in_the_interpreter`` runs this file once more in a process of its own.
Compiling needs no GPU either: ``test_compiled_kernels.py`` does that as far as machine code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.support.exact import Exact
from tests.support.made_up_rules import RULES
from zenflow_compile.rules import KINDS
from zenflow_compile.rules.rule import Rule, named
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.device_updates.resident_updates import ResidentUpdates
from zenflow_compile.runtime.device_updates.selection import Selection, SliceState
from zenflow_compile.runtime.state_forms import StateForm
from zenflow_compile.runtime.update_rule import StepCoefficients, update_window_, window_numbers

pytest.importorskip("triton", reason="needs Triton, whose wheels are for Linux")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    pytest.importorskip("numpy", reason="Triton's interpreter computes with numpy")
    DEVICES = ["cpu"]
else:
    NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    DEVICES = [pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]

on_devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
dims = pytest.mark.parametrize("dim", [0, 1])
# Slices and their length: less than a tile, several tiles either way and no multiple, more than one strip of partial
# sums, many slices. The interpreter takes milliseconds for each tile.
extents = pytest.mark.parametrize("extent", [(1, 1), (70, 66), (5, 600), (130, 3)])
scale_places = pytest.mark.parametrize("scale_on_device", [False, True], ids=["number", "on device"])
fractions = pytest.mark.parametrize("fraction", [0.0, 0.1, 1.0])
COEFFICIENTS = StepCoefficients.known(lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1, grad_scale=0.5)


def grad_scale_of(value: float, on_device: bool, device: str) -> Number:
    return Number(torch.tensor(value, dtype=torch.float64, device=device)) if on_device else Number.known(value)


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As the kernels cast: the interpreter keeps bf16 as bits and cuts bits off; hardware rounds to nearest."""
    if INTERPRETED and dtype == torch.bfloat16:
        return (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return values.to(dtype)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Equal with the signs of zeros; NaN is NaN, whichever bits it has."""
    assert torch.equal(got.isnan(), expected.isnan())
    if got.is_floating_point():
        bits = torch.int32 if got.dtype == torch.float32 else torch.int16
        got, expected = (torch.where(each.isnan(), 0.0, each).view(bits) for each in (got, expected))
    assert torch.equal(got, expected)


def selection_of(slices: int, fraction: float, device: str) -> Selection:
    """Selected slices in no particular order."""
    return Selection.of(torch.randperm(slices)[: round(fraction * slices)], slices, torch.device(device))


def blocks_like(matrix: Tensor, dim: int, selection: Selection) -> tuple[Tensor, Tensor]:
    length = matrix.shape[1 - dim]
    return matrix.new_full((len(selection.selected), length), 9), matrix.new_full((len(selection.deferred), length), 9)


@on_devices
@fractions
@dims
@extents
@dtypes
def test_norms_and_split(dtype: torch.dtype, extent: tuple[int, int], dim: int, fraction: float, device: str) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels

    matrix = torch.randn(extent if dim == 0 else extent[::-1], device=device).to(dtype)
    selection = selection_of(extent[0], fraction, device)
    expected = blocks_like(matrix, dim, selection)
    column_ops.reference_split_columns(matrix, dim, selection, *expected)

    got = blocks_like(matrix, dim, selection)
    norms = triton_kernels.norms_and_split(matrix, dim, selection, *got)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(norms, column_ops.reference_column_norms(matrix, dim))
    assert torch.equal(norms, triton_kernels.column_norms(matrix, dim))

    rebuilt = torch.full_like(matrix, 9)
    triton_kernels.unsplit_columns(rebuilt, dim, selection, *got)
    assert torch.equal(rebuilt, matrix)


@on_devices
@dims
@pytest.mark.parametrize("split_shape", [(64, 8), (64, 2), (32, 4), (8, 1)])
def test_split_in_tiles_of_any_shape(
    split_shape: tuple[int, int], dim: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices that are large enough for these tiles would take the interpreter too long.

    17 strips are more than are added up at a time.
    """
    from zenflow_compile.runtime.device_updates import triton_kernels

    monkeypatch.setattr(triton_kernels, "_split_shape", lambda *_: split_shape)
    test_norms_and_split(torch.bfloat16, (10, 1030), dim, 0.1, device)


@on_devices
@dims
def test_kernels_take_any_strides(dim: int, device: str) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels

    matrix = torch.randn(70, 90, device=device)
    selection = selection_of(matrix.shape[dim], 0.3, device)
    expected = blocks_like(matrix, dim, selection)
    column_ops.reference_split_columns(matrix, dim, selection, *expected)
    column_major = matrix.t().contiguous().t()
    strided = torch.stack([matrix, matrix], dim=-1)[..., 0]
    for view in (column_major, strided):
        got = blocks_like(matrix, dim, selection)
        norms = triton_kernels.norms_and_split(view, dim, selection, *got)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
        torch.testing.assert_close(norms, column_ops.reference_column_norms(matrix, dim))
        view.zero_()
        triton_kernels.unsplit_columns(view, dim, selection, *got)
        assert torch.equal(view, matrix)


@on_devices
@fractions
@dims
@dtypes
def test_merge_writes_only_its_slices(dtype: torch.dtype, dim: int, fraction: float, device: str) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels

    surrounding = torch.randn(66, 3, 70, device=device).to(dtype)
    surrounding[3:5] = float("inf")
    expected = surrounding.clone()
    selection = selection_of(surrounding.shape[2 * dim], fraction, device)
    values = torch.randn(len(selection.deferred), surrounding.shape[2 - 2 * dim], device=device).to(dtype)
    column_ops.reference_merge_columns(expected[:, 1], dim, selection.deferred, values)
    triton_kernels.merge_columns(surrounding[:, 1], dim, selection, values)
    assert torch.equal(surrounding, expected)


@on_devices
@fractions
@dims
@dtypes
@scale_places
@pytest.mark.parametrize("shape", [(7, 130), (70, 35)])
def test_update_slices(
    shape: tuple[int, int], scale_on_device: bool, dtype: torch.dtype, dim: int, fraction: float, device: str
) -> None:
    from zenflow_compile.runtime.device_updates import triton_updates

    coefficients = COEFFICIENTS._replace(grad_scale=grad_scale_of(0.3, scale_on_device, device))
    matrix = torch.randn(shape, device=device).to(dtype)
    before = matrix.clone()
    selection = selection_of(shape[dim], fraction, device)
    master = (matrix if dim == 0 else matrix.t())[selection.selected.long()].float().contiguous()
    state = [master, torch.zeros_like(master), torch.zeros_like(master)]
    expected = [tensor.clone() for tensor in state]
    for step in (1, 2):
        gradient, _ = blocks_like(matrix, dim, selection)
        gradient.normal_()
        update_window_(expected, [gradient], [COEFFICIENTS._replace(grad_scale=Number.known(0.3))], step=step)
        own = SliceState(matrix, dim, selection, gradient, state[0], tuple(state[1:]), step)
        triton_updates.update_slices_(own, coefficients)
    for mine, theirs in zip(state, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)
    slices, old = (matrix, before) if dim == 0 else (matrix.t(), before.t())
    assert torch.equal(slices[selection.selected.long()], cast(state[0], dtype))
    assert torch.equal(slices[selection.deferred.long()], old[selection.deferred.long()])


EVERY_RULE = [
    *(kind() for kind in KINDS.values()),
    *RULES,
]
by_rule = pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: type(rule).__name__)


@on_devices
@by_rule
@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
def test_updates_have_the_bits_of_the_rule(rule: Rule, moments: str, device: str) -> None:
    """Of its own functions, one rounding per operation, between the conversions of ``StateForm``."""
    from zenflow_compile.runtime.device_updates import triton_updates

    slices, length, step = 18, 70, 3
    form = StateForm(moments=moments, length=length, arrays=rule.arrays)
    drawn = [torch.rand(slices, length) if array.nonnegative else torch.randn(slices, length) for array in rule.arrays]
    if drawn:
        drawn[-1][3, 0] = torch.nan
    arrays = form.compress(*drawn, step=1)
    gradient, weight = torch.randn(slices, length).bfloat16(), torch.randn(slices, length)
    gradient[0, ::2], gradient[0, 1::2], gradient[1, 0], gradient[2, 0] = 0.0, -0.0, torch.nan, torch.inf
    options = rule.options_of(dict(rule.numbers) | {"lr": 0.01})
    coefficients = StepCoefficients(options, Number.known(-0.5), rule)
    numbers = window_numbers([coefficients], step)
    wide = [*form.expand(*arrays), *(torch.zeros_like(weight) for _ in rule.window)]
    exact = [Exact(each.clone()) for each in (weight, gradient.float() * -0.5, *wide)]
    values: Any = rule.accumulate(
        exact[0],  # type: ignore[arg-type]
        named(rule.values, exact[2:]),
        exact[1],
        named(rule.of_gradient, numbers.of_gradient[0]),
    )
    moved: Any = rule.apply(exact[0], named(rule.values, values), named(rule.of_window, numbers.of_window))
    expected = form.compress(*(each.value for each in values[: len(rule.arrays)]), step=step)

    matrix = torch.zeros(slices, length, dtype=torch.bfloat16, device=device)
    mine = [each.clone().to(device) for each in (weight, *arrays)]
    state = SliceState(matrix, 0, None, gradient.to(device), mine[0], tuple(mine[1:]), step, form)
    triton_updates.update_slices_(state, coefficients)
    for got, wanted in zip(mine, (moved.value, *expected), strict=True):
        assert_same_bits(got.cpu(), wanted)
    assert_same_bits(matrix.cpu(), cast(moved.value, torch.bfloat16))
    assert not torch.equal(mine[0].cpu(), weight)


@on_devices
@by_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resident_parameters_use_their_rules_kernel(
    dtype: torch.dtype, rule: Rule, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any shape; AdamW has PyTorch's kernel, and so have weights that are not contiguous operators."""
    from zenflow_compile.runtime.device_updates import triton_updates

    launched: list[int] = []
    update = triton_updates.update_slices_
    monkeypatch.setattr(
        triton_updates, "update_slices_", lambda state, given: (launched.append(state.step), update(state, given))
    )
    shapes = [(), (5,), (3, 40), (2, 3, 4)]
    start = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    start.append(torch.randn(6, 4, device=device).to(dtype).t())
    coefficients = StepCoefficients(rule.initial, Number.known(0.5), rule)
    found = []
    for kernels in (None, triton_updates):
        monkeypatch.setattr(column_ops, "_updates", lambda _, kernels=kernels: kernels)
        resident, params = (
            ResidentUpdates(),
            [Parameter(each.clone(memory_format=torch.preserve_format)) for each in start],
        )
        for param in params:
            length = param[0].numel() if param.dim() > 1 else param.numel()
            resident.forms[param] = StateForm(length=length, arrays=rule.arrays)
        for step in range(2):
            torch.manual_seed(step)
            resident.update(params, [torch.randn_like(param) for param in params], coefficients)
        found.append(params)
    assert launched == ([] if rule.fused else [1, 1, 1, 1, 2, 2, 2, 2])
    for mine, theirs in zip(*found, strict=True):
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.01, "atol": 1e-5}
        torch.testing.assert_close(mine, theirs, **tolerance)
    assert not any(torch.equal(mine, before) for mine, before in zip(found[1][2:], start[2:], strict=True))


def difficult_moments(k: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    """Moments of many magnitudes, with zeros, subnormal and infinite numbers and NaN."""
    exponents = torch.randint(-20, 10, (k, length), device=device)
    first = torch.randn(k, length, device=device) * torch.exp2(exponents.float())
    second = first.square()
    if k > 6:
        first[0], second[0] = 0.0, 0.0
        first[1, ::3], second[1, 1::3] = 0.0, 0.0
        first[2, 1], second[3, -1], first[4, :2] = torch.inf, torch.nan, -torch.inf
        first[5], second[5] = first[5] * 1e-40, second[5] * 1e-43
        first[6] *= 1e37
    return first, second


@on_devices
@dims
@pytest.mark.parametrize("moments", ["bf16", "fp8"])
@pytest.mark.parametrize("shape", [(20, 70), (1, 1100)])
@pytest.mark.parametrize("every", [False, True], ids=["selected", "every slice"])
def test_moments_in_fewer_bytes_have_the_same_bits(
    every: bool, shape: tuple[int, int], moments: str, dim: int, device: str
) -> None:
    """As the fp32 kernel, between the conversions of ``StateForm``."""
    from zenflow_compile.runtime.device_updates import triton_updates

    (slices, length), dtype = shape, torch.float32 if every else torch.bfloat16
    matrix = torch.randn(shape if dim == 0 else shape[::-1], device=device).to(dtype)
    selection = None if every else selection_of(slices, 0.5, device)
    k = slices if selection is None else len(selection.selected)
    form = StateForm(moments=moments, length=length)
    stored = form.compress(*difficult_moments(k, length, device))
    master = torch.randn(k, length, device=device)
    mine = SliceState(matrix, dim, selection, torch.randn(k, length, device=device), master, tuple(stored), 3, form)
    for step in (3, 4):
        mine = mine._replace(step=step)
        before = tuple(each.clone() for each in form.expand(*mine.arrays))
        plain = SliceState(matrix.clone(), dim, selection, mine.gradient, mine.master.clone(), before, step)
        triton_updates.update_slices_(plain, COEFFICIENTS)
        triton_updates.update_slices_(mine, COEFFICIENTS)
        expected = form.compress(*plain.arrays, step=step)
        assert_same_bits(mine.arrays[0], expected[0])
        assert_same_bits(mine.arrays[1], expected[1])
        assert_same_bits(mine.master, plain.master)
        assert_same_bits(mine.matrix, plain.matrix)


@on_devices
@dtypes
@scale_places
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (10, 130), (23, 3), (9, 1024), (9, 1100)])
def test_quantized_slices_have_the_same_bits(
    shape: tuple[int, int], residual_dtype: torch.dtype, scale_on_device: bool, dtype: torch.dtype, device: str
) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels

    gradient = torch.randn(shape).to(dtype)
    residual = torch.randn(shape).mul_(0.01).to(residual_dtype)
    if shape[0] > 8:
        gradient[0], residual[0] = 0.0, 0.0
        gradient[1], residual[1] = -0.0, -0.0
        gradient[2, ::2], residual[2] = -0.0, -0.0
        gradient[3, 1], gradient[4, -1], gradient[5, :2] = torch.inf, torch.nan, -torch.inf
        if residual_dtype == torch.float32 or not INTERPRETED:  # the interpreter casts subnormal numbers to other ones
            gradient[6], residual[6] = torch.randn(shape[1]).mul_(1e-43), 0.0
        gradient[7] = torch.arange(shape[1]) % 127 + 0.5  # ties
        gradient[7, 0], residual[7] = 254.0, 0.0
    for scale in (0.3, 0.5):
        # A residual in fp32 takes the exact error, which the kernel casts.
        expected = residual.float().clone(), torch.zeros(shape[0]), torch.zeros(shape, dtype=torch.int8)
        column_ops.reference_quantize_slices_(gradient, expected[0], scale, *expected[1:])
        mine = [tensor.to(device) for tensor in (residual.clone(), *map(torch.zeros_like, expected[1:]))]
        factor = grad_scale_of(scale, scale_on_device, device).for_kernels()
        triton_kernels.quantize_slices_(gradient.to(device), mine[0], factor, *mine[1:])
        for got, bits in zip(mine, (cast(expected[0], residual_dtype), *expected[1:]), strict=True):
            assert_same_bits(got.cpu(), bits)
        exact = torch.tensor(scale).mul(gradient.float()).add_(residual.float())
        finite = exact.isfinite().all(1)
        assert mine[1].isfinite().cpu().equal(finite)
        sent = mine[2].cpu() * mine[1].cpu()[:, None]
        assert ((sent - exact).abs()[finite] <= 0.501 * mine[1].cpu()[finite, None] + 1e-42).all()


@on_devices
def test_infinite_factor_spoils_every_slice(device: str) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels

    found = []
    for where, quantize in (
        ("cpu", column_ops.reference_quantize_slices_),
        (device, triton_kernels.quantize_slices_),
    ):
        residual, scales = torch.zeros(3, 70, device=where), torch.zeros(3, device=where)
        values = torch.zeros(3, 70, dtype=torch.int8, device=where)
        gradient = torch.tensor([[1.0], [0.0], [-2.0]], device=where).expand(3, 70).contiguous()
        quantize(gradient, residual, float("inf"), scales, values)
        found.append([scales.cpu(), residual.cpu()])
    for got, expected in zip(found[1], found[0], strict=True):
        assert_same_bits(got, expected)


@on_devices
def test_empty_blocks_are_left_alone(device: str) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels, triton_updates

    matrix = torch.ones(6, 5, device=device)
    everything = selection_of(6, 1.0, device)
    triton_kernels.merge_columns(matrix, 0, everything, matrix.new_empty(0, 5))
    nothing = matrix.new_empty(0, 5)
    triton_kernels.quantize_slices_(nothing, nothing, 1.0, matrix.new_empty(0), nothing.to(torch.int8))
    none = selection_of(6, 0.0, device)
    triton_updates.update_slices_(SliceState(matrix, 0, none, nothing, nothing, (nothing, nothing), 1), COEFFICIENTS)
    assert matrix.eq(1.0).all()


@on_devices
@dims
def test_results_are_reproducible(dim: int, device: str) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels, triton_updates

    size = 1500 if device == "cuda" else 70
    matrix = torch.randn(size, size, device=device).bfloat16()
    selection = selection_of(size, 0.2, device)

    def run() -> list[Tensor]:
        blocks = blocks_like(matrix, dim, selection)
        norms = triton_kernels.norms_and_split(matrix, dim, selection, *blocks)
        weights = torch.ones_like(matrix)
        state = [torch.ones(blocks[0].shape, device=device) for _ in range(3)]
        own = SliceState(weights, dim, selection, blocks[0], state[0], tuple(state[1:]), 1)
        triton_updates.update_slices_(own, COEFFICIENTS)
        return [norms, *blocks, weights, *state]

    first = run()
    for _ in range(1 if INTERPRETED else 5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@on_devices
def test_misfitting_state_is_refused(device: str) -> None:
    from zenflow_compile.runtime.device_updates import triton_updates

    matrix = torch.zeros(4, 6, device=device)
    good = torch.zeros(2, 4, device=device)
    selection = Selection.of(torch.arange(2), 6, torch.device(device))
    for bad in (good.bfloat16(), torch.zeros(3, 4, device=device), torch.zeros(4, 2, device=device).t()):
        state = SliceState(matrix, 1, selection, good, good, (bad, good), 1)
        with pytest.raises(ValueError, match="exp_avg"):
            triton_updates.update_slices_(state, COEFFICIENTS)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
@dims
def test_more_elements_than_int32_holds(dim: int) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels

    rows, columns = 65_537, 32_768  # 2**31 + 2**15 elements
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of free device memory")
    matrix = torch.ones(rows, columns, dtype=torch.bfloat16, device="cuda")
    matrix[-1, -1] = 3
    slices, length = matrix.shape[dim], matrix.shape[1 - dim]
    selection = Selection.of(torch.tensor([0, slices - 1]), slices, matrix.device)
    blocks = blocks_like(matrix, dim, selection)
    norms = triton_kernels.norms_and_split(matrix, dim, selection, *blocks)
    assert blocks[0][1, -1] == 3
    assert norms[-1].item() == length + 8
    assert norms[:-1].eq(length).all()
    matrix.zero_()
    triton_kernels.unsplit_columns(matrix, dim, selection, *blocks)
    assert matrix[-1, -1] == 3
    assert matrix.sum(dtype=torch.float64).item() == rows * columns + 2


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
@dims
def test_cuda_tensors_are_dispatched_to_triton(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels, triton_updates

    ran: list[str] = []
    for name in ("norms_and_split", "merge_columns", "quantize_slices_"):
        monkeypatch.setattr(triton_kernels, name, lambda *args, name=name, **keywords: ran.append(name))
    monkeypatch.setattr(triton_updates, "update_slices_", lambda *_: ran.append("update_slices_"))
    matrix = torch.randn(8, 8, device="cuda")
    selection = selection_of(8, 0.5, "cuda")
    blocks = blocks_like(matrix, dim, selection)
    column_ops.norms_and_split(matrix, dim, selection, *blocks)
    column_ops.merge_columns(matrix, dim, selection, blocks[1])
    column_ops.update_columns_(
        [SliceState(matrix, dim, selection, blocks[0], blocks[0], (blocks[0], blocks[0]), 1)], COEFFICIENTS
    )
    column_ops.quantize_slices_(blocks[1], blocks[1].float(), 1.0, blocks[1][:, 0], blocks[1].to(torch.int8))
    assert ran == ["norms_and_split", "merge_columns", "update_slices_", "quantize_slices_"]


@pytest.mark.tier2  # nothing else computes with the kernels without a GPU
@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreter")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("numpy", reason="Triton's interpreter computes with numpy")
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tiers", "all", "-p", "no:xdist", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stdout[-8000:]
    assert " passed" in finished.stdout
