"""Parts of ``gpu_evidence``: limits, failures and resumption, and every part for real with a tiny model on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks import gpu_evidence
from benchmarks.evidence import compared, syncs, trace, turns
from benchmarks.evidence.parts import MACHINE, PARTS, Part
from benchmarks.evidence.planned import CONTEXT_BYTES, fit, together_bytes
from benchmarks.evidence.setting import Setting
from benchmarks.systems.case import Case
from benchmarks.systems.comparison import Schedule
from benchmarks.systems.process import WorkerError

ROOT = Path(__file__).parents[2]

# Does what the name of its part says. Slow ones have a child in a process group of its own.
CHILD = """
import json, subprocess, sys, time
name, device, tiny, folder, path, *doctor = sys.argv[1:]
print("the log", flush=True)
with open(path, "a") as rows:
    found = json.load(open(doctor[0])) if doctor else None
    row = {"part": name, "doctor": found}
    if name.startswith("slow"):
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        row["pid"] = subprocess.Popen(sleep, process_group=0).pid
    rows.write(json.dumps(row) + "\\n")
    rows.flush()
    if name.startswith("slow"):
        rows.write('{"half": ')
        rows.flush()
        time.sleep(600)
if name.startswith("bad"):
    raise ValueError("it is bad")
"""


def part(name: str) -> Part:
    return Part(name, f"is {name}", 1, lambda setting, emit: None)


ACTED = {each.name: each for each in (MACHINE, *map(part, ("good", "bad", "slow", "last")))}


def run(folder: Path, *options: str, **changes: Any) -> int:
    return gpu_evidence.main(["--tiny", "--device", "cpu", "--out", str(folder), *options], **changes)


def act(folder: Path, *options: str) -> int:
    """Run parts that a script acts."""
    return run(folder, *options, known=ACTED, child=(sys.executable, "-c", CHILD))


def results(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_failed_part_is_recorded_and_others_run(tmp_path: Path) -> None:
    assert act(tmp_path, "--part", "good", "bad", "last") == 1
    assert [results(tmp_path, name)["status"] for name in ("good", "bad", "last")] == ["done", "failed", "done"]
    bad = results(tmp_path, "bad")
    assert bad["error"] == "ValueError: it is bad"
    assert bad["log"][0] == "the log"
    assert bad["rows"][0]["part"] == "bad"  # what came before the error


def test_part_over_its_limit_is_killed(tmp_path: Path) -> None:
    assert act(tmp_path, "--part", "machine") == 0
    assert act(tmp_path, "--part", "slow", "last", "--limit", "2") == 1
    slow = results(tmp_path, "slow")
    assert (slow["status"], slow["error"]) == ("timed out", "killed after 2 s")
    (row,) = slow["rows"]  # without the half of a row
    assert 2 <= slow["seconds"] < 60
    for _ in range(100):
        if gone(row["pid"]):
            break
        time.sleep(0.1)
    assert gone(row["pid"])
    assert results(tmp_path, "last")["status"] == "done"


def test_every_part_has_this_machine(tmp_path: Path) -> None:
    assert act(tmp_path, "--part", "good", "last") == 0
    machine = results(tmp_path, "machine")
    good = results(tmp_path, "good")
    assert good["machine"]["doctor"] == machine["rows"][0]  # measured first, although it was not asked for
    assert good["rows"][0]["doctor"] == machine["rows"][0]  # the part can predict with it
    assert good["machine"]["torch"] == torch.__version__
    assert good["command"] == "python -m benchmarks gpu_evidence --part good --device cpu --tiny"
    # Findings of another machine are of no use.
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**machine, "identity": {"cpu": "another"}, "rows": [{"of": "another"}]}))
    assert act(tmp_path, "--part", "last") == 0
    assert results(tmp_path, "last")["machine"]["doctor"] == machine["rows"][0]


def test_missing_runs_what_is_not_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    act(tmp_path, "--part", "good", "bad")
    interrupted = results(tmp_path, "good") | {"status": "running"}
    (tmp_path / "last.json").write_text(json.dumps(interrupted))
    (tmp_path / "slow.json").write_text("{")
    capsys.readouterr()
    assert act(tmp_path, "--missing", "--list") == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "about" in line]
    assert listed[:-1] == ["bad", "slow", "last"]
    assert act(tmp_path, "--missing", "--part", "good", "last") == 0
    assert results(tmp_path, "last")["part"] == "last"


def measures(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "benchmarks.evidence.child" in process.cmdline()
    return False


# The part's process runs, and `Popen` does not return.
SLOW_START = """
import runpy, subprocess, time
class Slow(subprocess.Popen):
    def __init__(self, command, **keywords):
        super().__init__(command, **keywords)
        if "benchmarks.evidence.child" in command:
            time.sleep(600)
subprocess.Popen = Slow
runpy.run_module("benchmarks.gpu_evidence", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "command", [("-m", "benchmarks", "gpu_evidence"), ("-c", SLOW_START)], ids=["running", "starting"]
)
def test_terminated_run_leaves_no_process(tmp_path: Path, command: tuple[str, ...]) -> None:
    arguments = [*command, "--tiny", "--device", "cpu", "--part", "machine", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment) as process:
        started: list[psutil.Process] = []
        for _ in range(600):
            started = [each for each in psutil.Process(process.pid).children() if measures(each)]
            if started:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert started
    assert all(gone(each.pid) for each in started)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_gpu_it_prints_what_it_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_evidence.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "There is no CUDA device" in said
    for each in PARTS.values():
        assert f"  {each.name} " in said
        assert f"python -m benchmarks gpu_evidence --part {each.name}\n" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--device", "cpu"], "needs --tiny"), (["--limit", "0"], "above 0"), (["--part", "peers"], "invalid choice")],
)
def test_wrong_options(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_evidence.main(options)
    assert says in capsys.readouterr().err


def test_parts_are_what_was_asked_for() -> None:
    lengths = {f"peers_{length}k{clip}" for length in (4, 8, 16, 32) for clip in ("", "_clip")}
    assert lengths | {
        "gpu_training",
        "gpu_kernels",
        "syncs",
        "trace",
        "profiler",
        "policies_stride",
        "host_adam",
    } <= set(PARTS)
    assert next(iter(PARTS)) == "machine"
    assert all(each.minutes * 60 < gpu_evidence.LIMIT_S for each in PARTS.values())
    assert gpu_evidence.LIMIT_S <= 9 * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all tiny parts, so that the machine is measured one time."""
    return tmp_path_factory.mktemp("evidence")


def tiny(folder: Path, name: str) -> list[dict[str, Any]]:
    """Run a part for real; its rows."""
    assert run(folder, "--part", name) == 0, results(folder, name)
    found = results(folder, name)
    assert found["status"] == "done"
    assert found["machine"]["cores"] > 0
    assert found["machine"]["doctor"]["machine"]["device"] == "cpu"
    assert found["machine"]["doctor"]["host"][0]["adam"] > 0
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def test_each_file_with_gpu_tests_is_in_one_part() -> None:
    tests = Path(__file__).parents[1]
    marked = {str(path.relative_to(tests)) for path in tests.rglob("test_*.py") if "mark.gpu" in path.read_text()}
    parts: list[Any] = [part.measure for part in PARTS.values() if part.name.startswith("gpu_")]
    listed = [file for measure in parts for file in measure.keywords["files"]]
    assert sorted(listed) == sorted(marked - {"benchmarks/test_gpu_evidence.py"})


def of_3b(system: str, tokens: int = 8192) -> Case:
    return Case(system=system, model="qwen2.5-3b", tokens=tokens, dtype="bf16")


def test_planned_memory_is_that_of_the_parts() -> None:
    """Sixteen bytes per parameter of resident AdamW while it trains, fourteen while another one does."""
    parameters = 3.09e9
    alone = together_bytes([of_3b("adamw")])
    assert alone == pytest.approx(16 * parameters + CONTEXT_BYTES + 3.9e9, rel=0.02)
    both = together_bytes([of_3b("adamw"), of_3b("forward_backward")])
    assert both - alone == pytest.approx(2 * parameters + CONTEXT_BYTES, rel=0.01)
    assert fit([of_3b("adamw"), of_3b("forward_backward"), of_3b("zenflow")], 85_000_000_000)
    assert not fit([of_3b("adamw"), of_3b("forward_backward"), of_3b("zenflow", 32768)], 85_000_000_000)


def test_companions_are_alone_where_memory_is_short() -> None:
    cases = {name: of_3b(name) for name in ("forward_backward", "adamw")}
    others = {"zenflow": of_3b("zenflow")}
    alive: set[str] = set()
    at_once: list[set[str]] = []

    class Counting(FakeWorker):
        def start(self) -> None:
            alive.add(self.case.system)
            at_once.append(set(alive))

        def __exit__(self, *arguments: object) -> None:
            alive.discard(self.case.system)

    schedule = Schedule(rounds=3, steps=4)
    make: Any = Counting
    found = {each.name: each for each in turns.take_turns(cases, others, schedule, make, memory_bytes=75_000_000_000)}
    assert list(found) == ["zenflow", "forward_backward", "adamw"]
    assert {"forward_backward", "adamw"} not in [each & {"forward_backward", "adamw"} for each in at_once]
    assert found["zenflow"].over == {"forward_backward": [1.5] * 3, "adamw": [0.75] * 3}
    assert found["adamw"].rounds_ms == [4.0] * 3


@pytest.mark.parametrize(("gigabytes", "at_once"), [(150, True), (75, False)])
def test_systems_compile_at_once_where_they_fit(gigabytes: int, at_once: bool) -> None:
    """A process compiles from the moment it is made. Systems that come later start alone."""
    order: list[str] = []

    class Noting(FakeWorker):
        def __init__(self, case: Case, warm_up: int) -> None:
            super().__init__(case, warm_up=warm_up)
            order.append(f"{case.system} begins")

        def start(self) -> None:
            order.append(f"{self.case.system} is ready")

    companions, others = ({name: of_3b(name) for name in names} for names in (["adamw"], ["zenflow", "zero_offload"]))
    make: Any = Noting
    schedule = Schedule(rounds=1, steps=4)
    found = list(turns.take_turns(companions, others, schedule, make, memory_bytes=gigabytes * 10**9))
    assert [each.name for each in found] == ["zenflow", "zero_offload", "adamw"]
    both = ["adamw begins", "zenflow begins", "adamw is ready", "zenflow is ready"]
    if not at_once:
        both[1], both[2] = both[2], both[1]
    assert order == [*both, "zero_offload begins", "zero_offload is ready"]


def test_system_without_memory_starts_again() -> None:
    """What a process takes while it compiles is an estimate."""
    starts: list[str] = []

    class Scarce(FakeWorker):
        def start(self) -> None:
            starts.append(self.case.system)
            if starts == ["adamw"]:
                raise WorkerError("CUDA out of memory", "memory")

    make: Any = Scarce
    companions, others = {"adamw": of_3b("adamw")}, {"zenflow": of_3b("zenflow")}
    schedule = Schedule(rounds=2, steps=4)
    found = {each.name: each for each in turns.take_turns(companions, others, schedule, make, memory_bytes=150 * 10**9)}
    assert starts == ["adamw", "zenflow", "adamw"]
    assert found["zenflow"].over == {"adamw": [0.75] * 2}


def test_part_without_a_number_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that does not fit is no fault, but a part in which no other one was measured is not done."""

    class Full(FakeWorker):
        def start(self) -> None:
            if self.case.system == "zenflow":
                raise WorkerError("CUDA out of memory", "memory")

    monkeypatch.setattr(compared, "take_turns", partial(turns.take_turns, make=Full))
    rows: list[Any] = []
    setting = Setting("cpu", True, None, tmp_path)
    with pytest.raises(RuntimeError, match="no number of zenflow; their rows say why"):
        compared.measure_peers(setting, rows.append, model="tiny", tokens=1, clip=False, systems=("zenflow",))
    assert [row["name"] for row in rows] == ["zenflow", "forward_backward", "adamw"]


@pytest.mark.long
def test_tiny_gpu_training(folder: Path) -> None:
    rows = tiny(folder, "gpu_training")
    assert {row["test"].partition("::")[0] for row in rows} >= {"tests/gpu/test_training.py"}
    if not torch.cuda.is_available():
        assert {row["outcome"] for row in rows} == {"skipped"}


@pytest.mark.long
def test_tiny_syncs(folder: Path) -> None:
    rows = tiny(folder, "syncs")
    kinds = {(row["step"], row["clip_grad_norm"]) for row in rows}
    assert kinds == {(step, clip) for step in ("steady", "re-selecting") for clip in (False, True)}
    for row in rows:
        assert row["blocking_copies_per_step"]["n"] == row["steps"] > 0
        assert "needs a CUDA device" in row["left_out"]


@pytest.mark.long
def test_tiny_trace(folder: Path) -> None:
    (row,) = tiny(folder, "trace")
    assert row["left_out"] == "busy time and overlap: CUPTI needs a CUDA device"
    assert (folder / row["file"]).exists()


@pytest.mark.long
def test_tiny_profiler(folder: Path) -> None:
    (row,) = tiny(folder, "profiler")
    assert row["profiled_over_plain"]["n"] == 2


@pytest.mark.long
def test_tiny_host_adam(folder: Path) -> None:
    rows = tiny(folder, "host_adam")
    measured = [row for row in rows if "gb_per_s" in row]
    assert {row["kernel"] for row in measured} == {"copy", "ours", "fused"}
    assert all(row["predicted_million_parameters_per_s"] > 0 for row in measured)
    assert {row["threads"] for row in rows} == set(range(1, 17))  # those without a core say so


@pytest.mark.long
def test_tiny_peers(folder: Path) -> None:
    *offloaded, alone, adamw = tiny(folder, "peers_32k_clip")
    assert [row["system"] for row in (*offloaded, alone, adamw)] == ["zenflow", "forward_backward", "adamw"]
    (zenflow,) = offloaded
    assert zenflow["over"]["adamw"]["n"] == zenflow["over"]["forward_backward"]["n"] == 2
    assert zenflow["clip"] == 1.0
    assert zenflow["breakdown"]["host_update_ms_per_step"] > 0
    for row in (zenflow, adamw):
        assert row["predicted"]["step_ms"] > 0
        assert row["predicted_over_measured"] > 0
    assert alone["predicted"] is None


@pytest.mark.long
def test_tiny_policies_stride(folder: Path) -> None:
    rows = [row for row in tiny(folder, "policies_stride") if row["system"] != "forward_backward"]
    assert {row["stride"] for row in rows} >= {1, None}
    for row in rows:
        assert row["equation_1"].keys() == {"ratio", "stride"}
        assert row["update_ms"] >= 0
        assert row["predicted"]["step_ms"] > 0


class FakeWorker:
    """Takes ``ms`` per step; fails as its system's name says."""

    def __init__(self, case: Case, *, warm_up: int) -> None:
        self.case, self.losses, self.turns = case, [1.0] * warm_up, 0

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self) -> None:
        if self.case.system == "adamw" and self.case.clip:
            raise WorkerError("CUDA out of memory", "memory")

    def run(self, *, settle: int, steps: int) -> tuple[float, list[float]]:
        self.turns += 1
        if self.case.system == "zero_offload" and self.turns > 1:
            raise WorkerError("it broke", "failure")
        ms = {"forward_backward": 2.0, "adamw": 4.0, "zenflow": 3.0, "zero_offload": 8.0}[self.case.system]
        return ms, [ms] * steps

    def ask(self, command: str, **values: object) -> dict[str, Any]:
        return {"summary": {"step_ms": 1.0}} if command == "profile" else {"parameters": 1}


FAKE: Any = FakeWorker


@pytest.mark.parametrize("clip", [None, 1.0])
def test_turns_go_on_without_a_failed_system(clip: float | None) -> None:
    cases = {name: Case(system=name, model="tiny", clip=clip) for name in ("forward_backward", "adamw")}
    others = {name: Case(system=name, model="tiny", clip=clip) for name in ("zero_offload", "zenflow")}
    found = {each.name: each for each in turns.take_turns(cases, others, Schedule(rounds=3, steps=4), FAKE)}
    assert list(found) == ["zero_offload", "zenflow", "forward_backward", "adamw"]
    rows = {name: each.row() for name, each in found.items()}
    assert (rows["zero_offload"]["skipped"], rows["zero_offload"]["kind"]) == ("it broke", "failure")
    assert [name for name, each in found.items() if each.faulty] == ["zero_offload"]
    assert rows["zenflow"]["over"]["forward_backward"]["median"] == 1.5
    if clip is None:
        assert rows["zenflow"]["over"]["adamw"]["median"] == 0.75
        assert rows["adamw"]["step_ms"]["n"] == 6  # rounds with both systems
    else:  # resident AdamW does not fit next to the others: no fault
        assert rows["adamw"]["kind"] == "memory"
        assert "adamw" not in rows["zenflow"]["over"]


def test_turns_of_companions_alone() -> None:
    cases = {name: Case(system=name, model="tiny") for name in ("forward_backward", "adamw")}
    alone, adamw = turns.take_turns(cases, {}, Schedule(rounds=3, steps=4), FAKE)
    assert alone.rounds_ms == [2.0] * 3
    assert adamw.over == {"forward_backward": [2.0] * 3}


def test_sync_warnings_are_counted_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    found = Counter[str]()
    with syncs.counted_syncs(found, cuda=True):
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    (place,) = found
    assert place.startswith("tests/benchmarks/test_gpu_evidence.py:")
    assert found[place] == 2
    assert modes == ["warn", 0]


def event(category: str, name: str, stream: int, begin: float, end: float, **args: int) -> dict[str, Any]:
    """Times in us."""
    about = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}
    return {**about, "args": {"stream": stream, **args}}


def test_trace_is_summarized_between_markers() -> None:
    events = [
        event("kernel", "before", 7, 0, 10),
        event("kernel", "at::cuda::spin_kernel", 7, 10, 11),
        event("kernel", "gemm", 7, 11, 511),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 411, 611, bytes=1000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 21, 5, 111, bytes=500),  # of the step before
        event("gpu_memset", "Memset (Device)", 7, 711, 811),
        event("kernel", "at::cuda::spin_kernel", 7, 1011, 1012),
        event("kernel", "after", 7, 1012, 2000),
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 5, "args": {}},
        {"ph": "M", "name": "process_name"},
    ]
    found = trace.summarize({"traceEvents": events})
    assert found["span"] == 1.0
    assert {name: found[name] for name in found if name.startswith("busy")} == {
        "busy_stream_7": 0.6,
        "busy_stream_20": 0.2,
        "busy_stream_21": 0.1,
    }
    assert found["compute"] == 0.6
    assert (found["copy_to_host"], found["copy_to_host_overlapped"], found["copy_to_host_bytes"]) == (0.2, 0.1, 1000)
    assert (found["copy_to_device"], found["copy_to_device_bytes"]) == (0.1, 0)
    assert found["idle"] == pytest.approx(0.3)  # 611 to 711, 811 to 1011
    assert trace.overlapped([found]) == {"to_host": [0.5], "to_device": [1.0]}
    assert trace.summarize({"traceEvents": events[2:6]}) == {}


def test_prediction_stands_next_to_measurement(tmp_path: Path) -> None:
    """Without doctor's findings there is none, and no error."""
    setting = Setting("cpu", True, None, tmp_path)
    each = turns.Turns(
        "zenflow", setting.case("zenflow", "tiny"), rounds_ms=[2.0], companions_ms={compared.ALONE: [1.0]}
    )
    assert compared.predicted(setting, each) == {"predicted": None}


@pytest.mark.long
def test_prediction_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2.5-3B's shapes on a machine with doctor's numbers of one, without that machine."""
    pytest.importorskip("transformers")
    memory = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: memory)
    doctor = {
        "machine": {"device": "a GPU", "memory_bytes": 128 * 10**9, "nodes": {"0": list(range(16))}},
        "host": [{"threads": 1, "add": 1e10, "adam": 1e10}, {"threads": 16, "add": 1.5e11, "adam": 1.5e11}],
        "link": [{"memory": "pinned", "to_host": 5e10, "to_device": 5e10}],
        "resident": {"parameters": 5e10, "bytes": 1.5e12},
        "matmul_flops": 6e14,
        "disk": None,
    }
    setting = Setting("cuda", False, doctor, tmp_path)
    found = {}
    for tokens, ms in ((4096, 200.0), (32768, 1600.0)):
        case = setting.case("zenflow", "qwen2.5-3b", tokens=tokens)
        each = turns.Turns("zenflow", case, rounds_ms=[2 * ms], companions_ms={compared.ALONE: [ms]})
        found[tokens] = compared.predicted(setting, each)
        assert found[tokens]["predicted"]["step_ms"] > ms  # forward and backward as measured, and the updates
        assert 0.5 < found[tokens]["predicted_over_measured"] < 1
    host = [each["predicted"]["host_update_ms"] for each in found.values()]
    assert host[0] == pytest.approx(host[1], rel=0.1)  # does not depend on the tokens
