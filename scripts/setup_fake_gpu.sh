#!/usr/bin/env bash
# Make the environment in which tests run the real CUDA build of PyTorch on a GPU that is not there, see
# tests/fake_gpu. It needs Linux, g++, Python 3.12 and 3 GB of disk, and no GPU.
#
#   scripts/setup_fake_gpu.sh [DIRECTORY]        (default: .venv-fake-gpu)
#
# Variables a user may set:
#   BASE_PYTHON        interpreter to build on (default: python3.12)
#   TORCH              version of PyTorch, 2.11.0 (default) or 2.13.0; ZENFLOW_COMPILE_FAKE_GPU tells the tests of another
#                      directory than the default
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${1:-.venv-fake-gpu}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

torch="${TORCH:-2.11.0}"
case "$torch" in
    2.11.0) triton=3.6.0 ;;
    2.13.0) triton=3.7.1 ;;
    *) echo "setup: TORCH=$torch: the fake GPU runs 2.11.0 and 2.13.0" >&2; exit 1 ;;
esac

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

command -v g++ >/dev/null 2>&1 || fail "the fake GPU needs g++; install it"

find_python() {
    local each
    for each in "${BASE_PYTHON:-python3.12}" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        if "$each" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            printf '%s' "$each"
            return
        fi
    done
    fail "the CUDA build of PyTorch is run under Python 3.12, and ${BASE_PYTHON:-python3.12} is not; set BASE_PYTHON"
}

if [ ! -x "$venv/bin/python" ]; then
    base="$(find_python)"
    "$base" -m venv "$venv"
fi
python="$venv/bin/python"

installed="$("$python" -c 'import importlib.metadata as m; print(m.version("torch"), m.version("triton"))' 2>/dev/null || true)"
if [ -n "$installed" ] && [ "$installed" != "$torch $triton" ]; then
    fail "$venv has PyTorch and Triton $installed, and not $torch $triton; remove it, or pass another directory"
fi
if [ -z "$installed" ]; then
    say "downloading PyTorch $torch for CUDA 13, Triton and headers: 0.8 GB, 3 GB on the disk"
    # Without their dependencies: libraries of NVIDIA, 2 GB, which stubs replace.
    "$python" -m pip install --quiet --no-deps "torch==$torch" "triton==$triton" 'cuda-bindings>=13.0.3,<13.1' \
        cuda-pathfinder nvidia-cuda-runtime==13.0.96
fi
# What PyTorch, this package and its tests import. Triton 3.6's interpreter fails with a later numpy.
"$python" -m pip install --quiet filelock typing-extensions sympy networkx jinja2 fsspec 'setuptools<82' 'numpy<2.4' psutil \
    rich pytest pytest-timeout pytest-xdist expecttest 'transformers>=5,<6'
say "building the fake GPU"
"$python" -m tests.fake_gpu.build
"$python" -m pip install --quiet --no-deps --no-build-isolation --editable .
