"""What an update rule is: pure functions of elements, and the numbers that they share.

A rule is written once. Its functions run as they are on tensors, which is what tests compare with, and are printed as
the code that updates state: see ``tracing`` and ``cpp``.

[Note: windows] An update window has the gradients of one or several steps. ``accumulate`` takes each of them, oldest
first; ``apply`` then moves the weight, once. Between them the values of ``window`` live, which begin at zero and are
not stored. A rule whose ``accumulate`` reads the weight sees the one that the window began with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

MOST_ARRAYS = 4
"""Arrays of a rule's state, and values of its windows together; ``kMostValues`` in native/state_forms.h."""
MOST_ROUNDED = 2
"""Arrays that may be stored in fewer bytes; ``kMostRounded`` there."""
MOST_NUMBERS = 8
"""Numbers of ``accumulate``, and of ``apply``; ``kMostNumbers`` in native/windows.h."""


class Array(NamedTuple):
    """An array of a rule's state, with a number per element.

    Attributes:
        nonnegative: no element is below zero, and one above zero must not become zero when it is stored in 8 bits.
        rounded: it may be stored in fewer bytes than fp32.
    """

    name: str
    nonnegative: bool = False
    rounded: bool = True


class Rule(ABC):
    """An update rule. All methods are pure.

    Attributes:
        arrays: of the state, at most ``MOST_ARRAYS``; those that may be rounded first.
        window: names of the values that live until ``apply``.
        of_gradient, of_window: names of the numbers that ``accumulate`` and ``apply`` take.
    """

    arrays: ClassVar[tuple[Array, ...]]
    window: ClassVar[tuple[str, ...]] = ()
    of_gradient: ClassVar[tuple[str, ...]]
    of_window: ClassVar[tuple[str, ...]]

    @abstractmethod
    def accumulate(self, weight: Tensor, state: Any, gradient: Tensor, c: Any) -> tuple[Tensor, ...]:
        """Return the new values of ``arrays`` and ``window``, in this order, of their old ones and a gradient.

        Args:
            weight: fp32.
            state: has the old values by name.
            gradient: fp32, scaled.
            c: has the numbers ``of_gradient`` by name.
        """

    @abstractmethod
    def apply(self, weight: Tensor, state: Any, c: Any) -> Tensor:
        """Return the new weight; ``c`` has the numbers ``of_window``."""

    @property
    def values(self) -> tuple[str, ...]:
        """Names of what ``state`` has."""
        return (*(array.name for array in self.arrays), *self.window)


def named(names: Sequence[str], values: Sequence[Any]) -> Any:
    """An object with ``values`` by name."""
    return type("Named", (), dict(zip(names, values, strict=True)))()
