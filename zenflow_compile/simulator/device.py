"""The simulated device: the training thread with its stream, as a program that computes, waits and hands work on.

It does what the runtime does, in its order; see "From the user's line to the last byte" in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.workload import Workload
from zenflow_compile.planning.plan import GRADIENT_RING
from zenflow_compile.simulator.clock import Span
from zenflow_compile.simulator.machine import Job, Machine, Row
from zenflow_compile.simulator.nvme_cache import StateFiles
from zenflow_compile.timeline.events import COMPUTE, SLACK, STEP, WINDOWS

_Blocked = Callable[[], bool]
_Program = Iterator[_Blocked]


def _not_blocked() -> bool:
    return False


def _is_away(job: Job) -> bool:
    return not job.here


class Device:
    """Runs steps of a workload in simulated time.

    Attributes:
        machine: everything beside the device, and the timeline.
        step_ends: seconds, of each step since the first.
    """

    def __init__(
        self, work: Workload, hardware: Hardware, workers: int, final_at_step: bool, *, first_step: int = 0
    ) -> None:
        """``first_step``: the number of the step that it begins with; state in files begins with a whole cycle."""
        self.machine = Machine(hardware, workers, StateFiles(work))
        self.step_ends: list[float] = []
        self._work = work
        self._hardware = hardware
        self._final_at_step = final_at_step
        self._step = first_step
        self._in_ring = 0  # blocks in the ring of gradients
        self._held = [0] * len(work.blocks)  # copies of held gradients that are under way
        self._ungathered = [0] * len(work.blocks)  # weights that are still with the peers
        self._unreduced = 0  # gradients that are still with the peers
        self._arrived = 0  # subgroups whose state came in, in this step
        self._jobs: list[list[Job]] = [[] for _ in work.blocks]  # of this step
        self._due: dict[tuple[int, int], list[Job]] = {}  # by step and block: what lands in front of its forward

    def run(self, steps: Iterable[int]) -> None:
        """Simulate ``steps``, numbers that follow each other, and what is under way at their end."""
        program = self._program(steps)
        blocked: _Blocked | None = _not_blocked
        while True:
            while blocked is not None and self.machine.clock.idle(COMPUTE) and not blocked():
                blocked = next(program, None)
            self.machine.dispatch()
            if not self.machine.clock.advance():
                break
        assert blocked is None, f"step {self._step} waits for something that never comes"

    def _program(self, steps: Iterable[int]) -> _Program:
        for self._step in steps:
            self.machine.step = self._step
            begin = self._now
            yield from self._forward()
            yield from self._backward()
            yield from self._update()
            self._row(STEP, "step", begin)
            self.step_ends.append(self._now)
        for _, jobs in sorted(self._due.items()):  # what synchronize() would land
            for job in jobs:
                yield partial(_is_away, job)
                self.machine.merged()

    def _forward(self) -> _Program:
        for position, block in enumerate(self._work.blocks):
            for job in self._due.pop((self._step, position), ()):
                yield from self._land(job)
            yield from self._wait(partial(self._is_gathering, position), block.name)
            yield from self._compute("forward", block.forward, block.name)
        yield from self._compute("forward", self._work.head)

    def _backward(self) -> _Program:
        self._arrived = 0
        for group in self._work.subgroups:
            self.machine.stream_in(group, self._step, self._state_arrived)
        yield from self._compute("backward", self._work.backward_head)
        for position in reversed(range(len(self._work.blocks))):
            block = self._work.blocks[position]
            down = sum(part.down for part in block.parts)
            yield from self._wait(partial(self._has_no_place, position, down), block.name)
            yield from self._compute("backward", block.backward, block.name)
            self._produced(position, down)

    def _produced(self, position: int, down: int) -> None:
        """A block's gradient exists: to the peers, down to the host, and on to the jobs of what closes."""
        block, step = self._work.blocks[position], self._step
        closes = ((part, part.closes[step % self._work.cycle]) for part in block.parts)
        jobs = [Job(step, position, block.name, part, close) for part, close in closes if close is not None]
        self._jobs[position] = jobs
        for job in jobs:
            job.copies = bool(job.part.down)
        self._in_ring += bool(down)
        self._unreduced += 1

        def copied() -> None:
            self._in_ring -= 1
            for job in jobs:
                if job.part.down:
                    self._copied(job)

        def reduced() -> None:
            self._unreduced -= 1
            if down:
                self.machine.copy_down("copy", down, step, block.name, copied)
            if not self._final_at_step:
                self._finalize(position)

        self.machine.exchange(block.gradient, step, block.name, reduced)

    def _finalize(self, position: int) -> None:
        """The block's gradient is known to be this step's: what was held for that goes down, what closes goes on."""
        block, step = self._work.blocks[position], self._step
        for job in self._jobs[position]:
            job.final = self._now
        for part in block.parts:
            if size := part.held[step % self._work.cycle]:
                closing = next((job for job in self._jobs[position] if job.part is part), None)
                self._copy_held(position, size, closing)
        for job in self._jobs[position]:
            self._submit_if_ready(job)

    def _copy_held(self, position: int, size: int, job: Job | None) -> None:
        self._held[position] += 1
        if job is not None:
            job.copies += 1

        def copied() -> None:
            self._held[position] -= 1
            if job is not None:
                self._copied(job)

        self.machine.copy_down("copy", size, self._step, self._work.blocks[position].name, copied)

    def _copied(self, job: Job) -> None:
        job.copies -= 1
        self._submit_if_ready(job)

    def _submit_if_ready(self, job: Job) -> None:
        if job.final is not None and not job.copies:
            self.machine.submit(job)

    def _update(self) -> _Program:
        yield from self._wait(lambda: self._unreduced > 0, "")
        if self._final_at_step:
            for position in range(len(self._work.blocks)):
                self._finalize(position)
        blocking = self._queue_uploads()
        for number, group in enumerate(self._work.subgroups):
            yield from self._wait(partial(self._is_coming_in, number), group.name)
            yield from self._compute("update", group.update, group.name)
            self.machine.stream_out(group, self._step)
        yield from self._compute("update", self._work.update)
        for position, block in enumerate(self._work.blocks):
            self._ungathered[position] += 1
            self.machine.exchange(block.gathered, self._step, block.name, partial(self._gathered, position))
        for job in blocking:
            yield from self._land(job)

    def _queue_uploads(self) -> list[Job]:
        """Returns the jobs that this step itself waits for, in forward order."""
        blocking = []
        for position, jobs in enumerate(self._jobs):
            for job in jobs:
                for name in job.close.params:
                    self._row(WINDOWS, "flush", self._now, name)
                if job.part.blocking:
                    blocking.append(job)
                    self.machine.queue_upload(job, job.step)
                    continue
                landing = job.step + 1 + job.part.staleness
                self._due.setdefault((landing, position), []).append(job)
                self.machine.queue_upload(job, landing)
        return blocking

    def _land(self, job: Job) -> _Program:
        """The weights are needed: wait for them and merge them."""
        assert job.final is not None
        self._row(SLACK, "slack", job.final, job.name, step=job.step)
        yield from self._wait(partial(_is_away, job), job.name)
        seconds = 2 * job.close.upload * self._hardware.devices / self._hardware.device_bandwidth
        yield from self._compute("merge", seconds, job.name)
        self.machine.merged()

    def _compute(self, kind: str, seconds: float, name: str = "") -> _Program:
        if seconds:
            begin = self._now
            cores = self._hardware.device_cores or 0
            # A device of its own has memory of its own. Forward and backward work mostly in caches.
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

    def _is_gathering(self, position: int) -> bool:
        return self._ungathered[position] > 0

    def _has_no_place(self, position: int, down: int) -> bool:
        """Nowhere to put a block's gradient: the ring is full, or the one held before it is still being copied."""
        return self._held[position] > 0 or (down > 0 and self._in_ring >= GRADIENT_RING)

    def _is_coming_in(self, number: int) -> bool:
        return self._arrived <= number

    def _state_arrived(self) -> None:
        self._arrived += 1

    def _gathered(self, position: int) -> None:
        self._ungathered[position] -= 1

    @property
    def _now(self) -> float:
        return self.machine.clock.now
