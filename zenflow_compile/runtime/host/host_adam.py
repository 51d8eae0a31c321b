"""Rule P on the host, without the GIL.

Two kernels compute the same as :func:`zenflow_compile.runtime.adam_rule.rule_p_`:

* ``native``: one vectorized C++ loop (moments through every stored gradient, decay, update, cast), of
  ``zenflow_compile/native``. It needs a C++ compiler.
* ``aten``: PyTorch's fused AdamW over pieces that fit into the cache, for machines without one. It makes more passes
  through the cache, and takes the GIL a few times per piece.

Worker threads call them, several at the same time on disjoint ranges. Each call uses one thread.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from zenflow_compile.checks.printable import printable
from zenflow_compile.checks.user_frame import user_stacklevel
from zenflow_compile.native.build import BuildError
from zenflow_compile.native.library import DTYPES, LateScale, Step, UpdateWindow, library
from zenflow_compile.planning.plan import FP32_BYTES
from zenflow_compile.runtime.adam_rule import PaddedTail, StepCoefficients, rule_p_, window_coefficients
from zenflow_compile.runtime.device.late_number import LateNumber
from zenflow_compile.runtime.host.compressed_block import EXPANDED_ELEMENTS, expanded, scales_and_values
from zenflow_compile.runtime.state_forms import PLAIN, StateForm
from zenflow_compile.torch_internals import torch_private

Kernel = Literal["auto", "native", "aten"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class WindowUpdate:
    """The gradients of one update window, and the host state that they update.

    Attributes:
        state: master, exp_avg and exp_avg_sq on the CPU, contiguous: f32[n], or as ``form`` stores them.
        out: [n] in the weights' dtype; takes the new master, also when every gradient was missing.
        gradients: oldest first, [n] each, or compressed blocks of n elements.
        coefficients: one for each gradient.
        step: gradients in the moments after this window.
        eps: of Adam, outside the root.
        form: of the state.
        weights: [n], the weights that complete split masters. They may be ``out``.
    """

    state: Sequence[Tensor]
    out: Tensor
    gradients: Sequence[Tensor]
    coefficients: Sequence[StepCoefficients]
    step: int
    eps: float
    form: StateForm = PLAIN
    weights: Tensor | None = None
    _prepared: UpdateWindow | None = None  # by the first thread that runs a part of it


class HostAdam(Protocol):
    """Applies the gradients of update windows to host state."""

    @property
    def name(self) -> str:
        """``"native"`` or ``"aten"``."""
        ...

    def __call__(self, update: WindowUpdate, part: slice) -> None:
        """Apply rule P in place to the elements ``part``. Threads may do so at the same time on disjoint parts.

        The result for an element depends neither on its place nor on how ranges are cut: a run that loads a state
        stores its slices in another order than the run that saved it.

        Args:
            update: not changed after the first call with it.
            part: of compressed gradients, and of state that is not plain, it covers whole slices.

        Raises:
            ValueError, TypeError: a tensor has another shape, dtype or layout. Nothing has been written then.
        """
        ...


def make_host_adam(
    kernel: Kernel, *, gradient_dtype: torch.dtype, out_dtype: torch.dtype, max_gradients: int
) -> HostAdam:
    """Make the host's kernel. It may compile for seconds (cached on disk): call it before an update window is flushed.

    Args:
        kernel: ``"auto"`` takes ``"native"`` where a C++ compiler is found and works, else ``"aten"`` with one
            RuntimeWarning per process and reason.
        gradient_dtype: of the stored gradients: fp32, bf16 or fp16; int8 for compressed ones.
        out_dtype: of the model's weights: fp32, bf16 or fp16.
        max_gradients: the most gradients that one window can hold.

    Raises:
        ValueError: an argument outside of these.
        RuntimeError: ``kernel="native"`` was asked for and cannot be compiled; the message has the reason.
    """
    for option, dtype, dtypes in (
        ("gradient_dtype", gradient_dtype, (*_DTYPES, torch.int8)),
        ("out_dtype", out_dtype, _DTYPES),
    ):
        if dtype not in dtypes:
            raise ValueError(f"{option}={dtype} must be one of {', '.join(map(str, dtypes))}")
    if max_gradients < 1:
        raise ValueError(f"max_gradients={max_gradients} must be at least 1: the length of a window, update_interval")
    if kernel not in ("auto", "native", "aten"):
        raise ValueError(f"kernel={kernel!r} must be 'auto', 'native' or 'aten'")
    if kernel != "aten":
        reason = _refusal()
        if reason is None:
            return NativeHostAdam(gradient_dtype, out_dtype, max_gradients)
        if kernel == "native":
            raise RuntimeError(f"host_kernel='native' cannot be made: {reason}. host_kernel='aten' needs no compiler")
        _warn_once(reason)
    return AtenHostAdam(gradient_dtype, out_dtype, max_gradients)


@cache  # one time per process: a compiler that fails may take seconds
def _refusal() -> str | None:
    """Why the compiled kernel cannot be used; None if it can, and has right results for a few elements."""
    try:
        kernel = NativeHostAdam(torch.bfloat16, torch.bfloat16, 2)
    except BuildError as error:
        return str(error)
    # The host is named, and modes of the caller are left: the first optimizer may be made in any context.
    with torch_private.outside_of_transforms(), torch_private.one_intra_op_thread():
        start = torch.linspace(-1.0, 1.0, _TESTED_ELEMENTS, dtype=torch.float32, device="cpu")
        coefficients = [StepCoefficients(1e-2, 0.9, 0.99, 0.1, scale) for scale in (0.5, 2.0)]
        made, expected = ([start.clone(), start * 0.1, start.square()] for _ in range(2))
        out, gradients = start.bfloat16(), [start.sin().bfloat16(), start.cos().bfloat16()]
        kernel(WindowUpdate(made, out, gradients, coefficients, 2, 1e-8), slice(0, _TESTED_ELEMENTS))
        rule_p_(expected[0], expected[1], expected[2], gradients, coefficients, step=2, eps=1e-8)
        right = all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(made, expected, strict=True))
        right = right and torch.equal(out, made[0].bfloat16())
    return None if right else "the compiled kernel computes wrong numbers; set CXX to another compiler"


_TESTED_ELEMENTS = 203  # whole vectors, and a partial one


@cache  # warn once per process and reason: kernels are made per engine and dtype
def _warn_once(reason: str) -> None:
    reason = "\n".join(map(printable, reason.splitlines()))  # it quotes a compiler and names of files
    text = f"host updates run on the slower 'aten' kernel: {reason}"
    warnings.warn(text, RuntimeWarning, stacklevel=user_stacklevel())


class NativeHostAdam:
    """Rule P as one loop in C++: every state is read and written once, whatever the number of gradients."""

    name = "native"

    def __init__(self, gradient_dtype: torch.dtype, out_dtype: torch.dtype, max_gradients: int) -> None:
        self.gradient_dtype = gradient_dtype
        self.out_dtype = out_dtype
        self.max_gradients = max_gradients
        self._run = library().zenflow_update

    def __call__(self, update: WindowUpdate, part: slice) -> None:
        if (window := update._prepared) is None:
            window = update._prepared = self._prepare(update)  # several threads may do this: they store the same
        if update.coefficients:
            self._run(window, part.start, part.stop)
        else:
            _cast_masters(update, part)

    def _prepare(self, update: WindowUpdate) -> UpdateWindow:
        window = self.window(update)
        steps, _ = put_numbers(window, update.coefficients, step=update.step, eps=update.eps)
        for step, own in zip(steps, update.coefficients, strict=True):
            step.grad_scale = float(own.grad_scale)
        return window

    def window(self, update: WindowUpdate) -> UpdateWindow:
        """The addresses of ``update``; it keeps none of its tensors alive. ``put_numbers`` adds the rest.

        Raises: see :meth:`HostAdam.__call__`.
        """
        _check(update, self)
        count = len(update.gradients)
        window = UpdateWindow(
            state=update.form.describe(update.state, update.weights),
            out=update.out.data_ptr(),
            count=count,
            gradient_dtype=DTYPES[self.gradient_dtype],
            out_dtype=DTYPES[self.out_dtype],
        )
        if count:
            if self.gradient_dtype == torch.int8:
                window.slices, window.state.length = scales_and_values(update.gradients[0])[1].shape
            window.gradients = (ctypes.c_void_p * count)(*(gradient.data_ptr() for gradient in update.gradients))
        return window


def put_numbers(
    window: UpdateWindow, coefficients: Sequence[StepCoefficients], *, step: int, eps: float
) -> tuple[ctypes.Array[Step], list[LateScale]]:
    """Put all numbers but late ones into ``window``.

    Returns:
        The step of each gradient, and the scales that are still to be written there.
    """
    late: list[LateScale] = []
    # Each number is computed in double precision, and rounded to fp32 where it is stored.
    steps = (Step * len(coefficients))()
    for number, (own, to) in enumerate(zip(coefficients, steps, strict=True)):
        to.beta1, to.beta1_rest, to.beta2, to.beta2_rest = own.beta1, 1.0 - own.beta1, own.beta2, 1.0 - own.beta2
        if isinstance(scale := own.grad_scale, LateNumber):
            cells = (ctypes.c_void_p * len(scale.cells))(*(cell.data_ptr() for cell in scale.cells))
            late.append(LateScale(cells, len(cells), number, scale.factor))
        else:
            to.grad_scale = scale
    window.steps, window.eps, window.random = steps, eps, step
    if coefficients:
        whole = window_coefficients(coefficients, step)
        window.decay, window.step_size = whole.decay, whole.step_size
        window.bias_correction2_sqrt = whole.bias_correction2_sqrt
    return steps, late


class AtenHostAdam:
    """Rule P by ``torch._fused_adamw_``: one step per gradient, with a rate of zero for all but the last.

    A fused step with a rate of zero moves only the moments. The last one has the update window's summed rate, and the
    weight decay that makes its ``1 - lr * weight_decay`` the window's product.
    """

    name = "aten"

    # Elements per piece. State, scratch and output should stay in a core's share of the cache (7 MB with four bf16
    # gradients). But every piece takes the GIL about five times, and may wait for a busy Python thread each time
    # (sys.getswitchinterval, 5 ms). From 2^16 to 2^20 one core of a Xeon (2 MiB L2) was equally fast.
    PIECE = 1 << 18

    def __init__(self, gradient_dtype: torch.dtype, out_dtype: torch.dtype, max_gradients: int) -> None:
        self.gradient_dtype = gradient_dtype
        self.out_dtype = out_dtype
        self.max_gradients = max_gradients
        # Scratch memory of each thread: several workers call one kernel at the same time.
        self._local = threading.local()

    def __call__(self, update: WindowUpdate, part: slice) -> None:
        _check(update, self)
        with torch.no_grad(), torch_private.one_intra_op_thread():
            if not update.coefficients:
                _cast_masters(update, part)
                return
            compressed = self.gradient_dtype == torch.int8
            if update.form.plain and not compressed:
                state = [each[part] for each in update.state]
                self._apply(update, state, update.out[part], [gradient[part] for gradient in update.gradients])
                return
            # A converted piece should stay in the cache until it has been read, and must begin with a slice.
            length = scales_and_values(update.gradients[0])[1].shape[1] if compressed else update.form.length
            piece = max(1, EXPANDED_ELEMENTS // length) * length
            for first in range(part.start, part.stop, piece):
                elements = slice(first, min(first + piece, part.stop))
                gradients = [expanded(each, elements) if compressed else each[elements] for each in update.gradients]
                self._apply_piece(update, elements, gradients)

    def _apply_piece(self, update: WindowUpdate, part: slice, gradients: list[Tensor]) -> None:
        """Apply ``gradients``, which are those of the elements ``part``, to state of any form."""
        form, out = update.form, update.out[part]
        if form.plain:
            self._apply(update, [each[part] for each in update.state], out, gradients)
            return
        slices = slice(part.start // form.length, part.stop // form.length)
        state = [each.reshape(-1).clone() for each in form.rows(update.state, update.weights).read(slices)]
        self._apply(update, state, out, gradients)
        changed = [each.view(-1, form.length) for each in state]
        form.rows(update.state, update.out if form.split else None).write(changed, slices, step=update.step)

    def _apply(self, update: WindowUpdate, state: list[Tensor], out: Tensor, gradients: list[Tensor]) -> None:
        """Apply ``gradients`` to fp32 state of the same elements, and write its masters to ``out``."""
        coefficients, eps = update.coefficients, update.eps
        window, last = window_coefficients(coefficients, update.step), coefficients[-1]
        weight_decay = (1.0 - window.decay) / window.rate if window.rate else 0.0
        step_tensor = torch.tensor(float(update.step), dtype=torch.float32, device="cpu")

        def apply(parts: Sequence[Tensor]) -> None:
            weights, mean, square, new_weights, *raw = parts
            grads = self._scaled(raw, coefficients)
            taken = 0
            for (beta1, beta2), group in itertools.groupby(coefficients[:-1], key=lambda s: (s.beta1, s.beta2)):
                count = len(list(group))
                # eps = 1 keeps the quotient finite where v is still zero: rate 0 times it is then 0.
                torch_private.fused_adamw_(
                    weights, mean, square, grads[taken : taken + count], step_tensor,
                    lr=0.0, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=1.0,
                )  # fmt: skip
                taken += count
            torch_private.fused_adamw_(
                weights, mean, square, grads[-1:], step_tensor,
                lr=window.rate, beta1=last.beta1, beta2=last.beta2, weight_decay=weight_decay, eps=eps,
            )  # fmt: skip
            new_weights.copy_(weights)

        cut = PaddedTail.of((*state, out, *gradients))
        for start in range(0, cut.vectors[0].numel(), self.PIECE):
            apply([each[start : start + self.PIECE] for each in cut.vectors])
        if cut.tail:
            apply(cut.padded)
            cut.put_back(4)

    def _scaled(self, gradients: list[Tensor], coefficients: Sequence[StepCoefficients]) -> list[Tensor]:
        """The piece's gradients in fp32 and scaled, in this thread's scratch memory unless they are so already."""
        scales = [float(each.grad_scale) for each in coefficients]
        unscaled = all(scale == 1.0 for scale in scales)
        if unscaled and gradients[0].dtype == torch.float32:
            return gradients
        scratch: Tensor | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = torch.empty(self.max_gradients, self.PIECE, dtype=torch.float32, device="cpu")
            self._local.scratch = scratch
        scaled = [scratch[i, : gradient.numel()] for i, gradient in enumerate(gradients)]
        torch_private.copy_and_scale_(scaled, gradients, None if unscaled else scales)
        return scaled


def _cast_masters(update: WindowUpdate, part: slice) -> None:
    """Write the weights of masters that no gradient has changed."""
    masters = update.state[0] if update.weights is None else update.weights
    with torch.no_grad(), torch_private.one_intra_op_thread():
        update.out[part].copy_(masters[part])


def _check(update: WindowUpdate, kernel: NativeHostAdam | AtenHostAdam) -> None:
    """Kernels take raw pointers: a tensor of another layout would be read and written out of bounds."""
    most, numel = kernel.max_gradients, update.out.numel()
    gradients, coefficients = update.gradients, update.coefficients
    if len(gradients) != len(coefficients) or len(coefficients) > most:
        raise ValueError(
            f"{len(gradients)} gradients for {len(coefficients)} coefficients: there must be one each, and at most "
            f"max_gradients={most}"
        )
    form = update.form
    if (update.weights is None) == form.split:
        raise ValueError(f"split masters need weights, and other masters take none; this state is {form}")
    names = ("master", "exp_avg", "exp_avg_sq")
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
