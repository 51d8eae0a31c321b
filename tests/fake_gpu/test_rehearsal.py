"""What a GPU machine shows first, in tiny shapes: from a clone, with the packages of a bare machine, not installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.fake_gpu.environment import ROOT, on_fake_gpu, run

pytestmark = [*on_fake_gpu, pytest.mark.timeout(1800)]

LACKING = ("transformers", "accelerate", "trl", "expecttest", "xdist", "pytest_timeout")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rehearsal") / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(folder)], check=True)
    return folder


def test_first_command_ends_with_numbers(clone: Path) -> None:
    done = run(
        ["-m", "benchmarks", "gpu_first", "--tiny", "--inner", "eager"], folder=clone, without=LACKING, timeout=1800
    )
    said = done.stdout
    assert done.returncode == 0, said[-6000:]
    assert said.count(", near (") == 3
    assert "FAILED" not in said
    assert "FAR" not in said
    assert said.count(" x resident AdamW") == 3
    assert said.index("== installation") < said.index("== zenflow-compile doctor") < said.index("== 20 steps")


def test_first_command_runs_generated_code(clone: Path) -> None:
    """Under Inductor and Triton, whose kernels compute nothing here: every part of it runs."""
    done = run(
        ["-m", "benchmarks", "gpu_first", "--tiny"],
        folder=clone,
        computes=False,
        triton="launch",
        without=LACKING,
        timeout=1800,
    )
    assert "FAILED" not in done.stdout, done.stdout[-6000:]
    assert done.stdout.count(" x resident AdamW") == 3


@pytest.mark.parametrize(
    ("switches", "without", "said"),
    [
        ({"DEVICES": "0"}, (), "no CUDA device: No CUDA GPUs are available"),
        ({"DRIVER": "12040"}, (), "no CUDA device: The NVIDIA driver on your system is too old"),
        ({}, ("rich", "psutil"), "rich, psutil: not installed. On a machine with a network"),
    ],
    ids=["no device", "old driver", "no packages"],
)
def test_what_is_missing_is_said(clone: Path, switches: dict[str, str], without: tuple[str, ...], said: str) -> None:
    done = run(["-m", "benchmarks", "gpu_first", "--tiny"], folder=clone, switches=switches, without=without)
    assert done.returncode == 1
    assert said in done.stdout
    assert "Traceback" not in done.stdout


def test_parts_of_the_evidence_have_numbers(clone: Path, tmp_path: Path) -> None:
    parts = ("machine", "syncs", "peers_8k")
    arguments = [
        "-m",
        "benchmarks",
        "gpu_evidence",
        "--tiny",
        "--device",
        "cuda",
        "--out",
        str(tmp_path),
        "--part",
        *parts,
    ]
    done = run(arguments, folder=clone, without=LACKING, timeout=1800)
    found = {part: json.loads((tmp_path / f"{part}.json").read_text()) for part in parts}
    assert {part: each["status"] for part, each in found.items()} == dict.fromkeys(parts, "done"), done.stdout[-4000:]
    systems = {row["name"] for row in found["peers_8k"]["rows"] if "step_ms" in row}
    assert systems == {"zenflow", "zero_offload", "forward_backward", "adamw"}
    steady = [row for row in found["syncs"]["rows"] if row["step"] == "steady"]
    assert all(row["syncs_per_step"]["median"] == 0 for row in steady)
