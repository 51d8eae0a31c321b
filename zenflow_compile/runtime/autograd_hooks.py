"""What autograd calls: a hook on each parameter, and a callback at the end of each backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zenflow_compile.runtime.gradients.offloaded_gradient import OffloadedGradient
from zenflow_compile.torch_internals import torch_private


class Accepts(Protocol):
    """The owner of parameters."""

    def accept_grad(self, p: int) -> None: ...


class HasBackwards(Protocol):
    """The stage of an engine that takes gradients."""

    def end_backward(self, *, nested: bool) -> None: ...


def listen_to_grad(param: Parameter, p: int, owner: weakref.ref[Accepts]) -> RemovableHandle:
    """Call ``accept_grad(p)`` whenever a gradient has reached ``param.grad`` that no engine has put there.

    Parameters live longer than their owners, so the hook refers to the owner weakly.
    """

    @torch_private.skipped_by_dynamo
    def accumulated(param: Tensor) -> None:
        # Hazard: a variable for the gradient would be a reference that the engine takes for one of the user's.
        if type(param.grad) is OffloadedGradient:
            return  # ``offload_gradients`` or ``accumulate_grad`` has taken it
        if param.grad is not None and (me := owner()) is not None:
            me.accept_grad(p)

    handle: RemovableHandle = param.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
    return handle


def end_callback(intake: weakref.ref[HasBackwards]) -> Callable[[], None]:
    """Make the callback that autograd calls when the backward in which it was queued is over, unless that raises."""

    @torch_private.skipped_by_dynamo
    def ended() -> None:
        if (me := intake()) is not None:
            me.end_backward(nested=torch_private.inside_backward_node())

    return ended
