"""An event that is set once, cheap enough to make one per copy and per job."""

from __future__ import annotations

import threading


class Latch:
    """Blocks threads until ``set`` was called. Making a ``threading.Event`` takes ten times as long.

    Attributes:
        is_set: whether ``set`` was called; reading it takes no lock.
        error: why the work that it stands for has failed; None before ``set``, and after a success.
    """

    __slots__ = ("_gate", "error", "is_set")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self.is_set = False
        self.error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        """Release all waiting threads. Idempotent; two threads must not call it at the same time.

        Args:
            error: of the work that has failed.
        """
        if not self.is_set:
            # No call between these lines: an interrupt cannot leave a set latch whose waiters sleep.
            self.error, self.is_set = error, True
            self._gate.release()

    def wait(self) -> None:
        """Block the calling thread until the latch is set."""
        if not self.is_set:
            with self._gate:  # each waiting thread lets the next one pass
                pass
