"""The host's updates equal the eager rule, on the machine's own threads; their compiler, and where code is kept."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gil_gap import measure, spin_beside
from tests.support.calls import calls_of
from tests.support.coefficients import with_lr
from tests.support.native_code import NativeCode
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.native import build
from zenflow_compile.native.build import BuildError
from zenflow_compile.runtime.host.host_kernel import HostKernel, WindowUpdate, check_native_code
from zenflow_compile.runtime.update_rule import StepCoefficients, update_window_
from zenflow_compile.torch_internals import torch_private

MAX_GRADIENTS = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COEFFICIENTS = tuple(
    StepCoefficients.known(lr=1e-2 / (1 + i), beta1=0.9, beta2=0.99, weight_decay=0.1, grad_scale=scale)
    for i, scale in enumerate((1.0, 0.5, 1.0, 3.0))
)


class State(NamedTuple):
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    out: Tensor

    @classmethod
    def random(cls, numel: int, dtype: torch.dtype) -> State:
        generator = torch.Generator().manual_seed(numel)
        master, exp_avg = torch.randn(2, numel, generator=generator)
        return cls(master, exp_avg * 0.1, exp_avg.square() * 0.05, torch.full((numel,), torch.nan, dtype=dtype))

    def copy(self) -> State:
        return State(*(tensor.clone() for tensor in self))

    def part(self, where: slice) -> State:
        return State(*(tensor[where] for tensor in self))


def random_gradients(numel: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(count)]


def update(
    adam: HostKernel, state: State, gradients: list[Tensor], coefficients: tuple[StepCoefficients, ...], step: int
) -> None:
    whole = WindowUpdate(state[:3], state.out, gradients, coefficients, step=step)
    adam(whole, slice(0, state.master.numel()))


def expect(
    state: State, before: State, gradients: list[Tensor], coefficients: tuple[StepCoefficients, ...], step: int
) -> None:
    """``state`` is what the eager rule makes of ``before``, and its out is exactly the cast of its master."""
    oracle = before.copy()
    update_window_(oracle[:3], gradients, coefficients, step=step, out=oracle.out)
    for name, actual, expected in zip(State._fields[:3], state[:3], oracle[:3], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert torch.equal(state.out, state.master.to(state.out.dtype))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_eager_rule(dtype: torch.dtype, count: int) -> None:
    adam = HostKernel(dtype, dtype, MAX_GRADIENTS)
    for numel in (0, 1, 7, 100_003):
        state = State.random(numel, dtype)
        before = state.copy()
        gradients = random_gradients(numel, count, dtype)
        untouched = [gradient.clone() for gradient in gradients]
        update(adam, state, gradients, COEFFICIENTS[:count], step=count + 6)
        expect(state, before, gradients, COEFFICIENTS[:count], step=count + 6)
        assert all(torch.equal(a, b) for a, b in zip(gradients, untouched, strict=True))


def test_long_odd_length_equals_the_rule() -> None:
    adam = HostKernel(torch.bfloat16, torch.bfloat16, MAX_GRADIENTS)
    state = State.random(1_000_003, torch.bfloat16)
    before = state.copy()
    gradients = random_gradients(1_000_003, 3, torch.bfloat16)
    update(adam, state, gradients, COEFFICIENTS[:3], step=3)
    expect(state, before, gradients, COEFFICIENTS[:3], step=3)


def test_betas_may_change_within_a_window() -> None:
    adam = HostKernel(torch.float32, torch.float32, MAX_GRADIENTS)
    coefficients = tuple(
        StepCoefficients.known(each.options.lr, beta1, each.options.beta2, each.options.weight_decay)
        for each, beta1 in zip(COEFFICIENTS, (0.9, 0.9, 0.5, 0.0), strict=True)
    )
    state = State.random(1000, torch.float32)
    before = state.copy()
    gradients = random_gradients(1000, 4, torch.float32)
    update(adam, state, gradients, coefficients, step=9)
    expect(state, before, gradients, coefficients, step=9)


def test_rate_of_zero_moves_moments_only() -> None:
    adam = HostKernel(torch.float32, torch.float32, MAX_GRADIENTS)
    state = State.random(1000, torch.float32)
    before = state.copy()
    gradients = random_gradients(1000, 2, torch.float32)
    coefficients = tuple(with_lr(each, 0.0) for each in COEFFICIENTS[:2])
    update(adam, state, gradients, coefficients, step=2)
    expect(state, before, gradients, coefficients, step=2)
    assert torch.equal(state.master, before.master)


def test_zero_gradients_at_the_start_stay_finite() -> None:
    adam = HostKernel(torch.float32, torch.float32, MAX_GRADIENTS)
    zero = torch.zeros(64)
    state = State(torch.ones(64), zero.clone(), zero.clone(), torch.empty(64))
    update(adam, state, [zero, torch.ones(64)], COEFFICIENTS[:2], step=2)
    expect(state, State(torch.ones(64), zero, zero, torch.empty(64)), [zero, torch.ones(64)], COEFFICIENTS[:2], step=2)


def test_rows_without_a_gradient_change_nothing() -> None:
    """After a full window of garbage in other tensors, shorter windows see only their own gradients."""
    adam = HostKernel(torch.float32, torch.float32, MAX_GRADIENTS)
    garbage = State.random(1000, torch.float32)
    nan = torch.full((1000,), torch.nan)
    update(adam, garbage, [nan] * 4, COEFFICIENTS, step=4)
    assert garbage.master.isnan().all()
    for count in (1, 2, 3):
        state = State.random(1000, torch.float32)
        before = state.copy()
        gradients = random_gradients(1000, count, torch.float32)
        update(adam, state, gradients, COEFFICIENTS[:count], step=count)
        expect(state, before, gradients, COEFFICIENTS[:count], step=count)


def test_infinite_gradients_stay_in_their_elements() -> None:
    """Rows without a gradient read the last gradient again; if it is infinite, zero times it would be NaN."""
    adam = HostKernel(torch.float32, torch.float32, MAX_GRADIENTS)
    gradient = torch.ones(64)
    gradient[5] = torch.inf
    state = State.random(64, torch.float32)
    update(adam, state, [gradient], COEFFICIENTS[:1], step=1)
    assert state.exp_avg[5] == torch.inf
    deferred = torch.arange(64) != 5
    assert all(tensor[deferred].isfinite().all() for tensor in state)


def test_threads_on_disjoint_ranges_equal_one_call() -> None:
    """Ranges at odd offsets, one thread each, equal one call over the whole and leave their neighbors alone."""
    adam = HostKernel(torch.bfloat16, torch.bfloat16, MAX_GRADIENTS)
    numel, first, middle, last = 400_009, 3, 3 + 150_016, 400_002
    gradients = random_gradients(numel, 3, torch.bfloat16)
    start = State.random(numel, torch.bfloat16)
    whole, split = start.copy(), start.copy()
    update(adam, whole, gradients, COEFFICIENTS[:3], step=3)
    failures: list[BaseException] = []

    def work(where: slice) -> None:
        try:
            update(adam, split.part(where), [g[where] for g in gradients], COEFFICIENTS[:3], step=3)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(slice(*ends),)) for ends in ((first, middle), (middle, last))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for part, one, original in zip(split, whole, start, strict=True):
        assert torch.equal(part[first:last], one[first:last])
        assert torch.equal(part[:first].nan_to_num(), original[:first].nan_to_num())
        assert torch.equal(part[last:].nan_to_num(), original[last:].nan_to_num())


def test_one_thread_per_call_keeps_the_callers_setting() -> None:
    adam = HostKernel(torch.bfloat16, torch.bfloat16, MAX_GRADIENTS)
    state = State.random(4_000_000, torch.bfloat16)
    gradients = random_gradients(4_000_000, 4, torch.bfloat16)
    update(adam, state, gradients, COEFFICIENTS, step=4)
    threads = torch.get_num_threads()

    def cores() -> float:
        wall, used = time.perf_counter(), time.process_time()
        for _ in range(3):
            update(adam, state, gradients, COEFFICIENTS, step=8)
        return (time.process_time() - used) / (time.perf_counter() - wall)

    assert any(cores() < 1.3 for _ in range(5))  # a thread of an earlier test may run meanwhile
    assert torch.get_num_threads() == threads


def test_gil_is_released_during_an_update() -> None:
    """The longest stop of a concurrent Python thread is far shorter than the update.

    The best of a few tries, since on busy cores the worker may lose its own just while it holds the GIL. A
    kernel that kept the GIL would stop the thread for its whole duration in every try.
    """
    adam = HostKernel(torch.bfloat16, torch.bfloat16, MAX_GRADIENTS)
    gaps = (measure(adam, 32_000_000, MAX_GRADIENTS) for _ in range(5))
    assert any(gap.gap < 0.25 * gap.update for gap in gaps)


def test_gil_measurement_detects_a_held_gil() -> None:
    libc = ctypes.PyDLL(None)  # PyDLL calls keep the GIL
    # The best of a few tries: waits of this thread for a core are subtracted, and may fall into the gap.
    assert any(spin_beside(lambda: libc.usleep(50_000)).gap > 40 for _ in range(5))


def test_kernel_ignores_the_users_torch_settings() -> None:
    torch.set_default_dtype(torch.float64)
    check_native_code.cache_clear()
    try:
        with torch.device("meta"), FakeTensorMode(), torch.inference_mode():
            check_native_code()
            adam = HostKernel(torch.bfloat16, torch.bfloat16, MAX_GRADIENTS)
    finally:
        torch.set_default_dtype(torch.float32)
    for numel in (1, 2, 3, 1000, 70_001):
        gradients = random_gradients(numel, 2, torch.bfloat16)
        state = State.random(numel, torch.bfloat16)
        before = state.copy()

        def work(state: State = state, gradients: list[Tensor] = gradients) -> None:
            with torch.device("meta"), torch.inference_mode():
                update(adam, state, gradients, COEFFICIENTS[:2], step=5)

        run_in_thread(work)
        update_window_(before[:3], gradients, COEFFICIENTS[:2], step=5, out=before.out)
        torch.testing.assert_close(state.master, before.master, rtol=1e-6, atol=1e-6)


def run_in_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_no_compiler_is_an_error_before_any_change(native_code: NativeCode) -> None:
    model = nn.Linear(32, 32)
    data = model.weight.data_ptr()
    (compiler,) = torch_private.cpp_compiler() or ()
    native_code.compile_with("no-such-compiler", by_user=False)
    with pytest.raises(
        BuildError, match=r"no C\+\+ compiler was found.* package g\+\+ \(apt-get install g\+\+.*set CXX"
    ):
        ZenFlowAdamW(model.named_parameters())
    assert model.weight.data_ptr() == data
    native_code.compile_with(compiler, by_user=False)
    ZenFlowAdamW(model.named_parameters()).close()


@pytest.mark.parametrize("arguments", ["-O1", "'-O1' -g"])
def test_compiler_with_arguments_is_split(native_code: NativeCode, arguments: str) -> None:
    """As in ``CXX="g++ -O1"`` and ``CXX="ccache g++"``, which make and shells split."""
    (compiler,) = torch_private.cpp_compiler() or ()
    native_code.compile_with(f"{compiler} {arguments}")
    assert torch_private.cpp_compiler() == (compiler, *arguments.replace("'", "").split())
    check_native_code()
    assert build.library_key((compiler, "-O1")) != build.library_key((compiler, "-O2"))


def test_compiler_that_is_missing_is_named(native_code: NativeCode) -> None:
    for given in ("no-such-compiler -O1", "clang '"):
        native_code.compile_with(given)
        with pytest.raises(RuntimeError, match=rf"no C\+\+ compiler was found \(CXX is {given}\): .*package g\+\+"):
            check_native_code()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo no space left >&2; exit 1", "ended with 1:.*no space left"),
        ("kill -9 $$", "ended with -9"),
        ("exit 0", "ended with 0"),  # and made nothing
        ('while [ "$1" != -o ]; do shift; done; echo text > "$2"', "does not load"),
    ],
    ids=["fails", "is killed", "makes nothing", "makes no library"],
)
def test_broken_compiler_is_an_error(native_code: NativeCode, tmp_path: Path, script: str, reason: str) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o700)
    native_code.compile_with(str(compiler))
    with pytest.raises(BuildError, match=f"(?s){reason}"):
        check_native_code()
    assert not list(native_code.folder.glob("*.so")) or script.startswith("while")


def test_wrong_code_is_found(native_code: NativeCode, tmp_path: Path) -> None:
    for path in build.SOURCES.glob("*.[ch]*"):
        (tmp_path / path.name).write_text(path.read_text().replace("* step.grad_scale", ""))
    native_code.compile_from(tmp_path)
    with pytest.raises(RuntimeError, match="compute wrong numbers; set CXX"):
        check_native_code()


def test_library_is_compiled_one_time(native_code: NativeCode) -> None:
    check_native_code()
    paths = list(native_code.folder.iterdir())
    assert sorted(path.name.rpartition("-")[0] for path in paths) == ["host_jobs", "host_rule"]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o700}
    native_code.forget()
    with calls_of(subprocess.run) as ran:
        check_native_code()
    commands = [call.arguments["popenargs"][0] for call in ran]
    assert commands
    assert all(command[-1] == "--version" for command in commands)


@pytest.mark.parametrize("damage", ["truncated", "written by all", "a link", "in a folder written by all"])
def test_library_that_is_not_ours_is_compiled_anew(native_code: NativeCode, damage: str, tmp_path: Path) -> None:
    native_code.compile_from(tmp_path)
    folder = native_code.folder
    (tmp_path / "small.cpp").write_text('extern "C" int answer() { return 42; }')
    compiler = torch_private.cpp_compiler() or ()
    path = folder / f"small-{build.library_key(compiler, build.FLAGS)}.so"
    folder.mkdir(mode=0o700)
    build._compile(compiler, build.FLAGS, "small.cpp", path)  # not loaded: this process would keep it by its name
    good = path.read_bytes()
    path.unlink()
    if damage == "a link":
        (folder / "other").write_bytes(good)
        path.symlink_to(folder / "other")
    else:
        path.write_bytes(good[:100] if damage == "truncated" else good)
        path.chmod(0o777 if damage == "written by all" else 0o700)
    in_folder = damage == "in a folder written by all"
    if in_folder:
        folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="another user owns it") if in_folder else nullcontext():
        name, handle = build._load("small.cpp", build.FLAGS)
    assert ctypes.CDLL(name, handle=handle).answer() == 42
    assert (name != str(path)) == in_folder
    assert path.stat().st_size == len(good)
    assert stat.S_ISREG(path.lstat().st_mode)
    assert path.stat().st_mode & 0o777 == 0o700


def test_cache_that_cannot_be_written_warns_once(native_code: NativeCode) -> None:
    native_code.folder.write_text("a file in place of the folder")
    with pytest.warns(
        RuntimeWarning, match="every process compiles them again, which takes seconds; set XDG_CACHE_HOME"
    ):
        check_native_code()


@pytest.mark.parametrize("damage", ["written by all", "written by the group", "of another user", "a link"])
def test_folder_that_is_not_ours_is_not_used(native_code: NativeCode, damage: str) -> None:
    """Another user could put a library there in place of ours."""
    folder = native_code.folder
    if damage == "a link":
        folder = folder.with_name("elsewhere")
        native_code.folder.symlink_to(folder)
    folder.mkdir(mode=0o700)
    if damage.startswith("written"):
        folder.chmod(0o777 if damage.endswith("all") else 0o770)
    user = os.getuid() + (damage == "of another user")
    with (
        mock.patch.object(os, "getuid", return_value=user),
        pytest.warns(RuntimeWarning, match=r"another user owns it or can write it, or it is a link\): every process"),
    ):
        check_native_code()
    assert not list(folder.iterdir())


def test_no_folder_that_can_be_written_is_an_error(native_code: NativeCode) -> None:
    native_code.folder.write_text("a file in place of the folder")
    with (
        mock.patch.object(tempfile, "tempdir", str(native_code.folder)),
        pytest.warns(RuntimeWarning, match="every process compiles them again"),
        pytest.raises(RuntimeError, match=r"no folder for compiled code can be written: .*; set TMPDIR"),
    ):
        check_native_code()


def test_key_depends_on_the_cpu_and_the_source(native_code: NativeCode, tmp_path: Path) -> None:
    compiler = torch_private.cpp_compiler()
    assert compiler is not None
    here = build.library_key(compiler)
    with mock.patch.object(build, "processor", return_value="flags: sse2"):
        assert build.library_key(compiler) != here
    native_code.compile_from(tmp_path)
    assert build.library_key(compiler) != here


def test_bad_arguments_raise_and_write_nothing() -> None:
    with pytest.raises(ValueError, match=r"gradient_dtype=torch\.float64 must be one of torch\.float32"):
        HostKernel(torch.float64, torch.float32, 1)
    with pytest.raises(ValueError, match="max_gradients=0 must be at least 1"):
        HostKernel(torch.float32, torch.float32, 0)
    adam = HostKernel(torch.float32, torch.float32, 1)
    state = State.random(8, torch.float32)
    before = state.copy()
    good = random_gradients(8, 1, torch.float32)
    for count in (0, 2):
        with pytest.raises(ValueError, match=f"{count} gradients for {count} coefficients"):
            update(adam, state, good * count, COEFFICIENTS[:count], step=2)
    with pytest.raises(TypeError, match=r"gradient is torch\.bfloat16 on cpu"):
        update(adam, state, [good[0].bfloat16()], COEFFICIENTS[:1], step=1)
    with pytest.raises(ValueError, match="contiguous"):
        update(adam, state, [torch.ones(16)[::2]], COEFFICIENTS[:1], step=1)
    with pytest.raises(ValueError, match="step=0 must be at least 1"):
        update(adam, state, good, COEFFICIENTS[:1], step=0)
    for tensor, original in zip(state, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), original.nan_to_num())
