"""Read pip's installation report; exit with 1 if it would install CUDA libraries."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

# What PyTorch's CUDA builds require: "nvidia-cublas", "nvidia-cudnn-cu13", "cuda-bindings", "cuda-toolkit"
_CUDA_PACKAGE = re.compile(r"(nvidia|cuda)[-_]", re.IGNORECASE)


def main(report: str) -> int:
    """``report`` is the path of the JSON that ``pip install --dry-run --report`` wrote."""
    packages = [entry["metadata"]["name"] for entry in json.loads(Path(report).read_text())["install"]]
    cuda_packages = sorted(name for name in packages if _CUDA_PACKAGE.match(name))
    if cuda_packages:
        print(f"would install: {', '.join(cuda_packages)}", file=sys.stderr)
    return 1 if cuda_packages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
