"""What an engine does together with other ranks, for an engine that is alone: it asks and waits for no other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device_updates.streamed_updates import StreamedParam
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.ranks.rank_group import Call, RankGroup

Gather: TypeAlias = Callable[[Callable[[OffloadedParam], None]], None]
"""Brings what a step has changed to all ranks; its argument applies the due updates of a parameter."""


class OneRank:
    """The only rank.

    Attributes:
        group: the ranks that make the same calls; None if there is one.
        rank: of this process in it.
        divides: updates are divided among the ranks, so that each needs what the others have updated.
    """

    group: RankGroup | None = None
    rank = 0
    divides = False

    @property
    def failed(self) -> bool:
        """Whether a rank has failed, so that no call that all ranks make would return."""
        return False

    def announcing(self) -> AbstractContextManager[None]:
        """Tell the other ranks of an error inside of the block: they would wait for this one."""
        return nullcontext()

    def end(self) -> None:
        """Wait for what all ranks still do. May be repeated."""

    def close(self) -> None:
        """Give the group back."""

    # A backward.

    def contribute(self, offloaded: OffloadedParam, grad: Tensor, *, send: bool) -> None:
        """Take a gradient of this rank; ``send``: none of an earlier backward of the step is missing."""
        offloaded.gradient.receive(offloaded.gradient.matrix_of(grad), split_now=send)

    def note_on_device(self, p: int) -> None:
        """Note that the parameter ``p``, which the device updates, has a gradient in ``.grad``."""

    def refuse_gradient_of_user(self, name: str) -> None:
        """Raise RuntimeError where ranks cannot average a gradient that other code keeps in ``.grad``."""

    def refuse_nested_backward(self) -> None:
        """Raise RuntimeError where gradients are sent until the whole backward is over."""

    def drop_gradients(self) -> None:
        """Forget gradients that no step will use."""

    # A step.

    def step(self, number: int, undeclared: int) -> AbstractContextManager[int | None]:
        """Run an optimizer step inside of the block; ``undeclared``: backwards beyond gradient_accumulation_steps.

        Yields the shortest update window of rank 0, if it is told.
        """
        del number, undeclared
        return nullcontext()

    def shortest_window(self, measured: int | None) -> int | None:
        """The shortest update window after this rank has ``measured`` one; None until all ranks agree."""
        return measured

    def sum_norms(self, params: Sequence[OffloadedParam]) -> None:
        """Add up squared norms of slices that several ranks have parts of."""

    def norm_of(self, norms: Sequence[Tensor], params: Sequence[Parameter], device: torch.device) -> Tensor:
        """The L2 norm f32[] of the gradients of ``params`` with these norms."""
        del params
        return total_norm(norms, device)

    def gather_streamed(self, updated: Iterable[StreamedParam]) -> None:
        """Bring streamed parameters, whose updates ranks have divided, up to date on all of them."""

    def gather_of(self, now: int, offloaded: Iterable[OffloadedParam]) -> Gather | None:
        """How the weights that step ``now`` updates come to all ranks; None if they are here."""
        del now, offloaded
        return None

    # Calls of users.

    def ending(self, call: Call, number: int) -> AbstractContextManager[Collection[int]]:
        """Apply all update windows inside of the block, in ``flush`` or ``close``, as all ranks do.

        Yields the parameters whose weights were written on any other rank.
        """
        del call, number
        return nullcontext(())

    def begin_save(self) -> None:
        """Raise RankError if not all ranks are about to gather their state."""

    def agree_on_load(self, refusal: str) -> None:
        """Tell the other ranks why this one cannot load its state, or that it can, with an empty text."""

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory."""

    def forget(self) -> None:
        """Forget what was sent: a state is about to be loaded."""


def total_norm(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The L2 norm f32[] of values with the L2 norms ``norms``."""
    return torch.linalg.vector_norm(torch.stack(list(norms))) if norms else torch.zeros((), device=device)
