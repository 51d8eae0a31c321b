"""Measures everything that only a GPU can show, in parts of at most nine minutes, without network.

Each part runs in a process of its own and has one results file, ``benchmarks/results/gpu/PART.json``, which is written
again with every row: a run that is killed keeps what it has, and ``--missing`` goes on from there. The file has the
machine with doctor's findings, from which the simulator's predictions next to the rows are made.

Without a CUDA device it prints what it would run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import common
from benchmarks.common import ROOT, commit, machine, option_parser, write_json
from benchmarks.evidence.parts import MACHINE, PARTS, Part

_FOLDER = "gpu"
LIMIT_S = 9 * 60.0
_CHILD = (sys.executable, "-m", "benchmarks.evidence.child")
_POLL_S = 1.0
_LOG_LINES = 40
_CHANGES = ("time", "load_average_1min")  # what `machine` says that changes while the machine stays the same
# Nothing is downloaded: models are random. What asks a hub for a file by mistake fails at once.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Run:
    """How the parts of this run are measured.

    Attributes:
        folder: of the results; limit_s: seconds of a part, with doctor's measurement if the part needs it first.
        tiny: as in ``Setting``; child: the command of a part's process, which gets the part's name and paths.
    """

    device: str
    tiny: bool
    folder: Path
    limit_s: float
    child: Sequence[str]

    def path(self, part: Part) -> Path:
        """The part's results file."""
        return self.folder / f"{part.name}.json"

    def done(self, part: Part) -> bool:
        """Whether its results are complete."""
        return self._read(part).get("status") == "done"

    def measure(self, part: Part) -> str:
        """Measure one part, doctor's findings first if this machine has none; the status that its file has.

        ``done``; ``failed``: the part raised; ``timed out``: it was killed at the limit.
        """
        began = time.monotonic()
        doctor = None
        if part is not MACHINE:
            if not self._has_findings():
                self._measure(MACHINE, began, None)
            if self._has_findings():
                doctor = self._read(MACHINE)["rows"][0]
        return self._measure(part, began, doctor)

    def _read(self, part: Part) -> dict[str, Any]:
        with suppress(OSError, json.JSONDecodeError):
            results: dict[str, Any] = json.loads(self.path(part).read_text())
            return results
        return {}

    def _has_findings(self) -> bool:
        """Whether there are findings of this machine: results may have come from another one."""
        found = self._read(MACHINE)
        same = found.get("identity") == identity() and found.get("device") == self.device
        return same and found["status"] == "done" and found["tiny"] == self.tiny

    def _measure(self, part: Part, began: float, doctor: dict[str, Any] | None) -> str:
        record: dict[str, Any] = {
            "benchmark": "gpu_evidence",
            "part": part.name,
            "summary": part.summary,
            "command": command(part, self),
            "status": "running",
            "error": None,
            "limit_s": self.limit_s,
            "device": self.device,
            "tiny": self.tiny,
            "commit": commit(),
            "identity": identity(),
            "machine": {**machine(), "doctor": doctor},
        }
        with tempfile.TemporaryDirectory() as scratch:
            rows, findings, log = (Path(scratch) / name for name in ("rows", "doctor.json", "log"))
            rows.touch()
            arguments = [part.name, self.device, "tiny" if self.tiny else "full", self.folder, rows]
            if doctor is not None:
                findings.write_text(json.dumps(doctor))
                arguments.append(findings)
            with log.open("w") as output:
                process = subprocess.Popen(
                    [*self.child, *map(str, arguments)],
                    cwd=ROOT,
                    env={**os.environ, **_OFFLINE},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            try:
                self._follow(part, process, rows, record, began)
            finally:
                end(process)
            if record["status"] == "running":
                record["status"] = "failed" if process.returncode else "done"
            if record["status"] != "done":
                record["log"] = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            if record["status"] == "failed":
                record["error"] = record["log"][-1] if record["log"] else f"exit status {process.returncode}"
        write_json(self.path(part), record)
        return str(record["status"])

    def _follow(
        self, part: Part, process: subprocess.Popen[bytes], rows: Path, record: dict[str, Any], began: float
    ) -> None:
        """Write the part's file whenever there are further rows, until the process has ended or is killed."""
        written = -1
        ended = False
        while not ended:
            if time.monotonic() - began > self.limit_s and process.poll() is None:
                end(process)
                record |= {"status": "timed out", "error": f"killed after {self.limit_s:g} s"}
            ended = process.poll() is not None
            if (size := rows.stat().st_size) != written or ended:
                written = size
                record |= {"rows": _rows(rows), "seconds": round(time.monotonic() - began, 1)}
                write_json(self.path(part), record)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)


def identity() -> dict[str, Any]:
    """What tells this machine and its software from others."""
    found = {name: value for name, value in machine().items() if name not in _CHANGES}
    with suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return found


def command(part: Part, run: Run) -> str:
    """The command that measures one part, as it is typed."""
    words = ["python -m benchmarks gpu_evidence --part", part.name]
    if run.tiny:
        words += ["--device", run.device, "--tiny"]
    return " ".join(words)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with everything that it started, in any process group, and wait for it."""
    if process.poll() is not None:
        return
    _kill(psutil.Process(process.pid))
    process.wait()


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.suspend()  # so that it starts no more; orphans of a killed one are no descendants
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def _terminate(signum: int, frame: object) -> None:
    """Exit on a signal, without leaving a process."""
    # From the list of children: the signal may arrive while `Popen` starts one that nobody holds yet.
    children = psutil.Process().children()
    for child in children:
        _kill(child)
    psutil.wait_procs(children)
    sys.exit(128 + signum)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The complete lines; the process may be killed while it writes one."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def main(
    arguments: Sequence[str] | None = None, known: Mapping[str, Part] = PARTS, child: Sequence[str] = _CHILD
) -> int:
    """Entry point of ``python -m benchmarks gpu_evidence``; 1 if a part has failed or has run out of time."""
    given = _parse(arguments, known)
    folder = given.out or (Path(tempfile.mkdtemp(prefix="gpu_evidence_")) if given.tiny else common.RESULTS / _FOLDER)
    run = Run(given.device, given.tiny, folder.resolve(), given.limit, child)
    parts = [known[name] for name in given.part]
    if given.missing:
        parts = [part for part in parts if not run.done(part)]
    without = given.device == "cuda" and not torch.cuda.is_available()
    if given.list or without:
        if without:
            print("There is no CUDA device. On a machine with one these parts would run:")
        for part in parts:
            memory = "" if part.planned_gb is None else f", {part.planned_gb:.0f} GB of the device at once"
            print(f"  {part.name:28} about {part.minutes:g} min  {part.summary}{memory}\n{'':32}{command(part, run)}")
        print(f"  {len(parts)} parts, about {sum(part.minutes for part in parts):g} min")
        return 0
    statuses = []
    for part in parts:
        print(f"{part.name}: {part.summary}", flush=True)
        statuses.append(run.measure(part))
        print(f"{part.name}: {statuses[-1]}, {run.path(part)}", flush=True)
    return int(any(status != "done" for status in statuses))


def _parse(arguments: Sequence[str] | None, known: Mapping[str, Part]) -> argparse.Namespace:
    parser = option_parser("gpu_evidence", __doc__, folder=_FOLDER)
    add = parser.add_argument
    add("--part", nargs="+", choices=known, default=list(known), metavar="PART", help="(all; --list prints them)")
    add("--missing", action="store_true", help="only parts without complete results")
    add("--list", action="store_true", help="print the parts, and run none")
    add("--device", choices=("cpu", "cuda"), default="cuda", help="(%(default)s)")
    add("--tiny", action="store_true", help="a tiny model, to test the parts; into a temporary folder without --out")
    add("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of a part (%(default)g)")
    given = parser.parse_args(arguments)
    if given.device == "cpu" and not given.tiny:
        parser.error("--device cpu needs --tiny: the parts are sized for a GPU")
    if given.limit <= 0:
        parser.error(f"--limit {given.limit:g} must be above 0 seconds")
    return given


if __name__ == "__main__":
    # Python would end at once: the part's processes would stay.
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main())
