"""Buffers of new weights, which the host's updates write, and which uploads and loads of weights copy from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor

from zenflow_compile.runtime.device.copy_lanes import Ticket
from zenflow_compile.runtime.host.state_store import Needs
from zenflow_compile.runtime.host.workers import Job


class UploadBuffer(Protocol):
    """One buffer of new weights of one parameter: [deferred, length] in the model's dtype."""

    @property
    def error(self) -> BaseException | None:
        """The failure that lost its content, until it is overwritten; None while it is intact."""
        ...

    def tensor(self) -> Tensor:
        """The memory; of a buffer in a file only after ``prepare`` or ``bring``, for that job or copy."""
        ...

    def prepare(self, *, step: int, deadline: int, fresh: bool) -> Needs:
        """Bring the buffer into memory for a job that writes it, and is made next.

        Args:
            step, deadline: of the job.
            fresh: the job overwrites all of it, so that the old content is not read.

        Raises:
            RuntimeError: the system does not start a thread.
        """
        ...

    def used_by(self, job: Job, *, last: bool = True) -> None:
        """Keep the buffer in memory for ``job``, which ``prepare`` was called for; see ``StateInFile.used_by``."""
        ...

    def bring(self, writer: Job | None, *, step: int) -> Job | None:
        """Bring the buffer into memory for a copy, which is queued next.

        Args:
            writer: the job that wrote the buffer last; None: no job has.

        Returns:
            The job that the copy waits for, which may have failed; None: the memory has the content.

        Raises:
            RuntimeError: the system does not start a thread.
        """
        ...

    def read_by(self, copy: Ticket) -> None:
        """Keep the buffer in memory for ``copy``, which ``bring`` was called for."""
        ...

    def acquire(self, *, write: bool = False, fresh: bool = False) -> AbstractContextManager[Tensor]:
        """The memory for the training thread; see ``StateStore.acquire``."""
        ...

    def forget(self) -> None:
        """Drop the content, which may be lost. No job and no copy that was queued may use it."""
        ...


class InMemoryUpload:
    """A buffer that is always in memory. Its callers order jobs and copies; see ``HostState.applied``."""

    error: BaseException | None = None

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def tensor(self) -> Tensor:
        """See :meth:`UploadBuffer.tensor`."""
        return self._memory

    def prepare(self, *, step: int, deadline: int, fresh: bool) -> Needs:
        """See :meth:`UploadBuffer.prepare`."""
        return Needs()

    def used_by(self, job: Job, *, last: bool = True) -> None:
        """See :meth:`UploadBuffer.used_by`."""

    def bring(self, writer: Job | None, *, step: int) -> Job | None:
        """See :meth:`UploadBuffer.bring`."""
        return None if writer is None or writer.succeeded else writer

    def read_by(self, copy: Ticket) -> None:
        """See :meth:`UploadBuffer.read_by`."""

    @contextmanager
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[Tensor]:
        """See :meth:`UploadBuffer.acquire`."""
        yield self._memory

    def forget(self) -> None:
        """See :meth:`UploadBuffer.forget`."""
