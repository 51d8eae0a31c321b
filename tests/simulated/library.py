"""The C functions of the simulated device, typed."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from tests.simulated.build import build

_STATUS = {
    "configure": (
        c_uint64,
        c_uint64,
        c_int,
        c_double,
        c_double,
        POINTER(c_int64),
        POINTER(c_double),
        c_uint64,
        c_int,
        c_int,
        c_int,
        c_uint64,
    ),
    "set_late": (c_int64, c_double),
    "synchronize_stream": (c_int64,),
    "synchronize_device": (),
    "run_others": (),
    "run_last": (POINTER(c_int),),
    "query_stream": (c_int64, POINTER(c_int)),
    "record_event": (c_void_p, c_int64),
    "wait_event": (c_void_p, c_int64),
    "synchronize_event": (c_void_p,),
    "query_event": (c_void_p, POINTER(c_int)),
    "elapsed_ms": (c_void_p, c_void_p, POINTER(c_double)),
    "write_value": (c_int64, c_size_t, c_uint32, c_int),
    "wait_value": (c_int64, c_size_t, c_uint32, c_int),
    "register": (c_size_t, c_uint64),
    "unregister": (c_size_t,),
    "launch_noop": (c_int64,),
    "launch_kernel": (c_void_p, POINTER(c_int64), c_uint64),
    "set_rng_state": (c_void_p,),
}  # functions that may fail, and their arguments

_PLAIN = {
    "start": (None, ()),
    "stop": (None, ()),
    "make_stream": (c_int64, ()),
    "current_stream": (c_int64, ()),
    "exchange_stream": (c_int64, (c_int64,)),
    "make_event": (c_void_p, (c_int,)),
    "delete_event": (None, (c_void_p,)),
    "registered_bytes": (c_uint64, ()),
    "write_when_full": (None, (c_size_t,)),
    "count_waiting": (None, (c_int,)),
    "die": (None, (c_char_p,)),
    "die_after": (None, (c_uint64,)),
    "seed": (None, (c_uint64,)),
    "initial_seed": (c_uint64, ()),
    "rng_state_bytes": (c_uint64, ()),
    "get_rng_state": (None, (c_void_p,)),
    "allocated": (c_uint64, ()),
    "peak": (c_uint64, ()),
    "capacity": (c_uint64, ()),
    "reset_peak": (None, ()),
    "counts": (c_char_p, ()),
    "reset_counts": (None, ()),
    "dump": (c_char_p, ()),
    "dump_on_signal": (None, (c_int, c_char_p)),
    "last_error": (c_char_p, ()),
}  # functions that cannot fail: their result and arguments


class Library:
    """Calls ``sim_<name>`` by ``call(name, ...)`` or ``ask(name, ...)``.

    Args:
        holds_gil: callers keep the GIL during a call, as in code that Inductor generates. Otherwise they release it, as
            in PyTorch's operators and in ``torch.cuda``.
    """

    def __init__(self, path: str, *, holds_gil: bool = False) -> None:
        self._functions: Any = (ctypes.PyDLL if holds_gil else ctypes.CDLL)(path, mode=ctypes.RTLD_GLOBAL)
        for name, arguments in _STATUS.items():
            self._declare(name, c_int, arguments)
        for name, (result, arguments) in _PLAIN.items():
            self._declare(name, result, arguments)

    def _declare(self, name: str, result: Any, arguments: tuple[Any, ...]) -> None:
        function = getattr(self._functions, f"sim_{name}")
        function.restype = result
        function.argtypes = arguments

    def address(self, name: str) -> ctypes.c_void_p:
        """The address of ``sim_<name>``, for native code."""
        return ctypes.cast(getattr(self._functions, f"sim_{name}"), ctypes.c_void_p)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a function that cannot fail."""
        return getattr(self._functions, f"sim_{name}")(*arguments)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that may fail.

        Raises:
            RuntimeError: it failed.
        """
        if getattr(self._functions, f"sim_{name}")(*arguments):
            raise RuntimeError(self.ask("last_error").decode())


@cache
def library() -> Library:
    """The library of this process, with calls that release the GIL."""
    return Library(str(build()))


@cache
def library_with_gil() -> Library:
    """The same library, with calls that hold the GIL."""
    return Library(str(build()), holds_gil=True)
