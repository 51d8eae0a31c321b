"""Tests the output of ``zenflow-compile doctor``, and the arguments that it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests.support.calls import calls_of
from tests.support.native_code import NativeCode
from zenflow_compile.cli import doctor, main
from zenflow_compile.measure import bandwidth
from zenflow_compile.performance.hardware import hardware_of
from zenflow_compile.runtime.host.cores import physical_cores

QUICK = ["doctor", "--device", "cpu", "--threads", "1", "--megabytes", "2", "--rounds", "1"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device updates a small matrix."""
    device_rate = bandwidth.device_rate
    monkeypatch.setattr(bandwidth, "_LARGEST_MATRIX", bandwidth._SMALLEST_MATRIX)
    monkeypatch.setattr(bandwidth, "_CPU_ELEMENTS", 1 << 12)
    monkeypatch.setattr(bandwidth, "device_rate", lambda device, rounds: device_rate(device, rounds, 64, 64))


def test_doctor_prints_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main.main(QUICK) == 0
    text = capsys.readouterr().out
    for part in (
        "physical cores",
        "NUMA node",
        "lockable memory",
        "C++ compiler",
        f"torch {torch.__version__}",
        "copy_",
        "of copy_",
        "D2H",
        "memmove",
        "copy lanes are threads",
        "resident parameters",
        "TFLOP/s",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    "command", [QUICK, ["plan", "--params", "3e8", "--hardware", "measured", "--tokens", "8"]], ids=["doctor", "plan"]
)
def test_missing_compiler_exits_with_2(
    command: list[str], capsys: pytest.CaptureFixture[str], native_code: NativeCode
) -> None:
    native_code.compile_with("no-such-compiler", by_user=False)
    with pytest.raises(SystemExit) as ended:
        main.main(command)
    assert ended.value.code == 2
    assert "no C++ compiler was found" in capsys.readouterr().err


def test_doctor_divides_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*QUICK, "--ranks", "2", "--json"]) == 0
    has = json.loads(capsys.readouterr().out)["machine"]
    cores = [each["cores"] for each in has["ranks"]]
    assert sorted({core for each in cores for core in each}) == sorted(
        core for each in has["nodes"].values() for core in each
    )
    assert all(each["memory_bytes"] == has["memory_bytes"] // 2 for each in has["ranks"])
    assert main.main([*QUICK, "--ranks", "2"]) == 0
    text = capsys.readouterr().out
    assert "rank 0" in text
    assert "rank 1" in text
    with pytest.raises(SystemExit):
        main.main([*QUICK, "--ranks", "0"])
    assert "--ranks 0 must be at least 1" in capsys.readouterr().err


def test_doctor_prints_only_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine", "host", "link", "device", "resident", "matmul_flops", "disk"}
    assert found["disk"] is None
    assert sum(map(len, found["machine"]["nodes"].values())) == len(physical_cores())
    (host,) = found["host"]
    assert host["threads"] == 1
    assert host["adam"] == pytest.approx(34 * host["parameters"])
    (link,) = found["link"]
    assert link["memory"] == "memmove"
    assert min(link["to_host"], link["to_device"], found["device"]["parameters"], found["matmul_flops"]) > 0
    assert found["resident"]["bytes"] == pytest.approx(28 * found["resident"]["parameters"])


def test_doctor_measures_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*QUICK, "--nvme-path", str(tmp_path), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert min(findings["disk"].values()) > 0
    assert hardware_of(findings).disk_read == findings["disk"]["read"]
    assert not list(tmp_path.iterdir())
    assert main.main([*QUICK, "--nvme-path", str(tmp_path)]) == 0
    assert "Disk, GB/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], r"--threads 0 must be in \[1, \d+\]"),
        (["--threads", "1", "100000"], r"--threads 100000 must be in \[1, \d+\]: this process may use"),
        (["--threads", "few"], "invalid int value: 'few'"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--megabytes", "0"], r"--megabytes 0 must be in \[1, \d+\]"),
        (["--megabytes", "1000000000"], "the available memory"),
        (["--nvme-path", "nowhere"], "nvme_path='nowhere'"),
        (["--device", "meta"], "--device meta must be one of cpu"),
        (["--device", "graphics"], "--device graphics must be one of cpu"),
        (["--device", "cuda:99"], "--device cuda:99 must be one of cpu"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_arguments_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with calls_of(bandwidth.host_rates) as measured, pytest.raises(SystemExit) as caught:
        main.main(["doctor", *arguments])
    assert measured == [], "before all arguments are good"
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err)


@pytest.mark.parametrize("arguments", [[], ["heal"]])
def test_missing_command_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(arguments)
    assert caught.value.code == 2
    assert "command" in capsys.readouterr().err


def test_command_runs_as_module_and_as_script() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "zenflow_compile", "doctor", "--help"],
        cwd=root, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "--json" in done.stdout
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"zenflow-compile": "zenflow_compile.cli.main:main"}


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_thread_counts(cores: int, counts: list[int]) -> None:
    assert doctor._thread_counts(cores) == counts


def test_cores_are_written_as_ranges() -> None:
    assert doctor._ranges([0, 1, 2, 5, 8, 9]) == "0-2, 5, 8-9"
