"""Jobs, which update host state, and the native threads of one optimizer that run them without the GIL.

So a device may wait for a job whatever Python's threads do. See native/pool.h. A job is described once, when it is
made; from then on nothing of it needs Python.

[Note: native memory] Native threads read and write through addresses. So the memory of every queued job is kept until
no task of it runs or will run, by the list ``_owners``. A reference of its own keeps that list until the threads have
ended: an interrupt in between leaks it. Owners refer to no job, error or engine: an engine that is forgotten is
collected, and ends the threads, as the end of the process does. The native pool itself, some hundred bytes, is never
freed: a Python thread may still be on its way out of a wait for a job that has just ended.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from zenflow_compile.native import library as native
from zenflow_compile.native.library import HostJob, Record
from zenflow_compile.runtime.device.copy_lanes import CopyError, Gate, Ticket
from zenflow_compile.runtime.device.stream_flags import Flag
from zenflow_compile.runtime.errors import never_queued, refuse_threads
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline import Timeline, worker_lane

POLL_NS = 100_000
"""How often one idle thread looks whether inputs of queued jobs have arrived: 9% of a core (2 cores, KVM)."""

_SLICE_NS = 100_000_000
"""The longest wait without a look at signals, and at the device: a dead one raises no flag."""


Bounds = ctypes.Array[ctypes.c_int64]
"""Task i of a job covers the elements or rows from bound i to bound i + 1."""


def bounds_of(parts: Sequence[slice]) -> Bounds:
    return (ctypes.c_int64 * (len(parts) + 1))(*(part.start for part in parts), parts[-1].stop)


class Work(ABC):
    """What a job computes. ``kind``: of its events in recordings."""

    kind: ClassVar[str]
    bounds: Bounds

    @abstractmethod
    def describe(self, memory: HostJob) -> object:
        """Write the work into ``memory``. Returns the owners of all memory that this refers to."""

    @abstractmethod
    def touched_bytes(self, task: int, record: Record) -> int:
        """Bytes of host memory that a task, which has run, has read and written."""

    def failure(self, error: int) -> Exception:
        """What the ``error`` of a job stands for, see ``Job`` in pool.h."""
        return OSError(error, os.strerror(error))


_SETTLED, _STATE = HostJob.settled.offset, HostJob.state.offset


class _Nothing(Work):
    kind = "host_update"
    bounds = (ctypes.c_int64 * 1)(0)

    def describe(self, memory: HostJob) -> object:
        return None

    def touched_bytes(self, task: int, record: Record) -> int:
        return 0


class Job:
    """Work on one parameter's host state: independent tasks that any worker may run.

    Args:
        inputs: the copies that it waits for.
        after: the jobs that it waits for, and fails with.
        pool: of the threads that will run it.
        behind: the jobs and copies whose memory it takes over: it waits until they are settled.

    Attributes:
        inputs, after, behind, read_by: what it waits for, the last two for the jobs and the copies of ``behind``; empty
            when it is settled.
        lane: of its events in recordings; None: they are in that of the thread.
        deadline: position of the parameter in the next forward; smaller runs earlier.
        flag: raised when it is done or has failed, so that no waiting stream hangs; None if only threads wait for it.
        memory: what native threads know of it.
        owners: of all memory that they use for it.
        records: when and where each task ran.
        recorded: they are in the timeline.
    """

    lane: str | None = None

    def __init__(
        self,
        work: Work,
        inputs: Sequence[Ticket],
        after: Sequence[Job],
        pool: ctypes.c_void_p,
        *,
        behind: Sequence[MemoryUser] = (),
        deadline: int,
        step: int,
        param: str,
        flag: Flag | None = None,
    ) -> None:
        self.deadline, self.step, self.param, self.flag = deadline, step, param, flag
        self.work: Work | None = work
        self._pool = pool
        self.inputs = inputs
        self.after = after
        self.behind = [user for user in behind if isinstance(user, Job)]
        self.read_by = [user for user in behind if not isinstance(user, Job)]
        self._error: BaseException | None = None
        self.recorded = False
        # Those behind come first: a job whose input has failed ends no earlier than they do.
        gates = [job._gate(_SETTLED, 1, native.COUNTER) for job in self.behind]
        gates += [input.gate() for input in inputs]
        gates += [job._gate(_STATE, native.DONE, native.STATE) for job in after]
        gates += [copy.settled_gate() for copy in self.read_by]  # last: ``error`` counts the gates before them
        bounds = work.bounds
        tasks = len(bounds) - 1
        words = (native.Gate * len(gates))(*(native.Gate(*gate[:3]) for gate in gates))
        self.records = (native.Record * tasks)()
        self.memory: HostJob = HostJob(
            failed_gate=-1,
            step=step,
            deadline=deadline,
            gates=words,
            gate_count=len(gates),
            bounds=bounds,
            tasks=tasks,
            records=self.records,
            untaken=tasks,
            unfinished=tasks,
        )
        if flag is not None:
            self.memory.flag, self.memory.flag_value = flag.address, flag.value
        waited_for = [gate.owner for gate in gates]
        self.owners: Any = (self.memory, words, bounds, self.records, waited_for, work.describe(self.memory), flag)

    @classmethod
    def ended(cls, *, step: int, param: str) -> Job:
        job = cls(_Nothing(), (), (), ctypes.c_void_p(), deadline=0, step=step, param=param)
        job.memory.settled, job.memory.state = 1, native.DONE
        return job

    def _gate(self, offset: int, value: int, kind: int) -> Gate:
        return Gate(ctypes.addressof(self.memory) + offset, value, kind, self.memory)

    @property
    def is_set(self) -> bool:
        """Whether every task has run, or one failed."""
        if not self.memory.state:
            return False
        native.library_with_gil().zenflow_acquire()  # what the job has written is seen from here on
        return True

    def done(self) -> bool:
        return self.is_set

    @property
    def succeeded(self) -> bool:
        """Whether every task has run."""
        if self.memory.state != native.DONE:
            return False
        native.library_with_gil().zenflow_acquire()
        return True

    @property
    def is_settled(self) -> bool:
        """Whether no task runs or will run, whether the job failed or not."""
        return bool(self.memory.settled)

    @property
    def error(self) -> BaseException | None:
        """That of the task or input that failed; None before the end, and after a success."""
        if self.memory.state != native.FAILED:
            return None
        # First: ``release`` finds the error, and then drops them.
        sources: tuple[Ticket | Job, ...] = (*self.behind, *self.inputs, *self.after)
        work = self.work
        if self._error is None:
            if self.memory.error:
                assert work is not None
                self._error = work.failure(self.memory.error)
                return self._error
            if self.memory.failed_gate < 0:
                self._error = RuntimeError("the threads were ended before this job has run")
                return self._error
            try:
                sources[self.memory.failed_gate].wait()
            except Exception as error:
                self._error = error
        return self._error

    def wait(self) -> None:
        """Block until the job is done.

        Raises:
            RuntimeError: a task failed; chained to the original error and its traceback.
        """
        if not self.is_set:
            self._block()
        if self.memory.state == native.FAILED and (error := self.error) is not None:
            raise self.failure(error)

    def failure(self, error: BaseException) -> RuntimeError:
        """What ``wait`` raises for ``error``, chained to its cause."""
        failure = RuntimeError(
            f"the host update of {self.param} at step {self.step} failed; load the last saved state, or start anew"
        )
        failure.__cause__ = error.__cause__ if isinstance(error, CopyError) else error
        return failure

    def settle(self) -> None:
        """Block until no task runs or will run. Fails the job if the device of its inputs has died."""
        self._block(settled=True)

    def _block(self, *, settled: bool = False) -> None:
        memory = self.memory
        while not (memory.settled if settled else memory.state):
            self.check_inputs()
            if not native.library().zenflow_wait(self._pool, memory, settled, _SLICE_NS):
                self.abort(RuntimeError("this job was not queued by this process"))

    def check_inputs(self) -> None:
        """Fail the job, or one that it waits for, whose inputs never arrive, because their device has died."""
        unsettled: dict[Job, None] = {}
        waiting = [self]
        while waiting:
            job = waiting.pop()
            if not (job in unsettled or job.is_settled):
                unsettled[job] = None
                waiting += (*job.after, *job.behind)
        for job in reversed(unsettled):
            for ticket in (*job.inputs, *job.read_by):
                try:
                    ticket.done()
                except Exception as error:
                    job.abort(error)
                    break

    def abort(self, error: BaseException) -> None:
        """Fail a job that will not run, so that no thread waits for it forever. Tasks that run go on."""
        if self._error is None:
            self._error = error  # before the state: a thread that sees a failure asks for its error
        native.library_with_gil().zenflow_abort(self._pool, self.memory)

    def release(self) -> None:
        """Let go of the memory of a settled job, and of the jobs that it has waited for."""
        _ = self.error  # found through what is released
        self.after, self.behind, self.inputs, self.read_by, self.owners, self.work = (), [], (), [], None, None


MemoryUser = Job | Ticket
"""What reads or writes memory until it ``is_settled``: a job, or a copy of a lane."""


class Workers:
    """Threads that run jobs.

    Attributes:
        cores: the logical core that each is pinned to; empty: none is.
        handle: the address of the native pool, which jobs keep, and not this object. Null before the start, and after
            the end.
    """

    def __init__(
        self,
        count: int,
        recorder: Recorder,
        cores: Sequence[int] = (),
        *,
        name: str = "zenflow",
        poll_ns: int = POLL_NS,
    ) -> None:
        self._name = name
        self._poll_ns = poll_ns
        self.handle = ctypes.c_void_p()
        self._failed = False
        self.count = count
        self.cores = tuple(cores)
        self._recorder = recorder
        self._in_flight: list[Job] = []
        self._owners: list[Any] = []  # see [Note: native memory]
        self._end = weakref.finalize(self, _end, self.handle, self._owners)

    @property
    def failed(self) -> bool:
        """Whether a job has failed."""
        self.land()
        return self._failed

    def submit(self, *jobs: Job) -> None:
        """Queue all of ``jobs``, or none, if an interrupt comes before.

        Raises:
            RuntimeError: the system does not start a thread. The jobs have failed then.
        """
        try:
            self.land()
            self.start()
            pointers = (ctypes.POINTER(HostJob) * len(jobs))(*(ctypes.pointer(job.memory) for job in jobs))
            self._in_flight += jobs
            self._owners += [job.owners for job in jobs]  # before threads see the addresses
            error = native.library_with_gil().zenflow_submit(self.handle, pointers, len(jobs))
            if error:
                raise RuntimeError(f"the jobs of a step could not be queued: {os.strerror(error)}")
        except Exception as error:  # after an interrupt, ``withdraw`` finds those that were not queued
            self._failed = True
            for job in jobs:
                job.abort(error)
            raise

    def start(self) -> None:
        """Start the threads, which ``submit`` does, too. Idempotent.

        Raises:
            RuntimeError: the system does not start a thread.
        """
        if self.handle:
            return
        if not self._end.alive:
            raise RuntimeError("the process ends: no update can be made any more")
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._owners))  # see [Note: native memory]
        cores = (ctypes.c_int32 * self.count)(*self.cores) if self.cores else None
        error = native.library().zenflow_open(
            ctypes.byref(self.handle), self.count, cores, self._poll_ns, self._name.encode()
        )
        if error:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._owners))
            refuse_threads(RuntimeError(os.strerror(error)))

    def withdraw(self, jobs: Iterable[Job], interrupt: BaseException | None = None) -> None:
        """Abort those of ``jobs`` that ``interrupt``, None if it is not known, kept from being queued."""
        for job in jobs:
            if not (job.memory.queued or job.is_set):
                self._failed = True
                job.abort(never_queued(interrupt))

    def land(self) -> None:
        """Record the jobs that have ended since, and let go of their memory."""
        jobs = self._in_flight
        if not jobs:
            return
        timeline, left = self._recorder.timeline, []
        for job in jobs:
            if job.memory.state == native.FAILED:
                self._failed = True
            if not job.memory.settled:
                left.append(job)
                continue
            if timeline is not None and job.work is not None and not job.recorded:
                self._record(timeline, job, job.work)
            job.release()
        # After an interrupt above, the next call does it all again, but for records that were made.
        self._in_flight = left
        self._owners[:] = [job.owners for job in left]

    def _record(self, timeline: Timeline, job: Job, work: Work) -> None:
        job.recorded = True
        for number, record in enumerate(job.records):
            if record.end_ns:
                timeline.add(
                    job.lane or worker_lane(record.worker), work.kind, record.begin_ns, record.end_ns,
                    step=job.step, param=job.param, bytes=work.touched_bytes(number, record),
                )  # fmt: skip

    def close(self) -> None:
        """Finish all queued jobs, then stop the threads."""
        if not self.handle:
            return
        self.withdraw(self._in_flight)
        for job in list(self._in_flight):
            job.settle()
        while not native.library().zenflow_close(self.handle, _SLICE_NS):
            pass
        self.land()
        _forget(self.handle, self._owners)  # the next job makes another pool


def _end(handle: ctypes.c_void_p, owners: list[Any]) -> None:
    """Stop the threads of a pool that was collected, or of a process that ends. Tasks that run are finished."""
    if handle:
        native.library_with_gil().zenflow_end(handle)  # no interrupt comes in the middle
        _forget(handle, owners)


def _forget(handle: ctypes.c_void_p, owners: list[Any]) -> None:
    owners.clear()
    handle.value = None
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(owners))
