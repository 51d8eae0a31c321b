"""The update rule as pure functions, which the host, the device and the tests' oracle share.

Rule P. An update window keeps the gradients of several steps. When it is flushed, the moments take every stored
gradient in order, exactly as AdamW would. The weights then take one step, with the rate summed over the window and the
latest moments::

    for each gradient i:  g = grad_i * grad_scale_i
                          m = beta1_i m + (1 - beta1_i) g
                          v = beta2_i v + (1 - beta2_i) g^2
    w = w * prod(1 - lr_i weight_decay_i) - sum(lr_i) * m_hat / (sqrt(v_hat) + eps)

With one gradient it *is* AdamW. Weights are not replayed step by step: that would move them by old momentum several
times before the new gradients count, which lowers the largest stable rate about as much as a delay.

Mean step. Where only the sum of a window's n gradients is known, each of them counts as their mean, by the same rule:
the moments decay by ``beta ** n`` and take ``(1 - beta ** n)`` of the mean and of its square, the rate is summed, the
decay multiplied, and the bias corrections count n gradients. ``update_window_`` does this if it is given the mean n
times. With n = 1 it is also AdamW; with more, ``v`` misses the variance of the gradients about their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from zenflow_compile.rules.adamw import ADAMW
from zenflow_compile.rules.eager import run_window
from zenflow_compile.rules.rule import Rule
from zenflow_compile.runtime.device.number import Number

VECTOR_ELEMENTS = 16
"""fp32 elements of the widest CPU vector. PyTorch's fused AdamW updates the elements after the last whole vector of a
tensor by scalar code, which rounds differently."""


class PaddedTail(NamedTuple):
    """Flat tensors of one size, cut so that vectorized code updates every element, whatever its place.

    ``vectors`` are views of all whole vectors, ``tail`` of the elements after them, if there are any, and ``padded``
    copies of these, each filled up to one vector.
    """

    vectors: list[Tensor]
    tail: list[Tensor]
    padded: list[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> PaddedTail:
        """Cut 1-D tensors; call ``put_back`` after the update of ``padded``."""
        left = tensors[0].numel() % VECTOR_ELEMENTS
        if not left:
            return cls(list(tensors), [], [])
        tail = [tensor[-left:] for tensor in tensors]
        padded = [torch.nn.functional.pad(each, (0, VECTOR_ELEMENTS - left)) for each in tail]
        return cls([tensor[:-left] for tensor in tensors], tail, padded)

    def put_back(self, count: int) -> None:
        """Copy the first ``count`` of ``padded`` into ``tail``."""
        for each, padded in zip(self.tail[:count], self.padded, strict=False):
            each.copy_(padded[: each.numel()])


class StepCoefficients(NamedTuple):
    """What the optimizer step that used a gradient had for it. A missing gradient has none."""

    options: Any
    """Of the param group: a tuple of floats, as the rule has them."""
    grad_scale: Number
    """Factor on the stored gradient: clip factor divided by the loss scale, negative under ``maximize``."""
    rule: Rule = ADAMW

    def scaled(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """The stored gradient as the rule sees it, in ``dtype``."""
        return gradient.to(dtype) * self.grad_scale.for_fp32()

    @classmethod
    def known(
        cls,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        grad_scale: float = 1.0,
        *,
        eps: float = 1e-8,
    ) -> Self:
        """Of AdamW, with a ``grad_scale`` that the host knows."""
        return cls(ADAMW.options(lr, beta1, beta2, weight_decay, eps), Number.known(grad_scale))


class WindowNumbers(NamedTuple):
    """The numbers that an update window is computed with."""

    of_gradient: tuple[tuple[float, ...], ...]
    of_window: tuple[float, ...]


def window_numbers(coefficients: Sequence[StepCoefficients], step: int) -> WindowNumbers:
    """Compute the numbers of an update window.

    Args:
        coefficients: one for each gradient of the update window, oldest first; at least one.
        step: gradients in the state after this window, its own included.

    Raises:
        ValueError: no coefficients, or ``step`` smaller than their number.
    """
    if not coefficients:
        raise ValueError("a window of missing gradients has no coefficients, and is not flushed")
    if step < len(coefficients):
        raise ValueError(
            f"step={step} must be at least {len(coefficients)}, the number of gradients: it counts the gradients in "
            f"the moments after the window; add those of the window to the count before the flush"
        )
    return _numbers(coefficients[0].rule, tuple(map(_options, coefficients)), step)


_options = attrgetter("options")


@lru_cache(maxsize=256)  # the parameters of a group have the same numbers in a step
def _numbers(rule: Rule, options: tuple[Any, ...], step: int) -> WindowNumbers:
    first = step - len(options) + 1
    # Floats: Triton compiles a kernel again for integers, and has no quotients of them.
    of_gradient = [tuple(map(float, rule.gradient_numbers(own, count))) for count, own in enumerate(options, first)]
    return WindowNumbers(tuple(of_gradient), tuple(map(float, rule.window_numbers(options, step))))


@torch.no_grad()
def update_window_(
    state: Sequence[Tensor],
    gradients: Sequence[Tensor],
    coefficients: Sequence[StepCoefficients],
    *,
    step: int,
    out: Tensor | None = None,
) -> None:
    """Apply the gradients of one update window, in place, eagerly, on any device, by the definition of the rule.

    Args:
        state: master and arrays, of one shape and dtype (fp32 in training), in which it computes; updated in place.
        gradients: oldest first, of that shape and any floating dtype; not written.
        coefficients: one for each of them. Missing gradients are absent from both. With none at all the state stays.
        step: gradients in the state after this window.
        out: takes the new master, cast to its own dtype; also when every gradient was missing.

    Raises:
        ValueError: numbers of gradients and coefficients differ; or see :func:`window_numbers`.
    """
    if len(gradients) != len(coefficients):
        raise ValueError(f"{len(gradients)} gradients for {len(coefficients)} coefficients: there must be one each")
    if coefficients:
        scaled = [own.scaled(gradient, state[0].dtype) for gradient, own in zip(gradients, coefficients, strict=True)]
        moved, arrays = run_window(
            coefficients[0].rule,
            state[0],
            state[1:],
            scaled,
            *window_numbers(coefficients, step),
            coefficients[-1].options,
        )
        for each, new in zip(state, (moved, *arrays), strict=True):
            each.copy_(new)
    if out is not None:
        out.copy_(state[0])
