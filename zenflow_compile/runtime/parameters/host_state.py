"""The host side of one parameter: the state of its deferred slices, and its update window."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from zenflow_compile.native.library import UPDATE, HostJob, LateScale, Record, UpdateWindow
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.device.copy_lanes import Ticket, Users
from zenflow_compile.runtime.device.stream_flags import Flag, HostFlags
from zenflow_compile.runtime.device_updates.selection import Wanted
from zenflow_compile.runtime.host.arena import HostArena, carved_bytes, touch_pages
from zenflow_compile.runtime.host.host_kernel import HostKernel, WindowUpdate, put_numbers
from zenflow_compile.runtime.host.state_store import InMemory, StateStore, UploadBuffer, Waits
from zenflow_compile.runtime.host.workers import Bounds, Job, Work, bounds_of
from zenflow_compile.runtime.recorder import Moment
from zenflow_compile.runtime.state_forms import State, StateForm, StateRows
from zenflow_compile.runtime.update_rule import StepCoefficients

TASK_ELEMENTS = 1 << 20
"""Most elements per task of a worker: so many that the overhead of a call vanishes, so few that other workers find
tasks, and that a job with an earlier deadline does not wait long."""

# Below this the overhead of a call shows: it is 20 us, and so many elements take ten times as long.
_SMALLEST_TASK_ELEMENTS = 1 << 16
CUT_ELEMENTS = 64  # whole CPU vectors: only the last part needs a ``PaddedTail``


def task_ranges(elements: int, workers: int, unit: int = CUT_ELEMENTS, most: int = TASK_ELEMENTS) -> list[slice]:
    """Cut a block into tasks of equal size, with the same number for each worker where tasks stay large.

    Results do not depend on the cut. All parts but the last are multiples of ``unit`` elements, and about ``most``.
    """
    parts = -(-elements // most)
    parts = min(-(-parts // workers) * workers, max(parts, elements // _SMALLEST_TASK_ELEMENTS))
    size = max(unit, -(-elements // max(1, parts * unit)) * unit)
    return [slice(begin, min(begin + size, elements)) for begin in range(0, elements, size)]


def touched_bytes(plan: ParamPlan, gradients: int) -> float:
    """Bytes of host memory that an update window's update reads and writes per element, caches aside.

    That is the state both ways, each gradient once, and the upload. Each step of a moment reads and writes it once,
    whatever the number of ``gradients``; those of a summed window share one buffer.
    """
    return plan.update_bytes(gradients) / max(1, plan.deferred_numel)


@dataclass(slots=True)
class GradientBuffer:
    """One step's deferred gradient in the update window. Those of a summed window share one buffer, with their mean."""

    index: int
    coefficients: StepCoefficients
    copied: Ticket


@dataclass(slots=True)
class FlushedWindow:
    """A flushed update window: its job, and its updated weights, which a later forward applies.

    Attributes:
        visible_at: number of optimizer steps after which a forward must see it.
        final: when it was flushed, for the profiler; None without a profiler.
        selection: the slices that are selected when it is applied; None: the selection stays.
        buffer: index of the gradient buffer that is the upload; None: it is in memory of its own.
    """

    job: Job
    upload: UploadBuffer
    flushed_at: int
    visible_at: int
    final: Moment | None = None
    selection: Wanted | None = None
    buffer: int | None = None

    def leave_buffer(self) -> None:
        """Wait for the job, and move its result to memory of its own."""
        self.job.wait()
        self.upload, self.buffer = InMemory(self.upload.content().clone()), None


class WindowAddresses(NamedTuple):
    """Where the memory of an update window is, which ``owner`` has: checked and described one time, without numbers."""

    window: UpdateWindow
    owner: WindowUpdate


@dataclass(slots=True)
class UpdateWork(Work):
    """The host update of one flushed update window.

    Attributes:
        coefficients: one for each gradient.
        taken: gradients in the moments after this window.
        bytes_per_element: of host memory that it reads and writes.
    """

    kind: ClassVar[str] = "host_update"
    addresses: WindowAddresses
    coefficients: Sequence[StepCoefficients]
    taken: int
    bytes_per_element: float
    bounds: Bounds

    def describe(self, memory: HostJob) -> object:
        window = UpdateWindow.from_buffer_copy(self.addresses.window)
        steps, late = put_numbers(window, self.coefficients, step=self.taken)
        scales = (LateScale * len(late))(*late)
        memory.kind = UPDATE
        memory.window, memory.steps = ctypes.pointer(window), steps
        memory.late, memory.late_count = scales, len(late)
        return self.addresses, self.coefficients, window, steps, late, scales

    def touched_bytes(self, task: int, record: Record) -> int:
        return round(self.bytes_per_element * (self.bounds[task + 1] - self.bounds[task]))


@dataclass(slots=True, weakref_slot=True)
class HostState:
    """State and upload buffers of the deferred slices, gradient buffers, and the update window, in one arena.

    Attributes:
        form: how the state is stored. The upload buffer that was handed out last completes split masters.
        store: where the state is: in the arena, too, or in a file.
        taken: gradients in the moments so far.
        open: gradients of the update window, oldest first; a missing gradient has none.
        flushed: windows that were flushed and not applied yet, oldest first.
        applied: the copy of the last upload. Its buffer is written again only after that copy, which the copies of
            gradients do not guarantee if the upload came late.
        applied_job: the job behind it, which may still run where a stream waits for it instead of the training thread.
        applied_upload: the upload buffer with the values that the weight has, if the weight is in host memory.
        upload_writer: the job that wrote it last; None: no job has.
        reads: of upload buffers from files, for copies, the last one and those that have not succeeded.
        exchanges: jobs that swap rows with the device, the last one and those that have not succeeded.
        last_job: the job made last for this state, of a window or an exchange. The next one goes behind it.
        flags: counters for streams that wait for jobs, and the index of this parameter's; None without any.
        in_place: the gradient buffers as upload buffers.
        ranges: the elements of each task of a job.
        touched: ``touched_bytes`` by number of gradients.
        readers: the job that may still read each gradient buffer, or write its upload there.
        uploading: the copy of that upload to the device, as soon as it is queued.
        indices: of the gradient buffers of optimizer steps, which repeat after so many steps.
        sharers: for each gradient buffer, the buffers of other parameters that have some of its memory, in other steps.
    """

    plan: ParamPlan
    form: StateForm
    store: StateStore
    gradients: list[Tensor]
    uploads: list[UploadBuffer]
    in_place: list[UploadBuffer]
    kernel: HostKernel
    pool: ctypes.c_void_p
    workers: int = 1
    taken: int = 0
    open: list[GradientBuffer] = field(default_factory=list)
    flushed: list[FlushedWindow] = field(default_factory=list)
    applied: Ticket | None = None
    applied_job: Job | None = None
    applied_upload: UploadBuffer | None = None
    upload_writer: Job | None = None
    reads: list[Job] = field(default_factory=list)
    exchanges: list[Job] = field(default_factory=list)
    last_job: Job | None = None
    flags: tuple[HostFlags, int] | None = None
    _flags_given: int = 0
    touched: dict[int, float] = field(default_factory=dict)
    _addresses: dict[tuple[int, ...], WindowAddresses] = field(default_factory=dict)  # by upload and gradient buffers
    _bounds: Bounds | None = None
    readers: list[Job | None] = field(default_factory=list)
    uploading: list[Ticket | None] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    sharers: list[list[tuple[weakref.ref[HostState], int]]] = field(default_factory=list)
    _next_upload: int = 0
    ranges: list[slice] = field(default_factory=list)

    @classmethod
    def allocate(
        cls,
        plan: ParamPlan,
        arena: HostArena,
        kernel: HostKernel,
        pool: ctypes.c_void_p,
        workers: int = 1,
        file: StateStore | None = None,
        gradients: list[Tensor] | None = None,
        uploads: Sequence[UploadBuffer] = (),
    ) -> HostState:
        """Carve the parameter's host memory, all zero, out of ``arena``: ``arena_bytes`` of it."""
        assert (file is not None) == plan.in_file
        assert (gradients is not None) == (plan.pool is not None)
        assert bool(uploads) == plan.weight_in_file
        buffers = plan.gradient_buffers
        if gradients is None:
            gradients = [arena.take(buffers.shape, buffers.dtype) for _ in range(buffers.count)]
        block = (plan.deferred, plan.length)
        form = StateForm.of_deferred(plan)
        unit = CUT_ELEMENTS if form.plain and not plan.compressed else plan.length  # others are cut between slices
        store = file or InMemory(State(arena.take(*each) for each in form.tensors(plan.deferred)))
        return cls(
            plan=plan,
            form=form,
            store=store,
            gradients=gradients,
            uploads=list(uploads) or [InMemory(arena.take(block, plan.dtype)) for _ in range(plan.upload_buffers)],
            in_place=[InMemory(gradient) for gradient in gradients],
            kernel=kernel,
            pool=pool,
            workers=workers,
            readers=[None] * buffers.count,
            uploading=[None] * buffers.count,
            indices=[buffers.index(step) for step in range(plan.interval * buffers.count)],
            sharers=[[] for _ in gradients],
            ranges=task_ranges(plan.deferred * plan.length, workers, unit),
        )

    @staticmethod
    def arena_bytes(plan: ParamPlan) -> int:
        """Bytes that ``allocate`` takes: ``plan.host_bytes`` and the alignment of each tensor."""
        block = (plan.deferred, plan.length)
        buffers = plan.gradient_buffers
        gradients = [(buffers.shape, buffers.dtype)] * (buffers.count if plan.pool is None else 0)
        state = [] if plan.in_file else StateForm.of_deferred(plan).tensors(plan.deferred)
        uploads = [] if plan.weight_in_file else [(block, plan.dtype)] * plan.upload_buffers
        return carved_bytes([*state, *gradients, *uploads])

    def touch(self, worker: int) -> None:
        """Make the pages that worker ``worker`` will serve resident, near the calling thread's core."""
        elements = self.plan.deferred * self.plan.length
        state = () if self.plan.in_file else self.state()
        uploads = () if self.plan.weight_in_file else [upload.content() for upload in self.uploads]
        for number, part in enumerate(self.ranges):
            # Each worker gets about as many tasks, all adjacent: as ``shares`` in native/pool.h.
            if number * self.workers // len(self.ranges) == worker:
                for tensor in (*state, *self.gradients, *uploads):
                    size = tensor.numel()  # a compressed gradient has another number of elements
                    touch_pages(tensor.view(-1)[part.start * size // elements : part.stop * size // elements])

    # The update window.

    def users_of(self, index: int) -> tuple[Users, list[FlushedWindow]]:
        """What uses the memory of a gradient buffer, before a gradient is copied there.

        Returns:
            Jobs and copies that the copy must wait for, and updates that lie there and must leave first: no copy to the
            device has been queued, because no forward since the flush has read the parameter.

        Raises:
            RuntimeError: a gradient of an open update window lies there.
        """
        users, updates = Users([], []), list[FlushedWindow]()
        places = [(self, index)]
        for sharer, other in self.sharers[index]:
            if (living := sharer()) is not None:
                places.append((living, other))
        for host, number in places:
            for buffer in host.open:
                if buffer.index == number:
                    raise RuntimeError(
                        f"a gradient would be written over one of {host.plan.name} that waits in an update window; "
                        "this is an error of zenflow-compile: please report it, and pass update_interval=1 meanwhile"
                    )
            job, copy = host.readers[number], host.uploading[number]
            if copy is not None:  # it waits for the job
                if not (copy.completed or copy.done()):
                    users.copies.append(copy)
            elif update := [window for window in host.flushed if window.buffer == number]:
                updates += update
            elif job is not None:
                if job.succeeded:
                    host.readers[number] = None
                else:
                    users.jobs.append(job)
        return users, updates

    def free_buffer(self, step: int) -> tuple[int, Tensor]:
        """The gradient buffer of optimizer step ``step``, see ``GradientBuffers``; waits until it is free."""
        index = self.indices[step % len(self.indices)]
        users, updates = self.users_of(index)
        for update in updates:
            update.leave_buffer()
        for job in users.jobs:
            job.wait()
        for copy in users.copies:
            copy.wait()
        return index, self.gradients[index]

    def flush_window(self, *, at: int, deadline: int) -> FlushedWindow:
        """Flush the update window, which must hold a gradient, in step ``at``, from 0. The job is not submitted yet."""
        buffers, self.open = self.open, []
        self.taken += len(buffers)
        place = buffers[-1].index if self.plan.in_place else None
        # Before the next upload buffer is handed out.
        weights = self.newest_upload.content() if self.form.split else None
        upload = self.next_upload() if place is None else self.in_place[place]
        copies = [buffer.copied for buffer in buffers]
        inputs = [copy for copy in copies if not (copy.completed or copy.done())]
        for scale in {buffer.coefficients.grad_scale for buffer in buffers}:
            # Of a late number, for which a worker must not wait in the middle of a job.
            inputs += [copy for copy in scale.copies if not copy.done()]
        if (applied := self.applied) is not None and not (applied.completed or applied.done()):
            # That copy may still read the upload buffer, which the job writes.
            inputs.append(applied)
        deadline, needs = self.prepare(step=at, deadline=deadline)
        if self.plan.weight_in_file:
            needs = needs.and_of(upload.prepare(step=at, deadline=deadline, fresh=True))
        coefficients = [buffer.coefficients for buffer in buffers]
        if self._bounds is None:
            self._bounds = bounds_of(self.ranges)
        if (touched := self.touched.get(len(buffers))) is None:
            touched = self.touched[len(buffers)] = touched_bytes(self.plan, len(buffers))
        addresses = self._addresses_of(buffers, weights, upload.content())
        update = UpdateWork(addresses, coefficients, self.taken, touched, self._bounds)
        job = Job(
            update, inputs, needs.after, self.pool, behind=needs.behind,
            deadline=deadline, step=at, param=self.plan.name, flag=None if self.flags is None else self.next_flag(),
        )  # fmt: skip
        for buffer in buffers:
            # From here on ``jobs`` has it, so that an interrupted step can withdraw it.
            self.readers[buffer.index], self.uploading[buffer.index] = job, None
        window = FlushedWindow(job, upload, at, visible_at=at + 1 + self.plan.staleness, buffer=place)
        self.flushed.append(window)
        self.last_job = job
        if self.plan.weight_in_file:
            upload.used_by(job)
        self.store.used_by(job)
        return window

    def prepare(self, *, step: int, deadline: int) -> tuple[int, Waits]:
        """Bring the state into memory for the next job on it. Returns its deadline, and the jobs that it waits for."""
        # The job before may still run, with staleness or where a stream waits for it: it goes first, both in the queue
        # and in fact.
        before = self.last_job
        after: tuple[Job, ...] = ()
        if before is not None and not before.succeeded:  # also behind one that has failed: it fails, too
            deadline, after = max(deadline, before.deadline), (before,)
        needs = self.store.prepare(step=step, deadline=deadline)
        return deadline, Waits((*after, *needs.after), needs.behind)

    def _addresses_of(
        self, buffers: Sequence[GradientBuffer], weights: Tensor | None, upload: Tensor
    ) -> WindowAddresses:
        of_weights = 0 if weights is None else weights.data_ptr()
        places = (of_weights, upload.data_ptr(), *[buffer.index for buffer in buffers])
        if (addresses := self._addresses.get(places)) is None:
            gradients = [self.gradients[buffer.index] for buffer in buffers]
            coefficients = [buffer.coefficients for buffer in buffers]
            blocks = [block.view(-1) for block in (*self.state(), upload)]
            flat = gradients if self.plan.compressed else [each.view(-1) for each in gradients]
            source = None if weights is None else weights.view(-1)
            owner = WindowUpdate(blocks[:-1], blocks[-1], flat, coefficients, self.taken, self.form, source)
            addresses = WindowAddresses(self.kernel.window(owner), owner)
            if not self.plan.in_file:  # else the state is elsewhere the next time
                self._addresses[places] = addresses
        return addresses

    def next_flag(self) -> Flag | None:
        """The flag of the next job, which must go behind all others of this state: all raise one counter, in turn."""
        if self.flags is None:
            return None
        self._flags_given += 1
        return Flag(*self.flags, self._flags_given)

    def add_exchange(self, job: Job, *, last: bool) -> None:
        """Keep a job that swaps rows with the device, not submitted yet. ``last``: of a re-selection."""
        failed_or_running = [each for each in self.exchanges if not each.succeeded]
        self.exchanges, self.last_job = [*failed_or_running, job], job
        self.store.used_by(job, last=last)

    def copied_by(self, upload: UploadBuffer, copy: Ticket, job: Job | None) -> None:
        """Keep an upload buffer until ``copy``, which reads it behind ``job``, has ended.

        A stream goes on if that job fails, and uses what was there.
        """
        upload.read_by(copy)
        if job is not None:
            self.reads = [*(each for each in self.reads if not each.succeeded), job]

    def next_upload(self) -> UploadBuffer:
        """The next upload buffer (round robin); its previous upload has been applied."""
        index, self._next_upload = self._next_upload, (self._next_upload + 1) % len(self.uploads)
        return self.uploads[index]

    def upload_to_load(self) -> UploadBuffer:
        """An upload buffer for an update of a state that is loaded."""
        if not self.plan.in_place:
            return self.next_upload()
        # The gradient buffer that it was in is not known, and the update is applied within a step.
        shape = (self.plan.deferred, self.plan.length)
        return InMemory(torch.empty(shape, dtype=self.plan.dtype, device="cpu"))

    def free_upload(self) -> UploadBuffer | None:
        """An upload buffer in which no update is on its way; None if there is one in each."""
        count, last = len(self.uploads), self._next_upload
        in_turn = [self.uploads[(last + count - back) % count] for back in range(1, count + 1)]
        busy = [window.upload for window in self.flushed]
        return next((upload for upload in in_turn if all(upload is not each for each in busy)), None)

    def note_applied(self, window: FlushedWindow) -> None:
        """Note that the weight, which is in host memory, has the values of an update window from here on."""
        self.applied_upload, self.upload_writer = window.upload, window.job

    # State.

    @property
    def newest_upload(self) -> UploadBuffer:
        """The upload buffer that was handed out last, which completes split masters."""
        return self.uploads[self._next_upload - 1]

    def state(self) -> State:
        return self.store.content()

    @contextmanager
    def acquire(self, *, write: bool = False, fresh: bool = False) -> Iterator[StateRows]:
        """The state in fp32; see :meth:`Store.acquire`."""
        if write and self.form.split and self.applied is not None:
            self.applied.settle()  # it may still read the weights that complete masters, and are written with them
        with self.store.acquire(write=write, fresh=fresh) as stored:
            yield StateRows(self.form, stored, self.newest_upload.content() if self.form.split else None)

    @property
    def jobs(self) -> list[Job]:
        """Jobs that may still use this memory."""
        windows = (window.job for window in self.flushed)
        users = (*self.readers, *windows, self.applied_job, self.upload_writer, *self.exchanges)
        return [job for job in users if job is not None]

    def drop_window(self) -> None:
        """Empty the update window; its buffers are free as soon as the copies into them are over."""
        for buffer in self.open:
            buffer.copied.settle()
        self.open = []

    def clear_windows(self) -> None:
        """Forget the update window and flushed windows, once no thread reads or writes their memory.

        Jobs that were never queued must have been withdrawn.
        """
        for job in (*self.jobs, *self.reads):
            # Not ``wait``: a job that has failed is done while its other tasks may still run.
            job.settle()
        if self.applied is not None:
            self.applied.settle()
        self.drop_window()
        self.flushed = []
        self._forget_work()
        for upload in self.uploads:
            if upload is not self.applied_upload:
                upload.forget()

    def forget_ended(self) -> None:
        """Forget jobs and copies, which refer to device memory. All of them have ended without a failure."""
        for job in (*self.jobs, *self.reads):
            job.settle()  # a job that is done may have tasks that still look at their memory
        self._forget_work()
        self._addresses.clear()  # they keep the numbers of the first window that had each

    def _forget_work(self) -> None:
        self.exchanges, self.applied_job, self.last_job, self.upload_writer = [], None, None, None
        self.reads, self.applied = [], None  # a copy that failed would fail the next job
        self.readers, self.uploading = [None] * len(self.gradients), [None] * len(self.gradients)

    def wait(self) -> None:
        """Wait until no job writes this state.

        Raises:
            RuntimeError: a job failed.
        """
        if self.applied_job is not None:
            self.applied_job.wait()
        for job in (*self.exchanges, *(window.job for window in self.flushed), *self.reads):
            job.wait()

    def wait_for_copies(self) -> None:
        """Wait until the gradients of the update window are in host memory; raises if a copy failed."""
        for buffer in self.open:
            buffer.copied.wait()

    @property
    def applied_failure(self) -> BaseException | None:
        """The error of a failed job whose result the device has used, or is going to use."""
        jobs = (self.applied_job, *self.exchanges, *self.reads)
        return next((error for job in jobs if job is not None and (error := job.error) is not None), None)

    def raise_failures(self) -> None:
        """Raise the error of a job, a copy or a file, if one has failed by now; does not wait."""
        in_flight: list[Job | Ticket] = [window.job for window in self.flushed]
        for work in (*in_flight, *(buffer.copied for buffer in self.open)):
            if work.error is not None:
                work.wait()
        for error in (self.store.error, *(upload.error for upload in self.uploads)):
            if error is not None:
                raise RuntimeError(str(error)) from error.__cause__
