"""The compiled update rule has the bits of the formula in PyTorch's operators, for every dtype, length and CPU."""

from __future__ import annotations

import ctypes
import itertools
import math
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.expanded import expanded
from zenflow_compile.native import build
from zenflow_compile.native.library import library
from zenflow_compile.rules.adamw import ADAMW
from zenflow_compile.rules.cpp import printed
from zenflow_compile.runtime.host import host_kernel
from zenflow_compile.runtime.host.host_kernel import HostKernel, WindowUpdate, scales_and_values
from zenflow_compile.runtime.update_rule import StepCoefficients, window_numbers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, -1e-42, 3e38, -3e38, 65504.0, 1e-7, 1e5)


def coefficients(count: int) -> list[StepCoefficients]:
    return [
        StepCoefficients.known(1e-2 / (1 + i), 0.9 - 0.05 * i, 0.99, 0.1, grad_scale=(1.0, 0.3, -2.0)[i % 3])
        for i in range(count)
    ]


def formula(update: WindowUpdate) -> list[Tensor]:
    """Master, moments and out after the update, by operators that round one time each."""
    (master, m, v), given = update.state, update.coefficients
    for gradient, own in zip(update.gradients, given, strict=True):
        whole = expanded(gradient, slice(0, m.numel())) if gradient.dtype == torch.int8 else gradient.float()
        g, of_step = whole * own.grad_scale.value, own.options
        m = of_step.beta1 * m + (1.0 - of_step.beta1) * g
        v = of_step.beta2 * v + (1.0 - of_step.beta2) * g * g
    decay, step_size, bias_correction2_sqrt, eps = window_numbers(given, update.step).of_window
    # PyTorch's root of fp32 may be off by one unit. It divides by a number by its reciprocal, which rounds two times.
    root, correction = v.double().sqrt().float(), torch.full_like(v, bias_correction2_sqrt)
    new = decay * master - step_size * m / (root / correction + eps)
    return [new, m, v, new.to(update.out.dtype)]


def with_special(values: Tensor) -> Tensor:
    """Put numbers that overflow, underflow or are none among them."""
    places = torch.arange(len(SPECIAL)) * 7
    places = places[places < values.numel()]
    return values.index_copy(0, places, torch.tensor(SPECIAL[: len(places)]))


def update_of(numel: int, count: int, dtype: torch.dtype, out_dtype: torch.dtype, length: int = 0) -> WindowUpdate:
    """Args: length: of a slice of compressed gradients; 0: they are not."""
    generator = torch.Generator().manual_seed(numel + count)
    state = [torch.randn(numel, generator=generator) for _ in range(3)]
    state = [with_special(state[0]), with_special(state[1].roll(3)), with_special(state[2].abs())]
    if length:
        gradients = [torch.zeros(numel // length, length + 4, dtype=torch.int8) for _ in range(count)]
        for block in gradients:
            scales, values = scales_and_values(block)
            scales.copy_(torch.rand(scales.shape, generator=generator))
            values.copy_(torch.randint(-128, 128, values.shape, generator=generator))
    else:
        gradients = [with_special(torch.randn(numel, generator=generator)).to(dtype) for _ in range(count)]
    return WindowUpdate(state, torch.zeros(numel, dtype=out_dtype), gradients, coefficients(count), count + 2)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Equal bits, whatever the bits of NaN."""
    nan = expected.isnan()
    integers = {2: torch.int16, 4: torch.int32}[actual.dtype.itemsize]
    bits = [each.masked_fill(nan, 0.0).view(integers) for each in (actual, expected)]
    return torch.equal(actual.isnan(), nan) and torch.equal(*bits)


def check(update: WindowUpdate, gradient_dtype: torch.dtype, cuts: tuple[int, ...] = ()) -> None:
    kernel = HostKernel(gradient_dtype, update.out.dtype, len(update.gradients))
    expected = formula(update)
    ends = (0, *cuts, update.out.numel())
    for begin, end in itertools.pairwise(ends):
        kernel(update, slice(begin, end))
    for actual, wanted in zip((*update.state, update.out), expected, strict=True):
        assert same(actual, wanted)


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_the_formula(dtype: torch.dtype, out_dtype: torch.dtype, count: int) -> None:
    for numel in (1, 7, 63, 64, 65, 511, 4101):
        check(update_of(numel, count, dtype, out_dtype), dtype)


@pytest.mark.parametrize("length", [1, 5, 16, 64, 100, 1000])
@pytest.mark.parametrize("count", [1, 3])
def test_compressed_gradients_equal_expanded_ones(count: int, length: int) -> None:
    for out_dtype in DTYPES:
        check(update_of(37 * length, count, torch.int8, out_dtype, length), torch.int8, cuts=(5 * length, 6 * length))


def test_cuts_change_no_bits() -> None:
    for cuts in ((1,), (63, 64, 130), (3, 150, 151, 2000)):
        check(update_of(4101, 3, torch.bfloat16, torch.bfloat16), torch.bfloat16, cuts)


def test_chained_windows_have_the_bits_of_the_formula() -> None:
    first = update_of(1000, 2, torch.float16, torch.float16)
    check(first, torch.float16)
    gradients = [torch.randn(1000).half() for _ in range(2)]
    check(WindowUpdate(first.state, first.out, gradients, coefficients(2), 6), torch.float16)


def test_neighbors_are_left_alone() -> None:
    update = update_of(300, 2, torch.float32, torch.bfloat16)
    before = [each.clone() for each in (*update.state, update.out)]
    HostKernel(torch.float32, torch.bfloat16, 2)(update, slice(33, 200))
    for old, new in zip(before, (*update.state, update.out), strict=True):
        assert same(new[:33], old[:33])
        assert same(new[200:], old[200:])


@contextmanager
def compiled_for(flags: tuple[str, ...], folder: Path) -> Iterator[None]:
    """Let kernels call the update that is compiled for another CPU than this one."""
    command = ["g++", *(flag for flag in build.FLAGS if flag != "-march=native"), *flags]
    path = folder / "other.so"
    (folder / "printed_rule.h").write_text(printed(ADAMW))
    subprocess.run([*command, f"-I{folder}", str(build.SOURCES / "host_rule.cpp"), "-o", str(path)], check=True)
    other = ctypes.cast(ctypes.CDLL(str(path)).zenflow_update, ctypes.c_void_p).value
    with mock.patch.object(host_kernel, "rule_address", return_value=other):
        yield


@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_other_cpus_have_the_same_bits(cpu: str, tmp_path: Path) -> None:
    needed = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512bw"}[cpu]
    if needed not in build.processor():
        pytest.skip(f"this CPU cannot run code for {cpu}")
    with compiled_for((f"-march={cpu}",), tmp_path):
        for dtype in (*DTYPES, torch.int8):
            out_dtype, length = (torch.bfloat16, 100) if dtype == torch.int8 else (dtype, 0)
            update = update_of(4100, 3, dtype, out_dtype, length)
            kernel = HostKernel(dtype, out_dtype, 3)
            expected = formula(update)
            kernel(update, slice(0, 4100))
            assert all(same(*pair) for pair in zip((*update.state, update.out), expected, strict=True))


def test_contraction_would_change_bits(tmp_path: Path) -> None:
    """Proves that the tests above see it."""
    if "fma" not in build.processor():
        pytest.skip("this CPU has no fused multiply and add")
    with compiled_for(("-march=native", "-ffp-contract=fast"), tmp_path):
        update = update_of(4101, 3, torch.float32, torch.float32)
        kernel = HostKernel(torch.float32, torch.float32, 3)
        expected = formula(update)
        kernel(update, slice(0, 4101))
        assert not same(update.state[1], expected[1])


def test_library_needs_neither_openmp_nor_pytorch() -> None:
    needed = subprocess.run(["ldd", library()._name], capture_output=True, text=True, check=True).stdout
    assert not any(name in needed for name in ("gomp", "omp.", "torch", "python"))
