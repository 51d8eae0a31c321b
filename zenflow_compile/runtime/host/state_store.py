"""Where the host's state and the new weights of one parameter are kept, while jobs and copies use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from zenflow_compile.runtime.device.copy_lanes import Ticket
from zenflow_compile.runtime.host.workers import Job, MemoryUser
from zenflow_compile.runtime.state_forms import State


class Waits(NamedTuple):
    """What a job on host memory waits for.

    ``after``: jobs that it fails with. ``behind``: jobs and copies that use the same memory.
    """

    after: Sequence[Job] = ()
    behind: Sequence[MemoryUser] = ()

    def and_of(self, other: Waits) -> Waits:
        return Waits((*self.after, *other.after), (*self.behind, *other.behind))


_Seen = TypeVar("_Seen", covariant=True)
_Kept = TypeVar("_Kept")


class Store(Protocol[_Seen]):
    """Host memory of one parameter: its state, or one buffer of its new weights, [deferred, length] in its dtype."""

    @property
    def error(self) -> BaseException | None:
        """The failure that lost the content, until it is overwritten; None while it is intact."""

    def content(self) -> _Seen:
        """The tensors; of a file only after ``prepare`` or ``bring``, for that job or copy, or while acquired."""

    def prepare(self, *, step: int, deadline: int, fresh: bool = False) -> Waits:
        """Bring the content into memory for a job, which changes it and is made next.

        Args:
            fresh: the job overwrites all of it, so that the old content is not read.

        Raises:
            RuntimeError: the system does not start a thread.
        """

    def used_by(self, job: Job, *, last: bool = True) -> None:
        """Keep the content in memory for ``job``, which ``prepare`` was called for, and write it back after it.

        Args:
            last: no further job that belongs to this one is made next; until then it is not written.
        """

    def bring(self, writer: Job | None, *, step: int) -> Job | None:
        """Bring the content into memory for a copy, which is queued next.

        Args:
            writer: the job that wrote it last; None: no job has.

        Returns:
            The job that the copy waits for, which may have failed; None: the memory has the content.

        Raises:
            RuntimeError: the system does not start a thread.
        """

    def read_by(self, copy: Ticket) -> None:
        """Keep the content in memory for ``copy``, which ``bring`` was called for."""

    def acquire(self, *, write: bool = False, fresh: bool = False) -> AbstractContextManager[_Seen]:
        """The tensors for the training thread; waits for all queued jobs on them. Queue none inside the block.

        Args:
            write: they will be changed.
            fresh: all will be overwritten, so that the old content is not read, and may be lost.

        Raises:
            RuntimeError: it could not be read, or an earlier update of it could not be written.
        """

    def forget(self) -> None:
        """Drop the content, which may be lost. No job and no copy that was queued may use it."""


StateStore = Store[State]
UploadBuffer = Store[Tensor]


class InMemory(Generic[_Kept]):
    """Content that is always in memory. Its callers order jobs and copies; see ``HostState.applied``."""

    error: BaseException | None = None

    def __init__(self, content: _Kept) -> None:
        self._content = content

    def content(self) -> _Kept:
        return self._content

    def prepare(self, *, step: int, deadline: int, fresh: bool = False) -> Waits:
        return Waits()

    def used_by(self, job: Job, *, last: bool = True) -> None:
        """Nothing to do."""

    def bring(self, writer: Job | None, *, step: int) -> Job | None:
        return None if writer is None or writer.succeeded else writer

    def read_by(self, copy: Ticket) -> None:
        """Nothing to do."""

    @contextmanager
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[_Kept]:
        # Callers have waited for the jobs, or withdrawn them.
        yield self._content

    def forget(self) -> None:
        """Nothing to do: it cannot be lost."""
