"""Asynchronous copies between device and host: one lane per direction.

A lane runs all copies to one place in order. It touches only engine memory, which is allocated one time: so there is no
``record_stream``, and no race with PyTorch's allocator. ``stream_lane`` makes a lane of a stream. Where the device
has none, ``thread_lane`` makes it of a thread that copies without the GIL, so that copies are as asynchronous there.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

from torch import Tensor

from zenflow_compile.runtime.device.stream_flags import Flag


class CopyError(RuntimeError):
    """An asynchronous copy failed; chained to the error that made it fail."""


class Gate(NamedTuple):
    """A 32-bit word of host memory, at ``address``, by which native threads see that a copy is complete.

    ``value`` and ``kind``: what it must be, see native/library.py. ``owner`` keeps the word, and refers to no error,
    whose traceback would refer to an engine.
    """

    address: int
    value: int
    kind: int
    owner: object


class Ticket(Protocol):
    """One copy in flight.

    Attributes:
        completed: it is known to be complete, without a call of ``done``, which asks.
        error: what made it fail; None while it runs and after a success.
    """

    completed: bool

    @property
    def error(self) -> BaseException | None: ...

    @property
    def is_settled(self) -> bool:
        """Whether the copy touches neither of its tensors any more, whether it failed or not."""

    def done(self) -> bool:
        """Whether the copy is complete."""

    def wait(self) -> None:
        """Block the calling thread until the copy is complete.

        Raises:
            CopyError: it failed; chained to the original error.
        """

    def settle(self) -> None:
        """Block the calling thread until the copy touches neither of its tensors, whether it failed or not."""

    def wait_on_device(self) -> None:
        """Make the device's current stream wait for the copy (on the CPU: the calling thread)."""

    def gate(self) -> Gate:
        """What native threads wait for."""

    def settled_gate(self) -> Gate:
        """What native threads wait for until the copy ``is_settled``."""


class HostWork(Protocol):
    """Work of other threads on the host that a lane can wait for.

    Attributes:
        flag: raised when the work is done or has failed; None if only threads can wait for it.
        error: what made the work fail; None before the end, and after a success.
    """

    flag: Flag | None

    @property
    def error(self) -> BaseException | None: ...

    def done(self) -> bool:
        """Whether the work is done, or has failed."""

    def wait(self) -> None:
        """Block the calling thread until the work is done; raises if it failed."""


class Users(NamedTuple):
    """Work that still uses the memory that a copy writes: jobs on the host, and earlier copies of the other lane."""

    jobs: list[HostWork]
    copies: list[Ticket]


class CopyLane(Protocol):
    """Copies in one direction, those to one place in order of submission."""

    @property
    def failed(self) -> bool:
        """Whether a copy has failed, as far as its ticket says so."""

    def start(self) -> None:
        """Start the lane's thread, if it has one. Idempotent: ``submit`` does it, too.

        Raises:
            RuntimeError: the system does not start a thread.
        """

    def submit(
        self,
        target: Tensor,
        source: Tensor,
        *,
        step: int,
        param: str,
        kind: str = "copy",
        after: HostWork | None = None,
        behind: Ticket | None = None,
        users: Users | None = None,
    ) -> Ticket:
        """Copy ``source`` to ``target`` (same shape and dtype, contiguous) after the work queued on the device.

        Args:
            after: the work that writes ``source``. The lane waits for it: ask ``can_wait_for`` first.
            behind: a copy of the other lane, submitted before, that writes ``source`` or reads ``target``. The lane
                waits for it, and fails this copy if that one failed. Not together with ``after``.
            users: of ``target``. The lane waits for them, for jobs as for ``after``.
        """

    def can_wait_for(self, work: HostWork) -> bool:
        """Whether the lane itself can wait until ``work`` is done, so that no thread has to."""

    def settle(self) -> None:
        """Block until every submitted copy has ended, whether it failed or not."""

    def close(self) -> None:
        """Finish all submitted copies, then stop."""

    def runs(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` belongs to the lane, so that it cannot wait for the lane's work."""
