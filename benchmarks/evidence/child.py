"""Measures one part; ``gpu_evidence`` starts it.

    python -m benchmarks.evidence.child PART DEVICE TINY FOLDER ROWS [DOCTOR]

Appends one JSON line per row to the file ROWS, as soon as there is one. DOCTOR is a file with the output of
``zenflow-compile doctor --json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.evidence.parts import PARTS
from benchmarks.evidence.setting import Row, Setting


def main() -> None:
    """Entry point. An error is this process's traceback and exit status."""
    name, device, tiny, folder, path, *doctor = sys.argv[1:]
    findings = json.loads(Path(doctor[0]).read_text()) if doctor else None
    with Path(path).open("a") as rows:

        def emit(row: Row) -> None:
            rows.write(json.dumps(row) + "\n")
            rows.flush()

        PARTS[name].measure(Setting(device, tiny == "tiny", findings, Path(folder)), emit)


if __name__ == "__main__":
    main()
