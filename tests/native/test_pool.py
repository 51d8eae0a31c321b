"""The native pool under the sanitizers of GCC."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from zenflow_compile.native.build import SOURCES

STRESS = Path(__file__).with_name("pool_stress.cpp")
FLAGS = ("-std=c++17", "-O1", "-g", "-pthread", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-w")


def stress(folder: Path, sanitizer: str, sources: Path = SOURCES) -> subprocess.CompletedProcess[str]:
    """Compile and run the stress program."""
    program = folder / "stress"
    options = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{sources}")
    subprocess.run(["g++", *FLAGS, *options, str(STRESS), "-o", str(program)], check=True, timeout=240)
    return subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.long
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing(tmp_path: Path, sanitizer: str) -> None:
    done = stress(tmp_path, sanitizer)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_sanitizer_finds_a_missing_lock(tmp_path: Path) -> None:
    """Proves the test above: an abort races with the workers."""
    changed = tmp_path / "sources"
    shutil.copytree(SOURCES, changed)
    text = (changed / "pool.h").read_text()
    locked = "    std::lock_guard<std::mutex> lock(mutex_);\n    if (seen(&job->settled)) return;\n"
    assert text.count(locked) == 1
    (changed / "pool.h").write_text(text.replace(locked, "    if (seen(&job->settled)) return;\n"))
    assert stress(tmp_path, "thread", changed).returncode != 0
