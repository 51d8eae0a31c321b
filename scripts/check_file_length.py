"""Fail when a Python file has grown beyond the length at which a reader can hold it in mind."""

from __future__ import annotations

import sys
from pathlib import Path

MAXIMUM_LINES = 450
ROOMS = ("zenflow_compile", "tests", "examples", "benchmarks", "scripts")


def main() -> int:
    """Print every file that is too long; the exit status says whether there was one."""
    root = Path(__file__).resolve().parent.parent
    too_long = []
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MAXIMUM_LINES:
                too_long.append(f"{path.relative_to(root)}: {lines} lines, at most {MAXIMUM_LINES} allowed")
    for complaint in too_long:
        print(f"{complaint}; split it by role", file=sys.stderr)
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
