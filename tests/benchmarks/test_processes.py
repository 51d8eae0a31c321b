"""Processes that take turns: stopped in between, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.systems.case import Case
from benchmarks.systems.process import TrainingWorker, Worker, WorkerError

# Answers every request with the number of requests so far, and has a child of its own that sleeps.
ECHO = """
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"child": child.pid}), flush=True)
for number, line in enumerate(sys.stdin, start=1):
    request = json.loads(line)
    if request["command"] == "fail":
        print("the log", file=sys.stderr)
        print(json.dumps({"error": "it failed", "kind": "failure"}), flush=True)
        sys.exit(1)
    if request["command"] == "die":
        sys.exit("no answer")
    if request["command"] != "close":
        print(json.dumps({"number": number, **request}), flush=True)
    else:
        break
"""


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.1)  # between two looks
    pytest.fail("did not happen within two minutes")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_worker_is_frozen_between_requests() -> None:
    with Worker([sys.executable, "-c", ECHO], {}) as worker:
        child = worker.first_answer()["child"]
        wait_until(lambda: stopped(child))
        assert worker.ask("anything", value=3) == {"number": 1, "command": "anything", "value": 3}
        wait_until(lambda: stopped(child))
        assert worker.memory_mib() > 0
        assert worker.idle_cpu_share(0.05) >= 0
        wait_until(lambda: stopped(child))
    wait_until(lambda: gone(child))


@pytest.mark.tier1
@pytest.mark.parametrize(("command", "kind", "says"), [("fail", "failure", "the log"), ("die", "died", "no answer")])
def test_failure_shows_the_end_of_the_log(command: str, kind: str, says: str) -> None:
    with Worker([sys.executable, "-c", ECHO], {}) as worker:
        child = worker.first_answer()["child"]
        with pytest.raises(WorkerError, match=says) as error:
            worker.ask(command)
        assert error.value.kind == kind
    wait_until(lambda: gone(child))


def test_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import sys, time\n"
        "from benchmarks.systems.process import Worker\n"
        f"worker = Worker([sys.executable, '-c', {ECHO!r}], {{}})\n"
        "print(worker.first_answer()['child'], flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, parent], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        wait_until(lambda: stopped(child))
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: gone(child))


def test_missing_deepspeed_names_the_remedy(tmp_path: Path) -> None:
    case = Case(system="deepspeed_zenflow", model="tiny")
    with pytest.raises(WorkerError, match=r"setup_deepspeed\.sh") as error:
        TrainingWorker(case, warm_up=1, deepspeed_python=tmp_path / "python")
    assert error.value.kind == "missing"
