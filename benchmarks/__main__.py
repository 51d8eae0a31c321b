"""Lists the benchmarks, or runs one.

python -m benchmarks                    what there is
python -m benchmarks NAME [options]     one of them; --help lists its options
python -m benchmarks all                every shorter one with its defaults, each in its own process
"""

from __future__ import annotations

import ast
import difflib
import runpy
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
# One needs another checkout, two have a make target of their own, and two take long.
_NOT_IN_ALL = ("before_after", "gpu_first", "gpu_evidence", "concentration", "quality")


def benchmarks() -> dict[str, str]:
    """Name and summary, the first line of the docstring, of every file here that has a ``main``."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        runs = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body)
        if runs and path.stem != "__main__":
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def main() -> int:
    """Entry point; the exit status is the benchmark's, or the number of those that failed under ``all``."""
    known = benchmarks()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        width = max(map(len, known))
        print(__doc__.strip(), *(f"  {each:{width}}  {summary}" for each, summary in known.items()), sep="\n")
        return 0
    if name == "all":
        failed = 0
        for each in (name for name in known if name not in _NOT_IN_ALL):
            print(f"== {each}", flush=True)
            failed += subprocess.run([sys.executable, "-m", "benchmarks", each], check=False).returncode != 0
        return failed
    if name not in known:
        nearest = difflib.get_close_matches(name, [*known, "all"], n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        print(f"no benchmark {name!r}{hint} There are: {', '.join(known)}, all", file=sys.stderr)
        return 2
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
