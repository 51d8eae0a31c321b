"""The patches of ``tests/mutants``, and checkouts to apply them to."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "mutants"


@dataclass(frozen=True, eq=False)
class Mutant:
    """A patch. ``tests`` reach it in addition to those that a probe finds; ``places`` are lines by file.

    Those of tier 3 are of the device's driver, and have tests that run on the fake GPU.
    """

    name: str
    defect: str
    tier: int
    tests: tuple[str, ...]
    places: Mapping[str, tuple[int, ...]]
    digest: str

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.patch"


def read_mutants() -> list[Mutant]:
    """Read all patches of the folder. Raises ValueError for one without a sentence or a tier."""
    return [_read(path) for path in sorted(FOLDER.glob("*.patch"))]


def _read(path: Path) -> Mutant:
    header, _, diff = (text := path.read_text()).partition("\n--- ")
    defect, *fields = header.splitlines()
    found = dict(line.split(": ", 1) for line in fields if ": " in line)
    if not defect.endswith(".") or found.get("Tier") not in ("1", "2", "3"):
        raise ValueError(f"{path.name} must begin with a sentence, and with a line `Tier: 1`, `Tier: 2` or `Tier: 3`")
    tests = tuple(found.get("Tests", "").split())
    if found["Tier"] == "3" and not tests:
        raise ValueError(f"{path.name} needs a line `Tests: PATH...`: tier 3 takes hours")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Mutant(path.stem, defect, int(found["Tier"]), tests, _changed_lines("--- " + diff), digest)


def _changed_lines(diff: str) -> dict[str, tuple[int, ...]]:
    """The first line of each change, by file, in the file as it was. For lines that are added, the one above them."""
    places: dict[str, list[int]] = defaultdict(list)
    name, line, before = "", 0, " "
    for text in diff.splitlines():
        if text.startswith("--- "):
            name = text.removeprefix("--- a/")
        elif text.startswith("@@"):
            line, before = int(text.split()[1].split(",")[0].removeprefix("-")), " "
        elif not text.startswith("+++ "):
            if text[:1] in "+-" and before == " ":
                places[name].append(line if text[0] == "-" else line - 1)
            line += text[:1] != "+"
            before = text[:1] or " "
    return {name: tuple(lines) for name, lines in places.items()}


def refused(mutants: Iterable[Mutant]) -> dict[str, str]:
    """What git says of each patch that does not apply to the working tree."""
    runs = ((each.name, git("apply", "--check", str(each.path), check=False)) for each in mutants)
    return {name: run.stderr for name, run in runs if run.returncode}


def git(*arguments: str, tree: Path = ROOT, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=check)


@contextmanager
def checkout() -> Iterator[Path]:
    """A temporary worktree of the last commit."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        try:
            git("worktree", "add", "--detach", str(tree), "HEAD")
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree), check=False)


@cache
def head() -> str:
    return git("rev-parse", "--short=12", "HEAD").stdout.strip()


def sources() -> str:
    """What the last commit has of the package and of its tests: hashes of files and folders."""
    listed = git("ls-tree", "HEAD", "zenflow_compile", "tests/", "examples", "benchmarks").stdout
    return "\n".join(line for line in listed.splitlines() if not line.endswith("tests/mutants"))
