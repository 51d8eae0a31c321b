"""The mutants of ``tests/mutants`` apply to the source, and ``scripts/mutants`` finds out which tests reach them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mutants import reached
from scripts.mutants.coverage import counts
from scripts.mutants.outcomes import PATH, first_failure
from scripts.mutants.patches import ROOT, read_mutants, refused
from scripts.mutants.probes import with_probes

LEAST, LEAST_OTHERS = 70, 25

SOURCE = '''"""A module."""

from __future__ import annotations

LIMIT = 3


@jit
def kernel(x):
    x += 1


class Counter:
    step = 1

    @property
    def count(self):
        """Its count."""
        if self.many:
            values = [
                each
                for each in self.all
            ]
            return len(values)
        elif self.one: return 1
        return 0
'''


def test_mutants_apply_to_the_source() -> None:
    mutants = read_mutants()
    assert refused(mutants) == {}, "port the patches to the changed lines, or remove them"
    assert len(mutants) >= LEAST
    assert sum(not each.name.startswith("hazard-") for each in mutants) >= LEAST_OTHERS
    assert all((ROOT / name).exists() for each in mutants for name in each.places)
    for file, _, test in (name.partition("::") for each in mutants for name in each.tests):
        assert (ROOT / file).exists()
        assert not test or f"def {test}(" in (ROOT / file).read_text(), test


@pytest.mark.parametrize(
    ("text", "in_front_of"),
    [
        ("            return len(values)", "            return len(values)"),
        ("                for each in self.all", "            values = ["),
        ("        if self.many:", "        if self.many:"),
        ("        elif self.one: return 1", "        if self.many:"),
        ("        return 0", "        return 0"),
    ],
)
def test_probes_are_before_the_statement(text: str, in_front_of: str) -> None:
    line = SOURCE.splitlines().index(text) + 1
    made, missing = with_probes(SOURCE, {line: [7]})
    compile(made, "made", "exec")
    lines = made.splitlines()
    at = next(number for number, each in enumerate(lines) if each.strip() == "_reach(7)")
    assert lines[at + 1] == in_front_of
    assert len(lines[at]) - len(lines[at].lstrip()) == len(in_front_of) - len(in_front_of.lstrip())
    assert not missing
    assert [each for each in lines if "_reach" not in each] == SOURCE.splitlines()


@pytest.mark.parametrize("text", ["LIMIT = 3", "    x += 1", "    step = 1", "    def count(self):", "    @property"])
def test_lines_of_imports_and_kernels_have_no_probe(text: str) -> None:
    line = SOURCE.splitlines().index(text) + 1
    assert with_probes(SOURCE, {line: [7, 8]}) == (SOURCE, {7, 8})


def test_probes_tell_of_tests_and_their_children(tmp_path: Path) -> None:
    (tmp_path / "reached.py").write_bytes(Path(reached.__file__).read_bytes())
    (tmp_path / "test_it.py").write_text(
        "import subprocess, sys\n"
        "from reached import reach\n"
        "def test_one():\n    reach(1), reach(1)\n"
        "def test_two():\n    subprocess.run([sys.executable, '-c', 'import reached; reached.reach(2)'], check=True)\n"
        "def test_three():\n    pass\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), reached.PATH: str(tmp_path / "log")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "reached", "-p", "no:cacheprovider", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)
    (log,) = (path for path in tmp_path.glob("log-*") if path.suffix != ".now")
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    assert [line for line in lines if line[0] == "reached"] == [["reached", "1", "1"], ["reached", "2", "2"]]
    names = [line[2] for line in lines if line[0] == "test"]
    assert names == ["test_it.py::test_one", "test_it.py::test_two", "test_it.py::test_three"]


def test_tests_of_the_source_find_no_mutant() -> None:
    assert not counts("tests/structure/test_imports.py::test_one")
    assert not counts("tests/simulated/test_weights.py::test_hazard_is_found[name]")
    assert counts("tests/runtime/test_host_kernel.py::test_one")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("started a.py::test_one\nended a.py::test_one", None),
        (
            "started a.py::test_one[x - y]\nfailed a.py::test_one[x - y]\nended a.py::test_one[x - y]",
            "a.py::test_one[x - y]",
        ),
        ("started a.py::test_one\nended a.py::test_one\nstarted a.py::test_two", "a.py::test_two"),
        ("", None),
    ],
    ids=["passed", "failed", "ended the process", "no test"],
)
def test_first_failure_is_read(tmp_path: Path, lines: str, found: str | None) -> None:
    (tmp_path / "outcomes").write_text("".join(line.replace(" ", "\t", 1) + "\n" for line in lines.splitlines()))
    assert first_failure(tmp_path / "outcomes") == found
    assert first_failure(tmp_path / "absent") is None


def test_outcomes_are_written_as_they_come(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os\ndef test_one():\n    pass\ndef test_two():\n    assert False\ndef test_three():\n    os._exit(3)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), PATH: str(tmp_path / "outcomes")}
    options = ["-q", "-p", "scripts.mutants.outcomes", "-p", "no:cacheprovider", "test_it.py"]
    command = [sys.executable, "-m", "pytest", *options]
    run = subprocess.run(command, cwd=tmp_path, env=environment, check=False, stdout=subprocess.DEVNULL)
    assert run.returncode == 3
    lines = [line.split("\t") for line in (tmp_path / "outcomes").read_text().splitlines()]
    assert [outcome for outcome, _ in lines] == ["started", "ended", "started", "failed", "ended", "started"]
    assert first_failure(tmp_path / "outcomes") == "test_it.py::test_two"
