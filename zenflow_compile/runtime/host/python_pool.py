"""Python threads that run jobs where native ones cannot: without a compiler, or where copies have no gates.

They run the earliest deadline first, each on its own core.

Workers queue nothing on a device: their inputs have been copied to host memory, and the training thread copies their
results back. The error of a failed job is kept with its traceback and raised in the training thread.

[Note: interrupted starts] ``Thread.start`` waits, so an interrupt often comes there. It leaves a thread that runs, will
run or was never made. So a thread is registered before it is started. The next caller removes dead threads, under the
lock, and a thread that is not registered exits at once: every running thread can be joined.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from zenflow_compile.runtime.device.copy_lanes import Ticket
from zenflow_compile.runtime.device.latch import Latch
from zenflow_compile.runtime.errors import never_queued, refuse_threads
from zenflow_compile.runtime.host.cores import pin_this_thread
from zenflow_compile.runtime.host.workers import Job, MemoryUser
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline import worker_lane


class PythonJob(Latch, Job):
    """A job of Python threads. Set when it is done.

    Attributes:
        taken: a worker has taken one of its tasks; written under the pool's lock.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], int]],
        inputs: Sequence[Ticket] = (),
        after: Sequence[Job] = (),
        *,
        behind: Sequence[MemoryUser] = (),
        deadline: int,
        step: int,
        param: str,
    ) -> None:
        """
        Args:
            tasks: each does a part of the work and returns the bytes of host memory that it read and wrote. In the
                order of that memory, since ``preferred_worker`` gives neighbors to one worker.
            inputs: the copies that it waits for.
            after: the jobs that it waits for, and fails with.
            behind: the jobs and copies whose memory it takes over: it waits until they are settled.
        """
        self._inputs, self._after, self._behind = inputs, after, behind
        Latch.__init__(self)
        Job.__init__(self, deadline=deadline, step=step, param=param)
        self.tasks = tasks
        self.taken = False
        self._lock = threading.Lock()
        self._left = len(tasks)
        self._settled: Latch | None = None  # made by the first thread that must wait for the last task
        if not tasks:
            self._end()

    # What it waits for.

    def arrived(self) -> bool:
        """Whether ``ready`` would return, or raise, at once."""
        for ticket in self._inputs:
            if not ticket.done() and ticket.error is None:
                return False
        return all(job.is_set for job in self._after) and all(job.is_settled for job in self._behind)

    def ready(self) -> None:
        """Block until all that it waits for has ended.

        Raises:
            CopyError: a copy failed.
            RuntimeError: a job failed.
        """
        for ticket in self._inputs:
            ticket.wait()
        for job in self._after:
            job.wait()
        for user in self._behind:
            if not user.is_settled:  # a copy asks the driver to wait
                user.settle()

    # Waiting for it.

    wait = Job.wait

    def _block(self) -> None:
        Latch.wait(self)

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        return not self._left and all(job.is_settled for job in self._behind)

    def settle(self) -> None:
        """See :meth:`Job.settle`."""
        with self._lock:
            # Under the lock: if the last task ended before the assignment below, no thread would set the latch.
            if self._left and self._settled is None:
                self._settled = Latch()
            settled = self._settled if self._left else None
        if settled is not None:
            settled.wait()
        for job in self._behind:
            job.settle()

    # Its end.

    def abort(self, error: BaseException) -> None:
        """See :meth:`Job.abort`. The job was never queued."""
        with self._lock:
            if not self.is_set:  # a job without tasks is
                self.error, self._left = error, 0
                self._end()

    def finish_task(self, error: BaseException | None = None) -> None:
        """Count one task as ended. The first error makes the job done at once; its other tasks are skipped."""
        with self._lock:
            self._left -= 1
            self.error = self.error or error
            if self._left == 0 or self.error is not None:
                self._end()

    def _end(self) -> None:
        """The job is done. If no task is left, it is settled, too."""
        if not self._left:
            # Tasks may refer to this job, and each job would keep all those before it alive.
            self.tasks, self._inputs, self._after = (), (), ()
            # A job that was never run may end before these, whose memory it has not taken over.
            self._behind = [job for job in self._behind if not job.is_settled]
            if self._settled is not None:
                self._settled.set()
        if not self.is_set:
            self.set(self.error)


_POLL_SECONDS = 1e-3
"""How often idle workers check whether inputs have arrived, while those of no queued job have."""


def preferred_worker(task: int, tasks: int, workers: int) -> int:
    """The worker that should run task ``task`` of ``tasks``: each worker gets about as many, all adjacent."""
    return task * workers // tasks


class _Queued:
    """The tasks of a job that no worker has taken yet."""

    def __init__(self, job: PythonJob, workers: int) -> None:
        self.job = job
        self.left = len(job.tasks)
        self._workers = workers
        self._by_worker: list[deque[Callable[[], int]]] | None = None  # made by the first worker that takes a task

    def take(self, worker: int) -> Callable[[], int]:
        """The next task of ``worker``, or the last one of the worker with the most tasks left."""
        tasks = self.job.tasks
        self.left -= 1
        self.job.taken = True
        if len(tasks) == 1:
            return tasks[0]
        if self._by_worker is None:
            self._by_worker = [deque() for _ in range(self._workers)]
            for number, task in enumerate(tasks):
                self._by_worker[preferred_worker(number, len(tasks), self._workers)].append(task)
        if own := self._by_worker[worker]:
            return own.popleft()
        return max(self._by_worker, key=len).pop()

    def fail(self, error: BaseException) -> None:
        """Count all tasks that no worker has taken as failed. The job must not be queued any more."""
        left, self.left = self.left, 0
        for _ in range(left):
            self.job.finish_task(error)


class PythonPool:
    """Threads that run jobs; started with the first job.

    An idle worker takes a task of the first job whose inputs have arrived, by step and then by deadline. The memory
    near to the worker decides only which task of that job it takes. A job of a later step must not delay an earlier
    one, whatever its deadline: its gradients may come from a device that waits for the earlier job.
    """

    def __init__(
        self, workers: int, recorder: Recorder, cores: Sequence[int] | None = None, *, name: str = "zenflow-worker"
    ) -> None:
        """
        Args:
            cores: the logical core that each worker is pinned to; None pins none.
            name: of the threads, before their number.
        """
        self.failed = False  # a job has
        self._name = name
        self.workers = workers
        self.cores = tuple(cores or ())
        self._recorder = recorder
        self._queue: list[tuple[int, int, int, _Queued]] = []  # sorted: step, deadline, order of submission
        self._order = itertools.count()
        # The training thread acquires the lock itself: an interrupt within Condition.__enter__ would leave it locked.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._polled_at = 0.0  # when a worker last found that no inputs had arrived; 0: the queue has changed since
        self._threads: list[threading.Thread] = []
        self._complete = False  # all wanted threads run, or as many as the system allows
        self._closing = False

    def land(self) -> None:
        """Nothing to do: the threads record what they do."""

    def start(self) -> None:
        """See :meth:`Pool.start`."""
        if not self._complete:
            self._start()

    def submit(self, *jobs: PythonJob) -> None:
        """Queue all tasks of ``jobs``. Wakes the workers one time for all jobs, since each asks for the GIL.

        Raises:
            RuntimeError: the system does not start a thread. The jobs have failed then.
        """
        try:
            self.start()
        except BaseException as error:
            self._refuse(jobs, error)
            raise
        try:
            queued = [_Queued(job, self.workers) for job in jobs if job.tasks]
            entries = [(each.job.step, each.job.deadline, next(self._order), each) for each in queued]
            with self._lock:
                queue = sorted(self._queue + entries)
                self._polled_at = 0.0
                self._wake.notify(sum(each.left for each in queued))  # the workers wait for the lock
                # One assignment, and nothing after it: an interrupt leaves all jobs queued, or none.
                self._queue = queue
        except Exception as error:  # after an interrupt, ``withdraw`` finds those that were not queued
            self._refuse(jobs, error)
            raise

    def _refuse(self, jobs: Iterable[PythonJob], error: BaseException) -> None:
        self.failed = True
        for job in jobs:
            job.abort(error)

    def withdraw(self, jobs: Iterable[PythonJob], interrupt: BaseException | None = None) -> None:
        """See :meth:`Pool.withdraw`."""
        with self._lock:
            # Under the lock: a job that a worker is taking is still queued, or marked as taken.
            queued = {id(entry[-1].job) for entry in self._queue}
            lost = [job for job in jobs if not (job.taken or job.done() or id(job) in queued)]
        self.failed = self.failed or bool(lost)
        for job in lost:
            job.abort(never_queued(interrupt))

    def close(self) -> None:
        """Finish all queued jobs, then stop the threads."""
        with self._lock:
            self._closing = True
            self._wake.notify_all()
            # A thread that never started cannot be joined. One that starts late is not registered, and exits.
            self._threads = [thread for thread in self._threads if thread.is_alive()]
        for thread in self._threads:
            thread.join()
        self._threads, self._complete = [], False

    def runs(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is one of the workers, so that it cannot wait for their work."""
        return thread in self._threads

    def _start(self) -> None:
        """Start the threads that are missing. See [Note: interrupted starts]."""
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
        running = {thread.name for thread in self._threads}
        for index in range(self.workers):
            name = f"{self._name}-{index}"
            if name in running:
                continue
            thread = threading.Thread(target=self._run, args=(index,), name=name, daemon=True)
            self._threads.append(thread)  # before the start, which an interrupt may leave
            try:
                thread.start()
            except RuntimeError as error:  # the system starts no further thread: the others run all jobs
                self._threads.pop()
                if not self._threads:
                    refuse_threads(error)
                break
        # Last: after an interrupt above, the next call starts the threads that are missing.
        self._complete = True

    def _run(self, index: int) -> None:
        with self._lock:
            # Not registered: its start was interrupted, and another thread may serve its index by now.
            if threading.current_thread() not in self._threads:
                return
        try:
            if self.cores:
                pin_this_thread(self.cores[index])
            # A thread inherits this mode: results would depend on when the first job was.
            torch.set_flush_denormal(False)
            lane = worker_lane(index)
            while (taken := self._take(index)) is not None:
                job, task = taken
                try:
                    if job.error is None:
                        self._run_task(job, task, lane)
                except BaseException as error:
                    # Before the job ends: a step that then begins looks for failures only if ``failed`` is set.
                    self.failed = True
                    job.finish_task(error)
                else:
                    job.finish_task()
                del taken, job, task  # an idle thread would keep their memory alive
        except BaseException as error:
            self._lose_worker(error)

    def _run_task(self, job: PythonJob, task: Callable[[], int], lane: str) -> None:
        job.ready()
        begin = time.perf_counter_ns()
        touched_bytes = task()
        if (timeline := self._recorder.timeline) is not None:
            end = time.perf_counter_ns()
            timeline.add(job.lane or lane, job.kind, begin, end, step=job.step, param=job.param, bytes=touched_bytes)

    def _lose_worker(self, error: BaseException) -> None:
        """Fail all queued jobs, because the calling worker ends with ``error``: no thread may wait for them forever."""
        with self._lock:
            self.failed = True
            self._threads = [thread for thread in self._threads if thread is not threading.current_thread()]
            self._complete = False  # after a state was loaded, the next job starts another thread
            queue, self._queue = self._queue, []
        for entry in queue:
            entry[-1].fail(error)

    def _take(self, worker: int) -> tuple[PythonJob, Callable[[], int]] | None:
        """The next task of worker ``worker``, which blocks until there is one; None at the end."""
        idle = False
        with self._lock:
            while (number := self._first_arrived(idle)) is None:
                if not self._queue and self._closing:
                    return None
                # With a timeout: copies and reads from files notify no worker when they end.
                self._wake.wait(_POLL_SECONDS if self._queue else None)
                idle = True
            queued = self._queue[number][-1]
            task = queued.take(worker)
            if not queued.left:
                del self._queue[number]
            return queued.job, task

    def _first_arrived(self, idle: bool) -> int | None:
        """Position of the first queued job whose inputs have arrived, under the lock; None if there is none.

        Args:
            idle: the worker has waited. Idle workers share one poll, since asking all jobs takes the GIL. A worker that
                has just ended a task asks itself: its job may have been an input.
        """
        if not self._queue:
            return None
        now = time.monotonic()
        if idle and now - self._polled_at < _POLL_SECONDS / 2:
            return None
        for number, (*_, queued) in enumerate(self._queue):
            try:
                if queued.job.arrived():
                    return number
            except Exception as error:  # of a device that died, for example
                self.failed = True
                del self._queue[number]
                queued.fail(error)
                return self._first_arrived(idle=False)  # the list has changed
        self._polled_at = now
        return None
