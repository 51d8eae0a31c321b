"""Rule P on the host, without the GIL: a vectorized loop in C++, see ``zenflow_compile/native``.

Moments through every stored gradient, decay, update and cast are one pass: every state is read and written once,
whatever the number of gradients. It computes the same as :func:`zenflow_compile.runtime.update_rule.update_window_`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from zenflow_compile.native.build import BuildError
from zenflow_compile.native.library import DTYPES, LateScale, Step, UpdateWindow, library, rule_address
from zenflow_compile.native.storage_reads import storage_reads
from zenflow_compile.planning.plan import FP32_BYTES
from zenflow_compile.runtime.state_forms import PLAIN, StateForm
from zenflow_compile.runtime.update_rule import StepCoefficients, update_window_, window_numbers
from zenflow_compile.torch_internals import torch_private

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scales_and_values(block: Tensor) -> tuple[Tensor, Tensor]:
    """View a compressed gradient, int8[deferred, length + 4], as f32[deferred] scales and int8[deferred, length].

    The scales come first, so that one copy moves both.
    """
    deferred, length = block.shape[0], block.shape[1] - FP32_BYTES
    flat = block.view(-1)
    return flat[: FP32_BYTES * deferred].view(torch.float32), flat[FP32_BYTES * deferred :].view(deferred, length)


@dataclass(slots=True)
class WindowUpdate:
    """The gradients of one update window, and the host state that they update.

    Attributes:
        state: master and arrays on the CPU, contiguous: f32[n], or as ``form`` stores them.
        out: [n] in the weights' dtype; takes the new master.
        step: gradients in the moments after this window.
        form: of the state.
        weights: [n], the weights that complete split masters. They may be ``out``.
    """

    state: Sequence[Tensor]
    out: Tensor
    gradients: Sequence[Tensor]
    coefficients: Sequence[StepCoefficients]
    step: int
    form: StateForm = PLAIN
    weights: Tensor | None = None


@cache  # once per process: a compiler may take seconds
def check_native_code() -> None:
    """Compile the package's C++ at its first use, in about 5 s, and check results of a few elements.

    Raises:
        BuildError: there is no C++ compiler, or its code does not run here; the message has the reason and a remedy.
    """
    storage_reads()
    library()
    kernel = HostKernel(torch.bfloat16, torch.bfloat16, 2)
    # The host is named, and modes of the caller are left: the first optimizer may be made in any context.
    with torch_private.outside_of_transforms(), torch_private.one_intra_op_thread():
        start = torch.linspace(-1.0, 1.0, _TESTED_ELEMENTS, dtype=torch.float32, device="cpu")
        coefficients = [StepCoefficients.known(1e-2, 0.9, 0.99, 0.1, scale) for scale in (0.5, 2.0)]
        made, expected = ([start.clone(), start * 0.1, start.square()] for _ in range(2))
        out, gradients = start.bfloat16(), [start.sin().bfloat16(), start.cos().bfloat16()]
        kernel(WindowUpdate(made, out, gradients, coefficients, 2), slice(0, _TESTED_ELEMENTS))
        update_window_(expected, gradients, coefficients, step=2)
        right = all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(made, expected, strict=True))
        right = right and torch.equal(out, made[0].bfloat16())
    if not right:
        raise BuildError("the compiled host updates compute wrong numbers; set CXX to another compiler")


_TESTED_ELEMENTS = 203  # whole vectors, and a partial one


_UPDATE = ctypes.CFUNCTYPE(None, ctypes.POINTER(UpdateWindow), ctypes.c_int64, ctypes.c_int64)


class HostKernel:
    """Applies the gradients of update windows to host state.

    Args:
        gradient_dtype: of the stored gradients: fp32, bf16 or fp16; int8 for compressed ones.
        out_dtype: of the model's weights: fp32, bf16 or fp16.
        max_gradients: the most gradients that one window can hold.

    Raises:
        ValueError: an argument outside of these.
        BuildError: see :func:`check_native_code`.
    """

    def __init__(self, gradient_dtype: torch.dtype, out_dtype: torch.dtype, max_gradients: int) -> None:
        for option, dtype, dtypes in (
            ("gradient_dtype", gradient_dtype, (*_DTYPES, torch.int8)),
            ("out_dtype", out_dtype, _DTYPES),
        ):
            if dtype not in dtypes:
                raise ValueError(f"{option}={dtype} must be one of {', '.join(map(str, dtypes))}")
        if max_gradients < 1:
            raise ValueError(
                f"max_gradients={max_gradients} must be at least 1: the length of a window, update_interval"
            )
        self.gradient_dtype = gradient_dtype
        self.out_dtype = out_dtype
        self.max_gradients = max_gradients

    def __call__(self, update: WindowUpdate, part: slice) -> None:
        """Apply rule P in place to the elements ``part``. Threads may do so at the same time on disjoint parts.

        The result for an element depends neither on its place nor on how ranges are cut: a run that loads a state
        stores its slices in another order than the run that saved it.

        Args:
            part: of compressed gradients, and of state that is not plain, it covers whole slices.

        Raises: see ``window``.
        """
        window = self.window(update)
        steps, _ = put_numbers(window, update.coefficients, step=update.step)
        for step, own in zip(steps, update.coefficients, strict=True):
            step.grad_scale = float(own.grad_scale)
        _UPDATE(window.update)(window, part.start, part.stop)

    def window(self, update: WindowUpdate) -> UpdateWindow:
        """The addresses of ``update``; it keeps none of its tensors alive. ``put_numbers`` adds the rest.

        Raises:
            ValueError, TypeError: a tensor has another shape, dtype or layout. Nothing has been written then.
        """
        _check(update, self)
        count = len(update.gradients)
        window = UpdateWindow(
            state=update.form.describe(update.state, update.weights),
            out=update.out.data_ptr(),
            update=rule_address(update.coefficients[0].rule),
            count=count,
            gradient_dtype=DTYPES[self.gradient_dtype],
            out_dtype=DTYPES[self.out_dtype],
            gradients=(ctypes.c_void_p * count)(*(gradient.data_ptr() for gradient in update.gradients)),
        )
        if self.gradient_dtype == torch.int8:
            window.slices, window.state.length = scales_and_values(update.gradients[0])[1].shape
        return window


def put_numbers(
    window: UpdateWindow, coefficients: Sequence[StepCoefficients], *, step: int
) -> tuple[ctypes.Array[Step], list[LateScale]]:
    """Put all numbers but late ones into ``window``. Returns the steps, and the scales that are to be written there."""
    late: list[LateScale] = []
    # Each number is computed in double precision, and rounded to fp32 where it is stored.
    steps, numbers = (Step * len(coefficients))(), window_numbers(coefficients, step)
    for number, (own, to) in enumerate(zip(coefficients, steps, strict=True)):
        to.numbers = type(to.numbers)(*numbers.of_gradient[number])
        scale = own.grad_scale
        to.grad_scale = scale.value
        if scale.cells:
            cells = (ctypes.c_void_p * len(scale.cells))(*(cell.data_ptr() for cell in scale.cells))
            late.append(LateScale(cells, len(cells), number, scale.factor))
    window.steps, window.random = steps, step
    window.numbers = type(window.numbers)(*numbers.of_window)
    return steps, late


def _check(update: WindowUpdate, kernel: HostKernel) -> None:
    """Kernels take raw pointers: a tensor of another layout would be read and written out of bounds."""
    most, numel = kernel.max_gradients, update.out.numel()
    gradients, coefficients = update.gradients, update.coefficients
    if len(gradients) != len(coefficients) or not 1 <= len(coefficients) <= most:
        raise ValueError(
            f"{len(gradients)} gradients for {len(coefficients)} coefficients: there must be one each, at least one, "
            f"and at most max_gradients={most}"
        )
    form, rule = update.form, coefficients[0].rule
    if form.arrays != rule.arrays or any(own.rule is not rule for own in coefficients):
        raise ValueError(
            f"a window of {type(rule).__name__} has state of {', '.join(array.name for array in form.arrays)}, or "
            "gradients of another rule; all of them must be of one rule"
        )
    if (update.weights is None) == form.split:
        raise ValueError(f"split masters need weights, and other masters take none; this state is {form}")
    names = ("master", *(array.name for array in form.arrays))
    of_state = zip(names, update.state, form.dtypes, form.row_elements, strict=True)
    flat = [(name, tensor, dtype, numel // form.length * elements) for name, tensor, dtype, elements in of_state]
    flat.append(("out", update.out, kernel.out_dtype, numel))
    if update.weights is not None:
        flat.append(("weights", update.weights, torch.bfloat16, numel))
    flat += [("gradient", gradient, kernel.gradient_dtype, numel) for gradient in gradients]
    for name, tensor, dtype, elements in flat:
        if tensor.dtype != dtype or not tensor.is_cpu:
            raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}; this kernel takes {dtype} on the CPU")
        if name == "gradient" and dtype == torch.int8:
            right = tensor.dim() == 2 and tensor.shape[1] > FP32_BYTES
            right = right and (tensor.shape[1] - FP32_BYTES) * tensor.shape[0] == numel
            expected = f"contiguous [deferred, length + {FP32_BYTES}] with deferred * length = {numel}"
        else:
            right, expected = tensor.dim() == 1 and tensor.numel() == elements, f"contiguous [{elements}]"
        if not right or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; this kernel takes {expected}"
            )
