"""How an engine is called without a graph: hooks on ``.grad``, the callback at the end of a backward.

Parameters live longer than engines, so nothing here keeps an engine alive through its parameters.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zenflow_compile.runtime import errors
from zenflow_compile.torch_internals import torch_private


class TakesGradients(Protocol):
    """What is told of gradients that have reached ``.grad``."""

    def accept_grad(self, p: int) -> None: ...


class EndsBackward(Protocol):
    """What is told of the end of a backward."""

    def end_backward(self, *, nested: bool) -> None: ...


def listen_to_grad(param: Parameter, p: int, listener: weakref.ref[TakesGradients]) -> RemovableHandle:
    """Call ``accept_grad(p)`` whenever a gradient has reached ``param.grad``."""

    @torch_private.skipped_by_dynamo
    def accumulated(param: Tensor) -> None:
        if (me := listener()) is not None and param.grad is not None:
            me.accept_grad(p)

    handle: RemovableHandle = param.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
    return handle


def listen_to_end(listener: weakref.ref[EndsBackward]) -> None:
    """Call ``end_backward`` once, when the backward that runs now is over; not if it raises."""

    @torch_private.skipped_by_dynamo
    def ended() -> None:
        if (me := listener()) is not None:
            me.end_backward(nested=torch_private.inside_backward_node())

    torch_private.queue_backward_callback(ended)


def take_grad(param: Parameter, name: str) -> Tensor | None:
    """Take the gradient out of ``param.grad``.

    Raises:
        TypeError: it is sparse.
    """
    errors.refuse_sparse_grad(param, name)
    grad, param.grad = param.grad, None
    return grad
