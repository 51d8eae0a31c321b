"""The moments of a training step: which parts of an engine take part in each, and in which order.

A part that an engine does not have takes part in nothing, and costs nothing: a moment is one tuple of calls, which is
made again when a part comes or goes (a profiler, parameters, weights in host memory, memory that is given back).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

Calls: TypeAlias = tuple[Callable[[], object], ...]


@dataclass(frozen=True, slots=True)
class Moments:
    """What runs at each moment, in order.

    Attributes:
        allocated: further parameters are served.
        enter: code is about to queue work on the engine's memory.
        enter_ahead: so is FSDP2, in a stream that runs ahead of the training's.
        use_memory: the engine's memory of the device must be there.
        enter_step: ``step()`` is called; an error leaves the step to be called again.
        discard: gradients are cleared.
        enter_backward: a gradient shows that another backward runs; an error leaves that backward unknown.
        begin_backward: the engine has begun it.
        gradients: gradients have arrived.
        end_backward: a backward is over.
        contributed: a backward that brought gradients is over.
        forward: weights are about to be read by a forward.
        begin_updates: parameters are about to be updated, in a step or in a backward.
        begin_step: the optimizer step begins.
        final: all gradients of the step are final, and none has been used.
        settle: rows that change sides must have arrived.
        end_step: all work of the step is queued.
        abandon: a state is about to be loaded.
        close: the engine ends; its memory is there.
    """

    allocated: Calls
    enter: Calls
    enter_ahead: Calls
    use_memory: Calls
    enter_step: Calls
    discard: Calls
    enter_backward: Calls
    begin_backward: Calls
    gradients: Calls
    end_backward: Calls
    contributed: Calls
    forward: Calls
    begin_updates: Calls
    begin_step: Calls
    final: Calls
    settle: Calls
    end_step: Calls
    abandon: Calls
    close: Calls


def present(*calls: object) -> Calls:
    """Keep the calls of parts that are there: the others are None, False or empty."""
    return tuple(cast("Callable[[], object]", call) for call in calls if call)


def weakly(method: Callable[[], object]) -> Callable[[], None]:
    """Call ``method`` of an object that the call does not keep alive: an engine ends when the last user drops it."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call
