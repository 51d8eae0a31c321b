"""Jobs, which update host state, and the threads of one optimizer that run them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from zenflow_compile.runtime.device.copy_lanes import CopyError, Ticket
from zenflow_compile.runtime.device.stream_flags import Flag


class Job(ABC):
    """Work on one parameter's host state: independent tasks that any worker may run.

    Attributes:
        kind, lane: of its events in recordings; without a lane, they are in that of the thread.
        native: native threads run it.
        step, param: for recordings and errors.
        deadline: position of the parameter in the next forward; smaller runs earlier.
        flag: of a native job: raised when it is done or has failed, so that no waiting stream hangs.
        is_set: every task has run, or one failed.
        is_settled: no task runs or will run, whether the job failed or not.
        error: of the task or input that failed; None before the end, and after a success.
    """

    kind = "host_update"
    lane: str | None = None
    native = False
    is_set: bool
    is_settled: bool
    error: BaseException | None

    def __init__(self, *, deadline: int, step: int, param: str, flag: Flag | None = None) -> None:
        self.deadline = deadline
        self.step = step
        self.param = param
        self.flag = flag

    def done(self) -> bool:
        """Whether every task has run, or one failed."""
        return self.is_set

    @property
    def succeeded(self) -> bool:
        """Whether every task has run."""
        return self.is_set and self.error is None

    def wait(self) -> None:
        """Block until the job is done.

        Raises:
            RuntimeError: a task failed; chained to the original error and its traceback.
        """
        if not self.is_set:
            self._block()
        if self.error is not None:
            raise self.failure(self.error)

    def failure(self, error: BaseException) -> RuntimeError:
        """What ``wait`` raises for ``error``, chained to its cause."""
        failure = RuntimeError(
            f"the host update of {self.param} at step {self.step} failed; load the last saved state, or start anew"
        )
        failure.__cause__ = error.__cause__ if isinstance(error, CopyError) else error
        return failure

    @abstractmethod
    def _block(self) -> None:
        """Block until ``is_set``."""

    @abstractmethod
    def settle(self) -> None:
        """Block until no task of this job runs or will run, whether it failed or not."""

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Fail a job that will not run, so that no thread waits for it forever."""


MemoryUser = Job | Ticket
"""What reads or writes memory until it ``is_settled``: a job, or a copy of a lane."""

_Kind = TypeVar("_Kind", bound=Job, contravariant=True)


class Pool(Protocol[_Kind]):
    """Threads that run jobs.

    Attributes:
        failed: a job has failed.
    """

    failed: bool

    def start(self) -> None:
        """Start the threads, which ``submit`` does, too. Idempotent.

        Raises:
            RuntimeError: the system does not start a thread.
        """
        ...

    def land(self) -> None:
        """Record the jobs that have ended since, where the threads have not."""
        ...

    def submit(self, *jobs: _Kind) -> None:
        """Queue all tasks of ``jobs``.

        Raises:
            RuntimeError: the system does not start a thread. The jobs have failed then.
        """
        ...

    def withdraw(self, jobs: Iterable[_Kind], interrupt: BaseException | None = None) -> None:
        """Abort those of ``jobs`` that an interrupt kept from being queued: no worker would run them.

        Args:
            interrupt: the error of these jobs is chained to it; None if it is not known.
        """
        ...

    def close(self) -> None:
        """Finish all queued jobs, then stop the threads."""
        ...

    def runs(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is one of the workers, so that it cannot wait for their work."""
        ...


class HostWorkers:
    """The threads of one optimizer that run jobs.

    Args:
        native, python: run the jobs that are ``native``, and the others.

    Attributes:
        workers: threads of each pool.
        cores: the logical core that each worker is pinned to; empty: none is.
    """

    def __init__(self, native: Pool[Any], python: Pool[Any], workers: int, cores: Sequence[int] = ()) -> None:
        self.workers = workers
        self.cores = tuple(cores)
        self._native = native
        self._python = python

    @property
    def failed(self) -> bool:
        """Whether a job has failed."""
        self._native.land()
        return self._native.failed or self._python.failed

    def start(self, *, native: bool) -> None:
        """Start the threads for jobs that are ``native``, or for the others. Raises: see :meth:`Pool.start`."""
        (self._native if native else self._python).start()

    def land(self) -> None:
        """Record the jobs that have ended since."""
        self._native.land()

    def submit(self, *jobs: Job) -> None:
        """See :meth:`Pool.submit`."""
        native = [job for job in jobs if job.native]
        try:
            if native:
                self._native.submit(*native)
        finally:  # each pool fails the jobs that it cannot queue, also where the other one has raised
            if len(native) < len(jobs):
                self._python.submit(*[job for job in jobs if not job.native])

    def withdraw(self, jobs: Iterable[Job], interrupt: BaseException | None = None) -> None:
        """See :meth:`Pool.withdraw`."""
        jobs = list(jobs)
        self._native.withdraw([job for job in jobs if job.native], interrupt)
        self._python.withdraw([job for job in jobs if not job.native], interrupt)

    def close(self) -> None:
        """See :meth:`Pool.close`."""
        self._native.close()
        self._python.close()

    def runs(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is one of the workers, so that it cannot wait for their work."""
        return self._python.runs(thread)
