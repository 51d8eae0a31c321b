"""Controls a child process that works in turns and is frozen in between."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.common import ROOT
from benchmarks.systems.case import DEEPSPEED, Case
from benchmarks.systems.local import rank_environment

DEEPSPEED_PYTHON = ROOT / ".venv-deepspeed" / "bin" / "python"
_CLOSE_SECONDS = 30.0


class WorkerError(RuntimeError):
    """A request to a worker process failed; ``kind`` as in ``worker._kind``, or ``died``."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def _hear_the_hangup() -> None:
    """Restore SIGHUP: under nohup children ignore it, too, and would outlive their parent."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class _Closing(ABC):
    """A context manager that closes itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Leave nothing running."""


class Worker(_Closing):
    """A process in its own process group that answers JSON lines; a context manager that leaves nothing running.

    Between requests the whole group is stopped (SIGSTOP), so that spinning threads and unfinished host work
    take no cores from other systems, and unfinished work counts in a later turn of the same system. If the
    parent dies, the kernel wakes and hangs up the group, because it shares the parent's session.
    """

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        """Start ``command`` in the repository's root; ``environment`` is added to this process's own."""
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed by close()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,
            preexec_fn=_hear_the_hangup,
        )

    def first_answer(self) -> dict[str, Any]:
        """Wait until the process is ready, and return its message; it is stopped from then on.

        Raises:
            WorkerError: it failed before.
        """
        answer = self.hear()
        self.stop()
        return answer

    def ask(self, command: str, **values: Any) -> dict[str, Any]:
        """Wake the process, have it do ``command``, stop it again.

        Raises:
            WorkerError: it failed; it cannot be asked again.
        """
        self.tell(command, **values)
        answer = self.hear()
        self.stop()
        return answer

    def tell(self, command: str, **values: Any) -> None:
        """Wake the process, and have it begin ``command``; ``hear`` and ``stop`` follow."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died: ``_receive`` says why
            self._process.stdin.write(json.dumps({"command": command, **values}) + "\n")
            self._process.stdin.flush()

    def idle_cpu_share(self, seconds: float) -> float:
        """Cores that the process and its children keep busy while they are awake without a request."""
        self._signal(signal.SIGCONT)
        try:
            family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
            before, begin = _cpu_seconds(family), time.perf_counter()
            time.sleep(seconds)
            return (_cpu_seconds(family) - before) / (time.perf_counter() - begin)
        finally:
            self._signal(signal.SIGSTOP)

    def memory_mib(self) -> float:
        """Host memory of the process and its children; shared memory is divided among them."""
        leader = psutil.Process(self._process.pid)
        total = 0
        for process in [leader, *leader.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total / 2**20

    def kill(self) -> None:
        """End the process and its group without asking."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Ask the process to end, then kill what remains of its group."""
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            with suppress(BrokenPipeError):
                assert self._process.stdin is not None
                self._process.stdin.write('{"command": "close"}\n')
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def stop(self) -> None:
        """Stop the process until the next request."""
        self._signal(signal.SIGSTOP)

    def hear(self) -> dict[str, Any]:
        """Wait for the answer to what it was told; it stays awake.

        Raises:
            WorkerError: it failed; it cannot be asked again.
        """
        assert self._process.stdout is not None
        # Asked again and again, because a child that outlives its parent may hold the pipe open.
        while not select.select([self._process.stdout], [], [], 1.0)[0] and self._process.poll() is None:
            pass
        line = self._process.stdout.readline() if select.select([self._process.stdout], [], [], 0.0)[0] else ""
        if not line:
            raise WorkerError(f"the process ended with status {self._process.wait()}; {self._log_end()}", "died")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            with suppress(subprocess.TimeoutExpired):  # it is about to write its traceback and end
                self._process.wait(_CLOSE_SECONDS)
            details = "\n" + self._log_end() if answer["kind"] == "failure" else ""
            raise WorkerError(answer["error"] + details, answer["kind"])
        return answer

    def _log_end(self) -> str:
        self._log.seek(0)
        return "its last lines:\n" + "\n".join(self._log.read().splitlines()[-12:])

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, number)


class TrainingWorker(_Closing):
    """The processes that train one case, one of each rank; a context manager as ``Worker``."""

    def __init__(self, case: Case, *, warm_up: int, deepspeed_python: Path = DEEPSPEED_PYTHON) -> None:
        """Start them; ``start()`` waits until they have made ``warm_up`` steps.

        Raises:
            WorkerError: DeepSpeed's environment is missing.
        """
        python = Path(sys.executable)
        if case.system in DEEPSPEED:
            python = must_exist(deepspeed_python)
        self.case = case
        self.losses: list[float] = []
        self.network_bytes: list[float] = []
        command: list[str | Path] = [python, "-m", "benchmarks.systems.worker", case.to_json(), str(warm_up)]
        environment = {
            "OMP_NUM_THREADS": str(case.threads),
            "MKL_NUM_THREADS": str(case.threads),
            # On the CPU, Inductor's pool of compiler processes would take cores from the training. On a GPU there are
            # cores to spare, and dozens of Triton kernels to compile.
            "TORCHINDUCTOR_COMPILE_THREADS": "1" if case.device == "cpu" else "4",
        }
        rendezvous = rank_environment(0, case.ranks) if case.ranks > 1 else {}
        self._ranks: list[Worker] = []
        try:
            for rank in range(case.ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if rendezvous else {}
                self._ranks.append(Worker(command, {**environment, **rendezvous, **own}))
        except BaseException:
            self.close()
            raise

    def start(self) -> dict[str, Any]:
        """Wait for the warm-up's end.

        Raises:
            WorkerError: the system cannot run here, or failed.
        """
        ready = self._hear()
        self.losses += ready["loss"]
        return ready

    def run(self, *, settle: int, steps: int) -> tuple[float, list[float]]:
        """Train one turn; milliseconds per step over all timed steps, and of each of them, on the first rank.

        Raises:
            WorkerError: it failed.
        """
        before = _network_bytes()
        answer = self.ask("run", settle=settle, steps=steps)
        self.network_bytes.append((_network_bytes() - before) / (settle + steps) / self.case.ranks)
        self.losses += answer["loss"]
        return answer["seconds"] * 1e3 / steps, answer["ms"]

    def ask(self, command: str, **values: Any) -> dict[str, Any]:
        """Wake all ranks, have them do ``command``, stop them again. Returns the first rank's answer.

        Raises:
            WorkerError: one failed; they cannot be asked again.
        """
        for each in self._ranks:
            each.tell(command, **values)
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        answers = [each.hear() for each in self._ranks]
        for each in self._ranks:  # only now: a rank that is stopped sends nothing to the others
            each.stop()
        return answers[0]

    def idle_cpu_share(self, seconds: float) -> float:
        """Cores that the first rank keeps busy while it is awake without a request."""
        return self._ranks[0].idle_cpu_share(seconds)

    def memory_mib(self) -> float:
        """Host memory of all ranks and their children."""
        return sum(each.memory_mib() for each in self._ranks)

    def close(self) -> None:
        """End all ranks; with several, at once: those that are left would wait for each other."""
        for each in self._ranks:
            if self.case.ranks > 1:
                each.kill()
            each.close()


def _network_bytes() -> int:
    """Bytes that this machine's processes have sent to each other through the network so far."""
    return sum(counters.bytes_sent for counters in psutil.net_io_counters(pernic=True).values())


def must_exist(python: Path) -> Path:
    """``python``, if it is there.

    Raises:
        WorkerError: it is not.
    """
    if not python.exists():
        message = f"DeepSpeed's environment is missing ({python}); make it with scripts/setup_deepspeed.sh"
        raise WorkerError(message, "missing")
    return python


def _cpu_seconds(family: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in family:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
