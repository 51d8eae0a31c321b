"""Which tests reach which mutants: one run of a tier's tests in an instrumented checkout."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.mutants import reached
from scripts.mutants.outcomes import PATH as PATH_OF_OUTCOMES
from scripts.mutants.patches import ROOT, Mutant, checkout, sources
from scripts.mutants.probes import with_probes
from tests.fake_gpu.environment import ENVIRONMENT, PATH_OF_ENVIRONMENT

KEPT = ROOT / "build" / "mutants"

TIERS = {
    1: ("-m", "not gpu", "--tiers", "1"),
    2: ("-m", "not gpu", "--tiers", "1,2", "--commit", "none"),
    3: ("-m", "not gpu", "--tiers", "all"),
}
"""The options with which pytest runs all tests of a tier, and of those below it."""
BY_NAME = ("-m", "not gpu")
"""The options with which it runs the tests that are named."""
LEFT_OUT = ("tests/structure/", "tests/scripts/", "tests/simulated/test_mutants.py", "tests/ranks/test_mutants.py")
LEFT_OUT_NAMES = ("hazard", "stale_without_the_guard")
"""Files and names of tests that read the source, or change it: with a mutant they fail whatever the mutant does."""


class TestsStoppedError(Exception):
    """Tests were asked to run after ``stop_tests``."""


_running: set[subprocess.Popen[bytes]] = set()
_stopped = threading.Event()


def stop_tests() -> None:
    """End the tests that other threads run now, and let none begin."""
    _stopped.set()
    for process in tuple(_running):
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Coverage:
    """A run of a tier: the seconds of each test that passed, and the tests that reached each mutant."""

    seconds: Mapping[str, float]
    reached: Mapping[str, Sequence[str]]


def run_tests(
    tree: Path, arguments: Sequence[str], *, log: Path | None = None, outcomes: Path | None = None
) -> tuple[int, str]:
    """Run pytest in ``tree``. Returns its exit code and its output.

    Args:
        log: where an instrumented ``tree`` writes what it reaches.
        outcomes: gets a line for each test that starts, fails or ends.

    Raises:
        TestsStoppedError: after ``stop_tests``.
    """
    if _stopped.is_set():
        raise TestsStoppedError
    # Without files of bytecode: Python tells by the second whether a source has changed.
    own = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own, "TORCHINDUCTOR_COMPILE_THREADS": "1", PATH_OF_ENVIRONMENT: str(ENVIRONMENT)}
    if log is not None:
        environment[reached.PATH] = str(log)
        arguments = ["-p", "zenflow_compile.reached", *arguments]
    if outcomes is not None:
        environment[PATH_OF_OUTCOMES] = str(outcomes)
        arguments = ["-p", "scripts.mutants.outcomes", *arguments]
    command = [sys.executable, "-m", "pytest", "--no-header", "-p", "no:cacheprovider", *arguments]
    # A file and not a pipe, which processes that tests have left behind would keep open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        _running.add(process)
        try:
            process.wait()
        finally:
            _running.remove(process)
            _kill(process)
            process.wait()
        if _stopped.is_set():
            raise TestsStoppedError
        output.seek(0)
        return process.returncode, output.read()


def workers(processes: int) -> list[str]:
    """The options with which pytest runs tests in so many processes."""
    return ["-n", str(processes), "--dist", "worksteal"] if processes > 1 else []


def counts(test: str) -> bool:
    """Return whether a failure of ``test`` says that a mutant was found."""
    return not test.startswith(LEFT_OUT) and not any(name in test for name in LEFT_OUT_NAMES)


def collected(tree: Path, tier: int) -> set[str]:
    """The tests of a tier, and of those below it, whose failure counts, in a copy of the last commit."""
    code, output = run_tests(tree, [*TIERS[tier], "--collect-only", "-q"])
    if code != 0:
        raise RuntimeError(f"the tests of tier {tier} were not collected: pytest ended with {code}\n{output[-4000:]}")
    return {line for line in output.splitlines() if "::" in line and counts(line)}


def coverage_of(tier: int, mutants: Sequence[Mutant], processes: int, *, again: bool) -> Coverage:
    """Run all tests of a tier in an instrumented copy, unless an earlier run has done so for the same sources."""
    parts = [sources(), TIERS[tier], *((each.name, each.tests, each.places) for each in mutants)]
    path = KEPT / f"tier{tier}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.json"
    if path.exists() and not again:
        return Coverage(**json.loads(path.read_text()))
    print(f"running the tests of tier {tier} with probes", flush=True)
    begin = time.monotonic()
    with checkout() as tree:
        missing = insert_probes(tree, mutants)
        log = tree.parent / "log"
        left_out = [f"--ignore={each}" for each in LEFT_OUT]
        code, output = run_tests(tree, [*TIERS[tier], *left_out, *workers(processes), "-q"], log=log)
        if code not in (0, 1):
            raise RuntimeError(f"the tests of tier {tier} did not run: pytest ended with {code}\n{output[-4000:]}")
        found = _read_log(tree.parent.glob("log-*"), mutants)
    print(f"{output.splitlines()[-1]}: {time.monotonic() - begin:.0f} s", flush=True)
    reached_by = dict(found.reached)
    for mutant in mutants:
        folders = {_tests_of(name) for name in mutant.places} if mutant.name in missing else set()
        if places := mutant.tests or tuple(folders):
            others = {test for test in found.seconds if test.startswith(tuple(places))}
            reached_by[mutant.name] = sorted({*reached_by[mutant.name], *others})
    found = Coverage(found.seconds, reached_by)
    KEPT.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found), indent=1))
    return found


def insert_probes(tree: Path, mutants: Sequence[Mutant]) -> set[str]:
    """Instrument the package in ``tree``. Returns the mutants that have a place without a probe."""
    shutil.copy(Path(reached.__file__), tree / "zenflow_compile" / "reached.py")
    wanted: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, mutant in enumerate(mutants):
        for name, lines in mutant.places.items():
            for line in lines:
                wanted[name][line].append(number)
    missing: set[int] = set()
    for name, by_line in wanted.items():
        if name.endswith(".py"):
            source, without = with_probes((tree / name).read_text(), by_line)
            (tree / name).write_text(source)
            missing |= without
        else:
            missing.update(itertools.chain.from_iterable(by_line.values()))
    return {mutants[number].name for number in missing}


def _tests_of(name: str) -> str:
    """The tests of a file that no probe is in: those of the folder with the same name, or all."""
    folder = name.split("/")[1]
    return f"tests/{folder}/" if (ROOT / "tests" / folder).is_dir() else "tests/"


def _read_log(paths: Iterable[Path], mutants: Sequence[Mutant]) -> Coverage:
    seconds: dict[str, float] = defaultdict(float)
    found: dict[str, set[str]] = {each.name: set() for each in mutants}
    failed: set[str] = set()
    for path in paths:
        if path.suffix == ".now":
            continue
        tests: dict[str, str] = {}
        for kind, number, *values in (line.split("\t") for line in path.read_text().splitlines()):
            if kind == "test":
                tests[number] = values[0]
            elif kind == "reached" and number in tests:
                found[mutants[int(values[0])].name].add(tests[number])
            elif kind == "ended":
                seconds[tests[number]] += float(values[1])
                if values[0] == "failed":
                    print(f"left out, because it fails with probes: {tests[number]}")
                if values[0] != "passed":
                    failed.add(tests[number])
    usable = {test: duration for test, duration in seconds.items() if test not in failed and counts(test)}
    return Coverage(usable, {name: sorted(tests & usable.keys()) for name, tests in found.items()})
