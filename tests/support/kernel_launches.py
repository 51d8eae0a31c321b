"""Launches of the Triton kernels without a GPU: recorded as they are made, and compiled to machine code."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zenflow_compile.rules.rule import Rule
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.device_updates import triton_kernels, triton_updates
from zenflow_compile.runtime.device_updates.selection import Selection, SliceState
from zenflow_compile.runtime.device_updates.triton_updates import kernel_of
from zenflow_compile.runtime.host.host_kernel import scales_and_values
from zenflow_compile.runtime.state_forms import StateForm
from zenflow_compile.runtime.update_rule import StepCoefficients

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int8: "*i8",
}


@dataclass
class Launch:
    """A recorded launch.

    Attributes:
        programs: of its grid.
        arguments: by parameter name.
        options: of the compiler.
    """

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass
class Compiled:
    """Machine code of a launch.

    Attributes:
        accesses: number of accesses to global memory by instruction, such as "ld.global.v4.b32".
        registers: of each thread.
        stack_bytes: of each thread. It is where spilled registers go.
    """

    ptx: str
    accesses: Counter[str]
    registers: int
    stack_bytes: int


def record(shape: tuple[int, int], dtype: torch.dtype, *, scale_on_device: bool) -> dict[str, Launch]:
    """Record what one step of a matrix with a tenth of its slices selected launches; nothing is computed.

    Args:
        scale_on_device: the factor on gradients is a tensor.

    Returns:
        Launches by name: split, sums (if there are several strips), unsplit, merge, adam with fp32 moments, with bf16
        and 8-bit ones, quantize.
    """
    dim = 0 if shape[0] >= shape[1] else 1  # as planned: the longer side
    slices, length = shape[dim], shape[1 - dim]
    matrix = torch.empty(shape, dtype=dtype)
    selection = Selection.of(torch.arange(0, slices, 10), slices, matrix.device)
    k = len(selection.selected)
    selected, deferred = matrix.new_empty(k, length), matrix.new_empty(slices - k, length)
    scale = Number(torch.ones((), dtype=torch.float64)) if scale_on_device else Number.known(0.5)
    coefficients = StepCoefficients.known(1e-3, 0.9, 0.99, 0.1)._replace(grad_scale=scale)
    residual = deferred if dtype == torch.float32 else deferred.bfloat16()
    block = torch.empty(slices - k, length + 4, dtype=torch.int8)
    with recording() as recorders:
        found = {}
        triton_kernels.norms_and_split(matrix, dim, selection, selected, deferred)
        found["split"] = recorders["_norms_and_split_kernel"].only()
        if recorders["_sum_partials_kernel"].launches:
            found["sums"] = recorders["_sum_partials_kernel"].only()
        triton_kernels.unsplit_columns(matrix, dim, selection, selected, deferred)
        found["unsplit"] = recorders["_place_slices_kernel"].only()
        triton_kernels.merge_columns(matrix, dim, selection, deferred)
        found["merge"] = recorders["_place_slices_kernel"].only()
        for moments, name in {"fp32": "adam", "bf16": "adam bf16", "fp8": "adam fp8"}.items():
            form = StateForm(moments=moments, length=length)
            state = [torch.empty(shape, dtype=dtype) for shape, dtype in form.tensors(k)]
            of_slices = SliceState(matrix, dim, selection, selected, state[0], tuple(state[1:]), 2, form)
            triton_updates.update_slices_(of_slices, coefficients)
            found[name] = recorders["update_slices"].only()
        triton_kernels.quantize_slices_(deferred, residual, scale.for_kernels(), *scales_and_values(block))
        found["quantize"] = recorders["_quantize_slices_kernel"].only()
    assert not any(recorder.launches for recorder in recorders.values())
    return found


def update_of(rule: Rule, shape: tuple[int, int], dtype: torch.dtype, moments: str) -> Launch:
    """Record the update of a tenth of a matrix's slices by ``rule``."""
    dim = 0 if shape[0] >= shape[1] else 1
    slices, length = shape[dim], shape[1 - dim]
    matrix = torch.empty(shape, dtype=dtype)
    selection = Selection.of(torch.arange(0, slices, 10), slices, matrix.device)
    form = StateForm(moments=moments, length=length, arrays=rule.arrays)
    master, *arrays = (torch.empty(of, dtype=dtype) for of, dtype in form.tensors(len(selection.selected)))
    gradient = matrix.new_empty(master.shape)
    coefficients = StepCoefficients(rule.initial, Number.known(0.5), rule)
    with recording() as recorders:
        state = SliceState(matrix, dim, selection, gradient, master, tuple(arrays), 2, form)
        triton_updates.update_slices_(state, coefficients)
        return recorders["update_slices"].only()


class Recorder:
    """Stands in for a kernel, and notes what would be launched or compiled."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.launches: list[Launch] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        return partial(self.warmup, grid=grid)

    def warmup(self, *arguments: Any, grid: tuple[int], **keywords: Any) -> None:
        names = self._kernel.arg_names
        given = dict(zip(names, arguments, strict=False)) | keywords
        options = {name: given.pop(name) for name in keywords.keys() - set(names)}
        self.launches.append(Launch(self._kernel, grid[0], given, options))

    def of(self, rule: Rule) -> Recorder:
        """In the place of ``kernel_of``."""
        self._kernel = kernel_of(rule)
        return self

    def only(self) -> Launch:
        (launch,) = self.launches
        self.launches.clear()
        return launch


@contextmanager
def recording() -> Iterator[dict[str, Recorder]]:
    """Record launches inside of the block, by kernel."""
    names = [name for name in vars(triton_kernels) if name.endswith("_kernel")]
    recorders = {name: Recorder(getattr(triton_kernels, name)) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        for name, recorder in recorders.items():
            patch.setattr(triton_kernels, name, recorder)
        recorders["update_slices"] = Recorder(None)
        patch.setattr(triton_updates, "kernel_of", recorders["update_slices"].of)
        yield recorders


Specialized = tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]


def specialized(launch: Launch) -> Specialized:
    """Signature, constants and attributes of the code that Triton compiles for a launch."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for place, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        if value is None or name.isupper() or (type(value) is int and value == 1):
            signature[name], constants[place,] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name], number = _TYPES[value.dtype], value.data_ptr()
        else:
            signature[name], number = ("fp32", 1) if isinstance(value, float) else ("i32", value)
        if number % 16 == 0:
            attributes[place,] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_for(launch: Launch, capability: int, folder: Path) -> Compiled:
    """Compile a launch as Triton specializes it, for GPUs of a compute capability such as 90."""
    signature, constants, attributes = specialized(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    binary = folder / f"{launch.kernel.__name__}.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [_CUOBJDUMP, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    ptx = compiled.asm["ptx"]
    accesses = Counter(re.findall(r"\b(?:ld|st)\.global[.\w]*", ptx))
    return Compiled(ptx, accesses, _number("REG", usage), _number("STACK", usage) + _number("LOCAL", usage))


def _number(name: str, usage: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", usage)
    assert found, usage
    return int(found[1])
