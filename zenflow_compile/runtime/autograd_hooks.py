"""Hooks through which autograd calls an engine: on ``.grad``, and at the end of a backward.

Parameters live longer than engines, so hooks refer to engines weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zenflow_compile.runtime import errors
from zenflow_compile.torch_internals import torch_private


class TakesGradients(Protocol):
    """Is called when a gradient has reached ``.grad``."""

    def accept_grad(self, p: int) -> None: ...


class EndsBackward(Protocol):
    """Is called when a backward is over."""

    def end_backward(self, *, nested: bool) -> None: ...


def listen_to_grad(param: Parameter, p: int, listener: weakref.ref[TakesGradients]) -> RemovableHandle:
    """Call ``accept_grad(p)`` whenever a gradient has reached ``param.grad``."""

    @torch_private.skipped_by_dynamo
    def accumulated(param: Tensor) -> None:
        if (me := listener()) is not None and param.grad is not None:
            me.accept_grad(p)

    handle: RemovableHandle = param.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
    return handle


def end_callback(listener: weakref.ref[EndsBackward]) -> Callable[[], None]:
    """A callback that calls ``end_backward``, for ``torch_private.queue_backward_callback``.

    Autograd calls it when the backward in which it was queued is over; not if that backward raises.
    """

    @torch_private.skipped_by_dynamo
    def ended() -> None:
        if (me := listener()) is not None:
            me.end_backward(nested=torch_private.inside_backward_node())

    return ended


def take_grad(param: Parameter, name: str) -> Tensor | None:
    """Take the gradient out of ``param.grad``.

    Raises:
        TypeError: it is sparse.
    """
    errors.refuse_sparse_grad(param, name)
    grad, param.grad = param.grad, None
    return grad
