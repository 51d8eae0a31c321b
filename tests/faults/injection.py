"""Makes one of the package's calls of other code fail, or interrupts the package. A run of the program finds where.

A profile function sees the calls of C functions by frames of the package, and of Python functions of others. What it
raises is raised by the call, before the function has done anything. In Python 3.11 it sees neither operators nor calls
through ctypes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import zenflow_compile

PACKAGE = str(Path(zenflow_compile.__file__).parent)

# Locks and conditions of a thread that may use them, clocks, and looks at objects that exist.
CANNOT_FAIL = {
    *("acquire", "release", "__enter__", "__exit__", "notify", "notify_all", "locked", "is_set", "is_alive"),
    *("_is_owned", "_acquire_restore", "_release_save", "current_thread", "get_ident", "getpid"),
    *("monotonic", "perf_counter", "perf_counter_ns"),
    *("isinstance", "issubclass", "callable", "hasattr", "len", "id", "hash"),
    *("data_ptr", "numel", "dim", "is_contiguous", "element_size"),
    *("__del__", "_remove"),  # the interpreter calls them when objects go
}


class Site(NamedTuple):
    """A call in the source.

    Attributes:
        file: relative to the package.
        callee: the name of the function that is called.
        in_main: in the thread that trains.
    """

    file: str
    line: int
    callee: str
    in_main: bool


def _site(frame: FrameType, event: str, argument: Any) -> Site | None:
    """The site of a profile event; None if it is none of ours."""
    if event == "c_call":
        caller, name = frame, argument.__name__
    elif event == "call" and not frame.f_code.co_filename.startswith(PACKAGE) and frame.f_back is not None:
        caller, name = frame.f_back, frame.f_code.co_name
    else:
        return None
    file = caller.f_code.co_filename
    if not file.startswith(PACKAGE) or name in CANNOT_FAIL or name.startswith("<"):
        return None
    here = threading.current_thread() is threading.main_thread()
    return Site(file[len(PACKAGE) + 1 :], caller.f_lineno, name, here)


def _interruptible(frame: FrameType, event: str) -> bool:
    """Whether a signal can be delivered here: in the training thread, between calls of the package."""
    inside = event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE)
    return inside and threading.current_thread() is threading.main_thread()


@contextmanager
def _profiled(function: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Profile the calling thread, and those that are started from now on."""
    threading.setprofile(function)
    sys.setprofile(function)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


Target = Site | int
"""A call that fails, or the number of the point at which Ctrl-C comes: the interpreter delivers signals after calls."""


class Injector:
    """Watches the threads of one trial.

    Attributes:
        found: sites that were passed while ``recording``.
        points: at which the training thread can be interrupted that were passed while ``recording``, or since
            ``target`` was set.
        raised: the call of ``target`` has failed, or the interrupt has come.
    """

    def __init__(self) -> None:
        self.found: dict[Site, None] = {}
        self.points = 0
        self.recording = False
        self.target: Target | None = None
        self.raised = False

    @contextmanager
    def watch(self) -> Iterator[Injector]:
        """Watch the calling thread, and those that start inside of the block."""
        with _profiled(self._seen):
            yield self

    def watch_this_thread(self) -> None:
        """Watch a thread that Python has not started. It must not outlive the process that tries."""
        sys.setprofile(self._seen)

    def _seen(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.recording and self.target is None:
            return
        if _interruptible(frame, event):
            self.points += 1
            if self.points - 1 == self.target:
                self.target, self.raised = None, True
                raise KeyboardInterrupt
        if isinstance(self.target, int) or (site := _site(frame, event, argument)) is None:
            return
        if self.recording:
            self.found[site] = None
        elif site == self.target:
            self.target, self.raised = None, True
            raise MemoryError(f"injected at {site}")
