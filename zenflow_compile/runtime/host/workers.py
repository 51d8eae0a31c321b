"""Worker threads that apply closed windows on the host, earliest deadline first, each pinned to a core of its own.

Workers make no CUDA launches: what they need has been copied to host memory, and what they write is copied back by the
thread that runs the graph. A failure is kept with its traceback and raised in the training thread.

[Note: interrupted starts] ``Thread.start`` waits, so an interrupt comes there easily, and leaves a thread that runs,
will run or was never made. So a thread is listed before it is started. Whoever goes on strikes out, under the lock,
those that are not alive, and a thread that begins serves only if it is listed: whatever serves is known, and joined.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from zenflow_compile.runtime.errors import refuse_threads
from zenflow_compile.runtime.host.cores import pin_this_thread
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.transfer.copy_lanes import CopyError
from zenflow_compile.runtime.transfer.stream_flags import Flag
from zenflow_compile.timeline.events import worker_lane


class Job:
    """One closed window: a number of independent tasks that any worker may run."""

    def __init__(
        self,
        tasks: Sequence[Callable[[], int]],
        *,
        deadline: int,
        step: int,
        param: str,
        ready: Callable[[], None],
        arrived: Callable[[], bool] = lambda: True,
        flag: Flag | None = None,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            tasks: each does a part of the work and returns the bytes of host memory it touched. In the order of the
                memory that they touch, since worker i prefers those that ``preferred_worker`` gives it.
            deadline: position of the parameter in the next forward; smaller runs earlier.
            ready: blocks until the inputs are in host memory; raises if one of them failed.
            arrived: whether ``ready`` would return, or raise, at once.
            flag: raised when the job is done, for streams that wait for it; also when it failed, so that none hangs.
            settled: called once when no task of it runs or will run, before anybody learns of that. It must not raise.
        """
        self.tasks = tasks
        self.flag = flag
        self.deadline = deadline
        self.step = step
        self.param = param
        self.ready = ready
        self.arrived = arrived
        self._on_settled = settled
        self.taken = False  # a worker has taken one of its tasks; written under the pool's lock
        self._lock = threading.Lock()
        self._left = len(tasks)
        self._done = threading.Event()
        self._settled = threading.Event()
        self.error: BaseException | None = None
        if not tasks:
            self._settle()
            self._finish()

    def done(self) -> bool:
        """Whether every task has run, or one failed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until the job is done.

        Raises:
            RuntimeError: a task failed; chained to the original error and its traceback.
        """
        if not self._done.is_set():  # asking takes no lock
            self._done.wait()
        if (error := self.error) is not None:
            cause = error.__cause__ if isinstance(error, CopyError) else error
            raise RuntimeError(
                f"the host update of {self.param} at step {self.step} failed; load the last saved state, or start anew"
            ) from cause

    def settle(self) -> None:
        """Block until no task of this job runs or will run, whether it failed or not."""
        self._settled.wait()

    def abort(self, error: BaseException) -> None:
        """The job was never queued: it counts as failed, so that nobody waits for it for ever."""
        self.error = error
        if not self._settled.is_set():  # one without tasks has settled already
            self._settle()
        self._finish()

    def finish_task(self, error: BaseException | None = None) -> None:
        """One task ended. The first error makes the job done at once; its other tasks are skipped."""
        with self._lock:
            self._left -= 1
            self.error = self.error or error
            if self._left == 0:
                self._settle()
            if self._left == 0 or self.error is not None:
                self._finish()

    def _settle(self) -> None:
        self._on_settled()
        self._settled.set()

    def _finish(self) -> None:
        if self.flag is not None:
            self.flag.raise_it()
        self._done.set()


_ARRIVALS_SECONDS = 1e-3
"""How often idle workers look whether gradients have arrived, while none of the queued jobs' has."""


def preferred_worker(task: int, tasks: int, workers: int) -> int:
    """The worker that task ``task`` of ``tasks`` is meant for: each gets tasks that lie together, and about as many."""
    return task * workers // tasks


class _Queued:
    """The tasks of a job that no worker has taken yet."""

    def __init__(self, job: Job, workers: int) -> None:
        self.job = job
        self.left = len(job.tasks)
        self._of_worker: list[deque[Callable[[], int]]] = [deque() for _ in range(workers)]
        for number, task in enumerate(job.tasks):
            self._of_worker[preferred_worker(number, len(job.tasks), workers)].append(task)

    def take(self, worker: int) -> Callable[[], int]:
        """The next task of ``worker``; none of its own being left, the last of whoever has the most."""
        self.left -= 1
        self.job.taken = True
        if own := self._of_worker[worker]:
            return own.popleft()
        return max(self._of_worker, key=len).pop()


class WorkerPool:
    """Threads that serve jobs; started with the first job.

    An idle worker takes a task of the job with the earliest step, and in it the earliest deadline, whose inputs have
    arrived: that its memory may be nearer to another worker decides only which task of that job it takes. A job of a
    later step must not hold up an earlier one, whatever its deadline: the gradients that it waits for may come from a
    device that waits for the earlier job.
    """

    def __init__(self, workers: int, recorder: Recorder, cores: Sequence[int] | None = None) -> None:
        """
        Args:
            cores: the logical core that each worker is pinned to; None pins none.
        """
        self.workers = workers
        self.cores = tuple(cores or ())
        self._recorder = recorder
        self._heap: list[tuple[int, int, int, _Queued]] = []
        self._order = itertools.count()
        # Taken by itself in the training thread: an interrupt within a condition's own entry leaves it locked.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._complete = False  # as many threads as wanted, or as the system has
        self._closing = False

    def submit(self, *jobs: Job) -> None:
        """Queue all tasks of ``jobs``, waking the workers once: each of them that wakes asks for the GIL.

        Raises:
            RuntimeError: the system does not start a thread; the jobs count as failed then.
        """
        if not self._complete:
            try:
                self._start()
            except BaseException as error:
                for job in jobs:
                    job.abort(error)
                raise
        queued = [_Queued(job, self.workers) for job in jobs if job.tasks]
        entries = [(each.job.step, each.job.deadline, next(self._order), each) for each in queued]
        with self._lock:
            # Workers that wake wait for the lock. Then one assignment: an interrupt leaves all jobs queued, or none.
            self._wake.notify(sum(each.left for each in queued))
            self._heap = sorted(self._heap + entries)

    def withdraw(self, jobs: Iterable[Job]) -> None:
        """Abort those of ``jobs`` that were never queued, because an interrupt came between: nobody would run them."""
        with self._lock:
            queued = {id(entry[-1].job) for entry in self._heap}
            lost = [job for job in jobs if not (job.taken or job.done() or id(job) in queued)]
        for job in lost:
            job.abort(RuntimeError("the step was interrupted before this update was queued"))

    def close(self) -> None:
        """Finish what is queued, then stop the threads."""
        with self._lock:
            self._closing = True
            self._wake.notify_all()
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
        for index in range(len(self._threads), self.workers):
            name = f"zenflow-worker-{index}"
            thread = threading.Thread(target=self._run, args=(index,), name=name, daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no further thread: those that run serve all jobs
                self._threads.pop()
                if not self._threads:
                    refuse_threads(error)
                break
        self._complete = True

    def _run(self, index: int) -> None:
        with self._lock:
            if threading.current_thread() not in self._threads:
                return
        if self.cores:
            pin_this_thread(self.cores[index])
        lane = worker_lane(index)
        while True:
            with self._wake:
                while (queued := self._next()) is None:
                    if not self._heap and self._closing:
                        return
                    self._wake.wait(_ARRIVALS_SECONDS if self._heap else None)
                job, task = queued.job, queued.take(index)
                if not queued.left:
                    self._heap = [entry for entry in self._heap if entry[-1] is not queued]
                    heapq.heapify(self._heap)
            if job.error is not None:
                job.finish_task()
                continue
            try:
                job.ready()
                begin = time.perf_counter_ns()
                touched = task()
            except BaseException as error:
                job.finish_task(error)
                continue
            if (timeline := self._recorder.timeline) is not None:
                end = time.perf_counter_ns()
                timeline.add(lane, "host_update", begin, end, step=job.step, param=job.param, bytes=touched)
            job.finish_task()

    def _next(self) -> _Queued | None:
        """What an idle worker serves now, under the lock; None if nothing is queued or no inputs have arrived."""
        if not self._heap:
            return None
        if (first := self._heap[0][-1]).job.arrived():
            return first
        return next((entry[-1] for entry in sorted(self._heap) if entry[-1].job.arrived()), None)
