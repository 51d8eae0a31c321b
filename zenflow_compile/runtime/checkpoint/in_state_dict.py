"""What ``optimizer.state`` has in the place of tensors that ``state_dict()`` makes."""

from __future__ import annotations

from typing import Any, NoReturn

TO_CHANGE_STATE = (
    "to read or change it, as a reset of the moments does: state = optimizer.state_dict(), change the tensors in "
    "state['state'], optimizer.load_state_dict(state)"
)


class InStateDict:
    """Stands for a tensor that is divided between device, host memory and files. Its use raises, and says what to do.

    ``optimizer.state`` needs something under each name: tools for distributed checkpoints read the names there.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "<in state_dict()>"

    def __getattr__(self, name: str) -> NoReturn:
        # Python and tools ask any object for special names, to find out what it is.
        raise AttributeError(
            name if name.startswith("__") else f".{name} of a state that lives elsewhere; {TO_CHANGE_STATE}"
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TypeError(f"{function.__name__} of an optimizer state that lives elsewhere; {TO_CHANGE_STATE}")

    def _refuse(self, *operands: Any) -> NoReturn:
        raise TypeError(f"an operation on an optimizer state that lives elsewhere; {TO_CHANGE_STATE}")

    __getitem__ = __setitem__ = _refuse
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = _refuse
    __mul__ = __rmul__ = __imul__ = __truediv__ = __rtruediv__ = __itruediv__ = _refuse
