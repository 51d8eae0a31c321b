"""The simulated device: the training thread with its stream, as a program that computes, waits and queues work.

It does the same as the runtime, in the same order; docs/architecture.md describes the life of a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.planning.plan import GRADIENT_RING
from zenflow_compile.prediction.lanes import HostUpdate, Lanes, Row, Span
from zenflow_compile.prediction.transfers import FileTurns, WeightLoads
from zenflow_compile.prediction.workload import Block, Stage, Workload
from zenflow_compile.timeline import COMPUTE, SLACK, STEP, WINDOWS

_Blocked = Callable[[], bool]
_Program = Iterator[_Blocked]


def _not_blocked() -> bool:
    return False


def _is_away(job: HostUpdate) -> bool:
    return not job.here


class SimulatedDevice:
    """Runs steps of a workload in simulated time.

    Attributes:
        work: what a step does.
        weights: the loads of offloaded weights.
        machine: the lanes next to the device, and the timeline.
        step_ends: simulated time in seconds at the end of each step, by its number.
    """

    def __init__(
        self, work: Workload, hardware: Hardware, workers: int, final_at_step: bool, *, first_step: int = 0
    ) -> None:
        """``first_step``: the number of the step to begin with; see ``simulate.first_step``."""
        self.work = work
        self.weights = WeightLoads(work, first_step, self._is_final)
        files = FileTurns(work, backward=not final_at_step)
        self.machine = Lanes(hardware, workers, files, self.weights)
        self.step_ends: dict[int, float] = {}
        self._hardware = hardware
        self._final_at_step = final_at_step
        self._step = self._flushed_step = first_step - 1  # the second: all jobs up to this step are known
        self._in_ring = 0  # blocks in the ring of gradients
        self._pending_copies = [0] * len(work.blocks)  # copies of pending gradients in flight
        self._gathers = [0] * len(work.blocks)  # all-gathers of weights in flight
        self._reductions = 0  # reduce-scatters of gradients in flight
        self._arrived = 0  # subgroups whose state came in, in this step
        self._jobs: list[list[HostUpdate]] = [[] for _ in work.blocks]  # of this step
        self._due: dict[
            tuple[int, int], list[HostUpdate]
        ] = {}  # by step and block before whose forward they are applied
        self._writers: dict[tuple[int, int], list[HostUpdate]] = {}  # likewise: jobs that write weights which it loads

    @property
    def next_step(self) -> int:
        """The number of the step that runs next."""
        return self._step + 1

    def run(self, count: int) -> None:
        """Simulate ``count`` more steps. Work in flight at their end stays in flight."""
        self._drive(self._steps(count))

    def finish(self) -> None:
        """Apply the updates in flight, and run every lane until it is idle."""
        self._drive(self._synchronize())
        while self._advance():
            pass

    def _drive(self, program: _Program) -> None:
        blocked: _Blocked = _not_blocked
        while True:
            while self.machine.clock.idle(COMPUTE) and not blocked():
                following = next(program, None)
                if following is None:
                    return
                blocked = following
            running = self._advance()
            assert running, f"step {self._step} waits for work that never ends"

    def _advance(self) -> bool:
        self.machine.dispatch()
        return self.machine.clock.advance()

    def _steps(self, count: int) -> _Program:
        for _ in range(count):
            self._step = self.machine.step = self.next_step
            begin = self._now
            for left in reversed(range(self.work.micro_batches)):
                yield from self._forward()
                yield from self._backward(last=not left)
            yield from self._update()
            self._row(STEP, "step", begin)
            self.step_ends[self._step] = self._now

    def _synchronize(self) -> _Program:
        for _, jobs in sorted(self._due.items()):
            for job in jobs:
                yield partial(_is_away, job)
                self.machine.merged(job)

    def _forward(self) -> _Program:
        for position, block in enumerate(self.work.blocks):
            for job in self._due.pop((self._step, position), ()):
                yield from self._apply(job)
            yield from self._wait(partial(self._is_gathering, position), block.name)
            for stage in block.forward:
                yield from self._run_stage("forward", stage, block)
        yield from self._compute("forward", self.work.head / self.work.micro_batches)

    def _backward(self, *, last: bool) -> _Program:
        """``last``: of the step's micro-batches. Its backward splits the gradients, and sends them."""
        if last:
            self._arrived = 0
            for group in self.work.subgroups:
                self.machine.stream_in(group, self._step, self._state_arrived)
        yield from self._compute("backward", self.work.backward_head / self.work.micro_batches)
        for position in reversed(range(len(self.work.blocks))):
            block = self.work.blocks[position]
            down = sum(part.down for part in block.parts)
            if last:
                yield from self._wait(partial(self._has_no_buffer, position, down), block.name)
            *before, final = block.backward
            for stage in before:
                yield from self._run_stage("backward", stage, block)
            yield from self._run_stage("backward", final, block, split=block.split if last else 0.0)
            if last:
                self._produced(position, down)

    def _run_stage(self, kind: str, stage: Stage, block: Block, *, split: float = 0.0) -> _Program:
        if (load := stage.load) is not None:
            yield from self._wait(self._is_not_loaded, load.name)
            self.weights.use()
            yield from self._compute("merge", load.merge, load.name)
        yield from self._compute(kind, stage.seconds / self.work.micro_batches + split, block.name)
        self.weights.release(stage.freed)

    def _produced(self, position: int, down: int) -> None:
        """Send a block's new gradient to other devices and to the host, and make jobs of the flushed update windows."""
        block, step = self.work.blocks[position], self._step
        windows = ((part, part.flushes[step % self.work.cycle]) for part in block.parts)
        jobs = [HostUpdate(step, position, block.name, part, window) for part, window in windows if window is not None]
        self._jobs[position] = jobs
        for job in jobs:
            job.copies = bool(job.part.down)
        self._in_ring += bool(down)
        self._reductions += 1

        def copied() -> None:
            self._in_ring -= 1
            for job in jobs:
                if job.part.down:
                    self._copied(job)

        def reduced() -> None:
            self._reductions -= 1
            if down:
                self.machine.copy_down("copy", down, step, block.name, copied)
            if not self._final_at_step:
                self._finalize(position)

        across = partial(self.machine.exchange_across, block.across, step, block.name, reduced)
        self.machine.exchange(block.gradient, step, block.name, across)

    def _finalize(self, position: int) -> None:
        """The block's gradient is final: copy its pending part to the host, and queue the jobs that are ready."""
        block, step = self.work.blocks[position], self._step
        for job in self._jobs[position]:
            job.final = self._now
        for part in block.parts:
            if size := part.pending[step % self.work.cycle]:
                flushed = next((job for job in self._jobs[position] if job.part is part), None)
                self._copy_pending(position, size, flushed)
        for job in self._jobs[position]:
            self._submit_if_ready(job)

    def _copy_pending(self, position: int, size: int, job: HostUpdate | None) -> None:
        self._pending_copies[position] += 1
        if job is not None:
            job.copies += 1

        def copied() -> None:
            self._pending_copies[position] -= 1
            if job is not None:
                self._copied(job)

        self.machine.copy_down("copy", size, self._step, self.work.blocks[position].name, copied)

    def _copied(self, job: HostUpdate) -> None:
        job.copies -= 1
        self._submit_if_ready(job)

    def _submit_if_ready(self, job: HostUpdate) -> None:
        if job.final is not None and not job.copies:
            self.machine.submit(job)

    def _update(self) -> _Program:
        yield from self._wait(lambda: self._reductions > 0, "")
        if self._final_at_step:
            for position in range(len(self.work.blocks)):
                self._finalize(position)
        blocking = self._queue_uploads()
        for number, group in enumerate(self.work.subgroups):
            yield from self._wait(partial(self._is_coming_in, number), group.name)
            yield from self._compute("update", group.update, group.name)
            self.machine.stream_out(group, self._step)
        yield from self._compute("update", self.work.update)
        for rewrite in self.work.rewrites:
            yield from self._wait(self._is_not_loaded, rewrite.load.name)
            self.weights.use()
            yield from self._compute("merge", rewrite.load.merge, rewrite.load.name)
            yield from self._compute("update", rewrite.update, rewrite.load.name)
            self.machine.write_back(rewrite.load, self._step)
        for position, block in enumerate(self.work.blocks):
            self._gathers[position] += 1
            self.machine.exchange(block.gathered, self._step, block.name, partial(self._gathered, position))
        for job in blocking:
            yield from self._apply(job)

    def _queue_uploads(self) -> list[HostUpdate]:
        """Queue the uploads of this step's jobs; returns the jobs that the step itself waits for, in forward order."""
        blocking = []
        for read in [key for key in self._writers if key[0] <= self._step]:
            del self._writers[read]
        self._flushed_step = self._step
        for position, jobs in enumerate(self._jobs):
            for job in jobs:
                for name in job.window.params:
                    self._row(WINDOWS, "flush", self._now, name)
                needed = job.step + 1 + (0 if job.part.blocking else job.part.staleness)
                self._writers.setdefault((needed, position), []).append(job)
                if job.part.blocking:
                    blocking.append(job)
                    self.machine.queue_upload(job, job.step)
                    continue
                self._due.setdefault((needed, position), []).append(job)
                self.machine.queue_upload(job, needed)
        return blocking

    def _apply(self, job: HostUpdate) -> _Program:
        """Wait for the job's new weights and merge them."""
        assert job.final is not None
        self._row(SLACK, "slack", job.final, job.name, step=job.step)
        yield from self._wait(partial(_is_away, job), job.name)
        seconds = 2 * job.window.upload * self._hardware.devices / self._hardware.device_bandwidth
        yield from self._compute("merge", seconds, job.name)
        self.machine.merged(job)

    def _compute(self, kind: str, seconds: float, name: str = "") -> _Program:
        if seconds:
            begin = self._now
            cores = self._hardware.device_cores or 0
            # Only a device that is the host's processor uses host memory; forward and backward mostly hit its caches.
            host_rate = self._hardware.device_bandwidth if cores and kind in ("update", "merge") else 0.0
            self.machine.clock.start(COMPUTE, Span(seconds, host_rate, lambda: None, cores=cores))
            yield _not_blocked
            self._row(COMPUTE, kind, begin, name)

    def _wait(self, blocked: _Blocked, name: str) -> _Program:
        if blocked():
            begin = self._now
            yield blocked
            if self._now > begin:
                self._row(COMPUTE, "wait", begin, name)

    def _row(self, lane: str, kind: str, begin: float, name: str = "", *, step: int | None = None) -> None:
        step = self._step if step is None else step
        self.machine.rows.append(Row(lane, kind, begin, self._now, step, name, 0))

    def _is_not_loaded(self) -> bool:
        return self.weights.is_missing

    def _is_final(self, step: int, position: int) -> bool:
        """Whether the host has the weights that a block's first forward in ``step`` reads."""
        return step <= self._flushed_step + 1 and all(job.updated for job in self._writers.get((step, position), ()))

    def _is_gathering(self, position: int) -> bool:
        return self._gathers[position] > 0

    def _has_no_buffer(self, position: int, down: int) -> bool:
        """Whether the ring is full, or the block's previous pending gradient is still being copied."""
        return self._pending_copies[position] > 0 or (down > 0 and self._in_ring >= GRADIENT_RING)

    def _is_coming_in(self, number: int) -> bool:
        return self._arrived <= number

    def _state_arrived(self) -> None:
        self._arrived += 1

    def _gathered(self, position: int) -> None:
        self._gathers[position] -= 1

    @property
    def _now(self) -> float:
        return self.machine.clock.now
