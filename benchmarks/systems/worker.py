"""A process that trains one system and answers its parent's requests, one JSON line each.

    python -m benchmarks.systems.worker '{"system": "zenflow", "model": "tiny", ...}' WARM_UP_STEPS

The first line it writes, ``ready``, follows its warm-up steps: compilation, first windows, first selection. Requests::

    {"command": "run", "settle": n, "steps": n}    Trainer.run
    {"command": "profile", "steps": n}             Trainer.profile
    {"command": "facts"}                           Trainer.facts
    {"command": "close"}                           as does the end of standard input

Errors are answered as ``{"error": ..., "kind": ...}``. Runs in the project's environment or in DeepSpeed's, so it
imports PyTorch alone before it knows which.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from itertools import count, pairwise
from typing import Any, TextIO

import torch

from benchmarks.common import versions
from benchmarks.systems.case import DEEPSPEED, Case
from benchmarks.systems.local import System, make_local
from benchmarks.systems.workloads import DTYPES


class Trainer:
    """One system, its data, and the number of steps it has made."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.seed)
        torch.set_num_threads(case.threads)
        self.case = case
        rank = int(os.environ.get("RANK", 0))
        self.device = torch.device(case.device)
        if case.memory_bytes is not None:
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, case.memory_bytes / total))
        workload = case.workload()
        with self.device:
            model = workload.build()
        model.to(DTYPES[case.dtype])
        self.parameters = sum(param.numel() for param in model.parameters())
        self._batches = workload.batches(case.seed + 1000 * rank, DTYPES[case.dtype], self.device)
        self._numbers = count()
        self.system: System
        if case.system in DEEPSPEED:
            from benchmarks.systems.deepspeed_system import DeepSpeed

            self.system = DeepSpeed(case, model)
        else:
            self.system = make_local(case, model)

    def run(self, settle: int, steps: int) -> dict[str, Any]:
        """Train ``settle`` steps that are not timed, then ``steps`` that are.

        The second part begins and ends with a synchronized device; asynchronous work on the host goes on, as it does
        in training, and ends within later steps.

        Returns:
            ``seconds`` for the timed part, ``ms`` of each of its steps, ``loss`` of all steps.
        """
        losses = [self._step() for _ in range(settle)]
        self._synchronize()
        begin = time.perf_counter()
        marks = [self._mark()]
        for _ in range(steps):
            losses.append(self._step())
            marks.append(self._mark())
        self._synchronize()
        seconds = time.perf_counter() - begin
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # activations' memory is another process's until the next turn
        return {
            "seconds": seconds,
            "ms": [self._between(a, b) for a, b in pairwise(marks)],
            "loss": [loss.item() for loss in losses],
        }

    def profile(self, steps: int) -> dict[str, Any]:
        """``zf.profile()`` over ``steps`` steps of one of our policies: its summary, and every step's stall in ms."""
        import zenflow_compile as zf
        from zenflow_compile.profiling.recording import intersect, length_ns, union
        from zenflow_compile.timeline import COMPUTE, STEP

        optimizer: Any = self.system.optimizer  # type: ignore[attr-defined]
        with zf.profile(optimizer) as profile:
            for _ in range(steps):
                self._step()
        (recording,) = profile.recordings()
        waits = union((e.start_ns, e.end_ns) for e in recording.events if e.lane == COMPUTE and e.kind == "wait")
        spans = sorted((e.start_ns, e.end_ns) for e in recording.events if e.lane == STEP)
        stalls = [length_ns(intersect(waits, union([span]))) / 1e6 for span in spans]
        return {"summary": dict(profile.summary()), "stall_ms": stalls}

    def facts(self) -> dict[str, Any]:
        """Facts for this system's row, as of now."""
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of this process; kilobytes on Linux
        cuda = self.device.type == "cuda"
        return {
            "parameters": self.parameters,
            "threads": torch.get_num_threads(),
            "host_peak_mib": usage // 1024,
            "device_peak_mib": torch.cuda.max_memory_allocated() // 2**20 if cuda else None,
            **self.system.facts(),
            "versions": versions(),
        }

    def _step(self) -> torch.Tensor:
        return self.system.step(self._batches[next(self._numbers) % len(self._batches)])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _between(a: Any, b: Any) -> float:
        return (b - a) * 1e3 if isinstance(a, float) else a.elapsed_time(b)


def answer_requests(replies: TextIO, case: Case, warm_up: int) -> None:
    """Build the system, say ``ready``, and serve until told to close."""

    def reply(**values: Any) -> None:
        print(json.dumps(values), file=replies, flush=True)

    try:
        begin = time.perf_counter()
        trainer = Trainer(case)
        with contextlib.closing(trainer.system):
            warm = trainer.run(0, warm_up)
            reply(ready=True, loss=warm["loss"], start_seconds=time.perf_counter() - begin)
            for request in _requests():
                command = request.pop("command")
                if command == "close":
                    break
                reply(**(getattr(trainer, command)(**request)))
    except Exception as error:  # whatever it is, the parent decides; the traceback is in this process's log
        reply(error=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", kind=_kind(error))
        raise


def _kind(error: BaseException) -> str:
    """``missing``: a package is not installed; ``memory``: out of memory; ``failure``: anything else."""
    if isinstance(error, ImportError):
        return "missing"
    return "memory" if isinstance(error, (torch.OutOfMemoryError, MemoryError)) else "failure"


def _requests() -> Iterator[dict[str, Any]]:
    return map(json.loads, sys.stdin)


def main() -> None:
    """Entry point. What libraries print to standard output goes to standard error: the pipe is for answers alone."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    case = Case.from_json(sys.argv[1])
    if case.cores:
        os.sched_setaffinity(0, case.cores)  # before any thread starts: all inherit it
    answer_requests(replies, case, warm_up=int(sys.argv[2]))


if __name__ == "__main__":  # ZenFlow's optimizer process imports this file again
    main()
