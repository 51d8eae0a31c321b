#!/usr/bin/env bash
# Make the virtual environment that the Makefile's targets run in, and install this project into it.
#
#   scripts/setup_env.sh [DIRECTORY]        (default: .venv)
#
# Variables a user may set:
#   BASE_PYTHON      interpreter to build the environment from (default: the first of python3, python3.11 to python3.14
#                    that is new enough)
#   TORCH_VERSION    PyTorch to install where none comes with the machine (default: 2.13.0)
#   TORCH_INDEX_URL  index to take PyTorch from, for example PyTorch's own CPU wheel index
#
# PyTorch is installed first and then pinned: a bare "torch" in another package's requirements would install a newer
# build, on most package indexes a CUDA build of several gigabytes. Without a CUDA device such a build is refused.
#
# timm requires torchvision. Where the index has no build of it for the installed PyTorch, importing it fails, and with
# it Transformers and Lightning. This script then moves it to a folder of its own, where timm's tests find its Python
# parts.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${1:-.venv}"
torch_version="${TORCH_VERSION:-2.13.0}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

has_cuda_device() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q .; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

choose_base_python() {
    local candidate
    for candidate in ${BASE_PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        if new_enough "$candidate"; then echo "$candidate"; return; fi
    done
    fail "Python 3.11 or newer is needed; set BASE_PYTHON to such an interpreter"
}

# Whether an interpreter has a PyTorch to build on. A GPU image has one that matches its driver. Without a CUDA device
# it is used only if the user named the interpreter.
brings_torch() {
    if ! has_cuda_device && [ -z "${BASE_PYTHON:-}" ]; then return 1; fi
    "$1" - "$(has_cuda_device && echo cuda)" >/dev/null 2>&1 <<'PYTHON'
import sys, torch
new_enough = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
sys.exit(not (new_enough and (torch.cuda.is_available() or sys.argv[1] != "cuda")))
PYTHON
}

has_torch() { "$venv/bin/python" -c 'import torch' >/dev/null 2>&1; }

install_torch() {
    local -a request=("torch==$torch_version")
    [ -z "${TORCH_INDEX_URL:-}" ] || request+=(--index-url "$TORCH_INDEX_URL")
    if ! has_cuda_device; then
        # Since pip 23.3 a dry run reads metadata only and downloads no wheel.
        "$venv/bin/python" -m pip install --quiet --upgrade 'pip>=23.3'
        local report
        report="$(mktemp)"
        "$venv/bin/python" -m pip install --quiet --dry-run --report "$report" "${request[@]}" \
            || fail "pip finds no torch $torch_version for this Python; set TORCH_VERSION or TORCH_INDEX_URL"
        if ! "$venv/bin/python" scripts/refuse_cuda_build.py "$report"; then
            rm -f "$report"
            [ -z "$created" ] || rm -rf "$venv"
            fail "this machine has no CUDA device, but pip would install a CUDA build of torch $torch_version." \
                "Set TORCH_INDEX_URL to PyTorch's CPU wheel index, or use an interpreter that has torch (BASE_PYTHON)"
        fi
        rm -f "$report"
    fi
    say "installing torch $torch_version"
    "$venv/bin/python" -m pip install --quiet "${request[@]}"
}

created=""
if [ ! -x "$venv/bin/python" ]; then
    created=yes
    base="$(choose_base_python)"
    if brings_torch "$base"; then
        say "building on the torch that $base has"
        "$base" -m venv --system-site-packages "$venv"
    else
        "$base" -m venv "$venv"
    fi
fi
# pip comes last: an interrupted run may have left an environment without it.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
has_torch || install_torch

separate_broken_torchvision() {
    if "$venv/bin/python" -c 'import torchvision' >/dev/null 2>&1; then return; fi
    local version
    version="$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torchvision"))')"
    say "torchvision $version does not load with this torch: moving it to $venv/torchvision, for timm's tests alone"
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision
    "$venv/bin/python" -m pip install --quiet --no-deps --upgrade --target "$venv/torchvision" "torchvision==$version"
}

constraints="$venv/torch-constraint.txt"
"$venv/bin/python" -c 'import torch; print(f"torch=={torch.__version__}")' >"$constraints"
say "installing zenflow-compile and its dependencies for $(cat "$constraints")"
"$venv/bin/python" -m pip install --quiet --constraint "$constraints" --editable '.[dev,docs,hf,integrations,plots]'
separate_broken_torchvision
# What `make train` fine-tunes. It says why if the packages cannot be had.
"$venv/bin/python" -m examples.pretrained
