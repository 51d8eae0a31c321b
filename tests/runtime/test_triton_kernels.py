"""The Triton kernels equal their references.

On a GPU they are compared as they run there. Without one they run in Triton's interpreter, which has to be chosen
before Triton is first imported: ``test_kernels_in_the_interpreter`` runs this file once more in a process of its own.
Compiling needs no GPU either: ``test_kernels_compile_for_cuda`` does that as far as machine code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zenflow_compile.runtime.adam_rule import StepCoefficients, rule_p_
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.device_updates.column_ops import SliceState
from zenflow_compile.runtime.device_updates.selection import Selection

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
# Less than a tile, not a multiple of one, several tiles either way, more than one strip of partial sums.
shapes = pytest.mark.parametrize("shape", [(1, 1), (70, 130), (5, 600), (600, 3)])
fractions = pytest.mark.parametrize("fraction", [0.0, 0.1, 1.0])
COEFFICIENTS = StepCoefficients(lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1, grad_scale=0.5)


def selection_of(slices: int, fraction: float, device: str) -> Selection:
    """Selected slices in no particular order."""
    return Selection.of(torch.randperm(slices)[: round(fraction * slices)], slices, torch.device(device))


def blocks_like(matrix: Tensor, dim: int, selection: Selection) -> tuple[Tensor, Tensor]:
    length = matrix.shape[1 - dim]
    return matrix.new_full((len(selection.selected), length), 9), matrix.new_full((len(selection.deferred), length), 9)


@on_devices
@fractions
@dims
@shapes
@dtypes
def test_norms_and_split(dtype: torch.dtype, shape: tuple[int, int], dim: int, fraction: float, device: str) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels

    matrix = torch.randn(shape, device=device).to(dtype)
    selection = selection_of(shape[dim], fraction, device)
    expected = blocks_like(matrix, dim, selection)
    column_ops.reference_split_columns(matrix, dim, selection, *expected)

    got = blocks_like(matrix, dim, selection)
    norms = triton_kernels.norms_and_split(matrix, dim, selection, *got)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(norms, column_ops.reference_column_norms(matrix, dim))

    got = blocks_like(matrix, dim, selection)
    assert torch.equal(norms, triton_kernels.norms_and_split(matrix, dim, selection, *got))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])

    rebuilt = torch.full_like(matrix, 9)
    triton_kernels.unsplit_columns(rebuilt, dim, selection, *got)
    assert torch.equal(rebuilt, matrix)


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
    slices = selection_of(surrounding.shape[2 * dim], fraction, device).selected
    values = torch.randn(len(slices), surrounding.shape[2 - 2 * dim], device=device).to(dtype)
    column_ops.reference_merge_columns(expected[:, 1], dim, slices, values)
    triton_kernels.merge_columns(surrounding[:, 1], dim, slices, values)
    assert torch.equal(surrounding, expected)


@on_devices
@fractions
@dims
@dtypes
@pytest.mark.parametrize("shape", [(7, 130), (70, 35)])
def test_adam_columns(dtype: torch.dtype, shape: tuple[int, int], dim: int, fraction: float, device: str) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels

    matrix = torch.randn(shape, device=device).to(dtype)
    before = matrix.clone()
    selection = selection_of(shape[dim], fraction, device)
    master = (matrix if dim == 0 else matrix.t())[selection.selected.long()].float().contiguous()
    state = [master, torch.zeros_like(master), torch.zeros_like(master)]
    expected = [tensor.clone() for tensor in state]
    for step in (1, 2):
        gradient, _ = blocks_like(matrix, dim, selection)
        gradient.normal_()
        rule_p_(*expected, [gradient], [COEFFICIENTS], step=step, eps=1e-8)
        triton_kernels.adam_columns_(
            matrix, dim, selection.selected, gradient, *state, COEFFICIENTS, step=step, eps=1e-8
        )
    for mine, theirs in zip(state, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)
    slices, old = (matrix, before) if dim == 0 else (matrix.t(), before.t())
    weights = state[0].to(dtype)
    if INTERPRETED and dtype == torch.bfloat16:
        # The interpreter keeps bf16 as bits and casts to it by cutting bits off; hardware rounds to nearest.
        weights = (state[0].view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(slices[selection.selected.long()], weights)
    assert torch.equal(slices[selection.deferred.long()], old[selection.deferred.long()])


@on_devices
@dims
def test_results_are_reproducible(dim: int, device: str) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels

    size = 1500 if device == "cuda" else 200
    matrix = torch.randn(size, size, device=device).bfloat16()
    selection = selection_of(size, 0.2, device)

    def run() -> list[Tensor]:
        blocks = blocks_like(matrix, dim, selection)
        norms = triton_kernels.norms_and_split(matrix, dim, selection, *blocks)
        weights = torch.ones_like(matrix)
        state = [torch.ones(blocks[0].shape, device=device) for _ in range(3)]
        triton_kernels.adam_columns_(
            weights, dim, selection.selected, blocks[0], *state, COEFFICIENTS, step=1, eps=1e-8
        )
        return [norms, *blocks, weights, *state]

    first = run()
    for _ in range(1 if INTERPRETED else 5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@on_devices
def test_misfitting_state_is_refused(device: str) -> None:
    from zenflow_compile.runtime.device_updates import triton_kernels

    matrix = torch.zeros(4, 6, device=device)
    good = torch.zeros(2, 4, device=device)
    selected = torch.arange(2, dtype=torch.int32, device=device)
    for bad in (good.bfloat16(), torch.zeros(3, 4, device=device), torch.zeros(4, 2, device=device).t()):
        with pytest.raises(ValueError, match="exp_avg"):
            triton_kernels.adam_columns_(matrix, 1, selected, good, good, bad, good, COEFFICIENTS, step=1, eps=1e-8)


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
    from zenflow_compile.runtime.device_updates import triton_kernels

    ran: list[str] = []
    for name in ("norms_and_split", "merge_columns", "adam_columns_"):
        monkeypatch.setattr(triton_kernels, name, lambda *args, name=name, **keywords: ran.append(name))
    matrix = torch.randn(8, 8, device="cuda")
    selection = selection_of(8, 0.5, "cuda")
    blocks = blocks_like(matrix, dim, selection)
    column_ops.norms_and_split(matrix, dim, selection, *blocks)
    column_ops.merge_columns(matrix, dim, selection.deferred, blocks[1])
    column_ops.adam_columns_(
        [SliceState(matrix, dim, selection, blocks[0], *blocks[:1] * 3, 1)], COEFFICIENTS, eps=1e-8
    )
    assert ran == ["norms_and_split", "merge_columns", "adam_columns_"]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreter")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("numpy", reason="Triton's interpreter computes with numpy")
    finished = run_here(
        {"TRITON_INTERPRET": "1"}, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__
    )
    assert finished.returncode == 0, finished.stdout[-8000:]
    assert " passed" in finished.stdout


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
def test_kernels_compile_for_cuda(tmp_path: Path) -> None:
    finished = run_here({"TRITON_CACHE_DIR": str(tmp_path)}, "-c", COMPILE)
    assert finished.returncode == 0, finished.stdout[-8000:]


def run_here(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )


# As launched for bf16 weights whose sizes are multiples of 16. Both sides of a tile must then go in 16-byte accesses.
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from zenflow_compile.runtime.device_updates import triton_kernels as kernels

def ptx(kernel, **arguments):
    constants = {name: value for name, value in arguments.items() if not isinstance(value, str)}
    position = {name: (kernel.arg_names.index(name),) for name in arguments}
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else value for name, value in arguments.items()},
        constexprs={position[name]: value for name, value in constants.items()},
        attrs={position[name]: [["tt.divisibility", 16]] for name, value in arguments.items()
               if name not in constants and value != "fp32" and name != "k"},
    )
    return compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False}).asm["ptx"]

tile = dict(BLOCK_SLICES=64, BLOCK_LENGTH=64)
for dim in (0, 1):
    matrix = dict(matrix="*bf16", stride_row="i32", stride_column=1)
    split = ptx(kernels._norms_and_split_kernel, **matrix, position="*i32", selected_out="*bf16", deferred_out="*bf16",
                partials="*fp32", slices="i32", length="i32", k="i32", DIM=dim, TILES=8, **tile)
    place = ptx(kernels._place_slices_kernel, **matrix, position="*i32", first_in="*bf16", second_in=None,
                slices="i32", length="i32", k="i32", DIM=dim, BOTH=False, **tile)
    for name, code in (("split", split), ("place", place)):
        assert "ld.global.v4" in code, (name, dim)
        assert "st.global.v4" in code, (name, dim)
        assert "st.global.b16" not in code, (name, dim)
    adam = ptx(kernels._adam_columns_kernel, **matrix, selected="*i32", gradient="*bf16", master="*fp32",
               exp_avg="*fp32", exp_avg_sq="*fp32", k="i32", length="i32", grad_scale="fp32", one_minus_beta1="fp32",
               beta2="fp32", one_minus_beta2="fp32", decay="fp32", step_size="fp32", bias_correction2_sqrt="fp32",
               eps="fp32", DIM=dim, BLOCK_SLICES=32, BLOCK_LENGTH=64)
    assert "fma.rn.f32" not in adam
ptx(kernels._sum_partials_kernel, partials="*fp32", out="*fp32", strips="i32", slices="i32", BLOCK=128)
"""
