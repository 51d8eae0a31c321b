"""Tests the Makefile and the scripts that it calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("packages", "refused"),
    [
        (["torch", "sympy", "triton"], []),
        (["torch", "nvidia-cublas", "sympy", "cuda-bindings"], ["cuda-bindings", "nvidia-cublas"]),
        (["torch", "nvidia_cudnn_cu13"], ["nvidia_cudnn_cu13"]),
    ],
)
def test_cuda_builds_are_refused(packages: list[str], refused: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"install": [{"metadata": {"name": name}} for name in packages]}))
    process = run("refuse_cuda_build.py", str(report))
    assert process.returncode == (1 if refused else 0)
    assert process.stderr == (f"would install: {', '.join(refused)}\n" if refused else "")


def test_makefile_passes_options_on() -> None:
    def dry_run(*arguments: str) -> str:
        command = ["make", "--no-print-directory", "-n", "PYTHON=python", *arguments]
        # `make test ARGS=...` passes its variables to this make through the environment.
        clean = {"PATH": os.environ["PATH"]}
        process = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True)
        return process.stdout

    assert dry_run("train", "ARGS=--compare --steps 9").strip() == "python -m examples.classify --compare --steps 9"
    passed_on = dry_run("train", "--", "--compare", "--steps=9").splitlines()[0].split()
    assert passed_on[:3] == ["python", "-m", "examples.classify"]
    assert sorted(passed_on[3:]) == ["--compare", "--steps=9"]
    evidence = "python -m benchmarks gpu_evidence --part peers_4k trace --missing"
    assert dry_run("gpu-evidence", "--", "--part", "peers_4k", "trace", "--missing").splitlines()[0].strip() == evidence


def test_make_bench_runs_all_or_one() -> None:
    def dry_run(*arguments: str) -> str:
        command = ["make", "--no-print-directory", "-n", "PYTHON=python", "bench", *arguments]
        clean = {"PATH": os.environ["PATH"]}
        return subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True).stdout.strip()

    assert dry_run() == "python -m benchmarks all"
    assert dry_run("ARGS=peers --model gpt") == "python -m benchmarks peers --model gpt"
