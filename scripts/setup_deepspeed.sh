#!/usr/bin/env bash
# Make the virtual environment in which `python -m benchmarks peers` and `host_adam` run DeepSpeed. It is
# separate from the project's own: DeepSpeed is a baseline, not a dependency.
#
#   scripts/setup_deepspeed.sh [DIRECTORY]        (default: .venv-deepspeed)
#
# DeepSpeed's ops are not built here: `cpu_adam` builds itself with g++ at its first use (about a minute), for which it
# needs ninja, and is then cached under ~/.cache/torch_extensions.
#
# Variables a user may set:
#   BASE_PYTHON        interpreter to build on (default: that of .venv, else python3). If nvidia-smi finds a device, a
#                      CUDA build of torch that the interpreter has is used (--system-site-packages)
#   TORCH_VERSION      PyTorch to install otherwise (default: 2.13.0)
#   TORCH_INDEX_URL    index to take PyTorch from, for example PyTorch's own CPU wheel index
#   DEEPSPEED_VERSION  (default: 0.19.6; 0.19.7 and 0.19.8 scramble the model's weights under ZenFlow)
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${1:-.venv-deepspeed}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

command -v g++ >/dev/null 2>&1 || fail "DeepSpeed's cpu_adam needs g++; install it"

has_cuda_device() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q .; }

base="${BASE_PYTHON:-}"
if [ -z "$base" ]; then base="$([ -x .venv/bin/python ] && readlink -f .venv/bin/python || command -v python3)"; fi

if [ ! -x "$venv/bin/python" ]; then
    if has_cuda_device && "$base" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        "$base" -m venv --system-site-packages "$venv"
    else
        "$base" -m venv "$venv"
    fi
fi
python="$venv/bin/python"

if ! "$python" -c 'import torch' 2>/dev/null; then
    request=("torch==${TORCH_VERSION:-2.13.0}")
    [ -z "${TORCH_INDEX_URL:-}" ] || request+=(--index-url "$TORCH_INDEX_URL")
    if ! has_cuda_device; then
        # As in setup_env.sh: a dry run of pip 23.3 or newer reads metadata only and downloads no wheel.
        "$python" -m pip install --quiet --upgrade 'pip>=23.3'
        report="$(mktemp)"
        trap 'rm -f "$report"' EXIT
        "$python" -m pip install --quiet --dry-run --report "$report" "${request[@]}"
        "$python" scripts/refuse_cuda_build.py "$report" ||
            fail "pip would install a CUDA build of torch, and there is no CUDA device; set TORCH_INDEX_URL to a CPU index"
    fi
    say "installing ${request[0]}"
    "$python" -m pip install --quiet "${request[@]}"
fi

"$python" -c 'import torch; print(f"torch=={torch.__version__}")' >"$venv/torch-constraint.txt"
say "installing DeepSpeed for $(cat "$venv/torch-constraint.txt")"
# Without build isolation DeepSpeed's setup.py sees the installed torch, but needs its build tools installed.
"$python" -m pip install --quiet setuptools wheel ninja numpy py-cpuinfo
DS_BUILD_OPS=0 "$python" -m pip install --quiet --no-build-isolation --constraint "$venv/torch-constraint.txt" \
    "deepspeed==${DEEPSPEED_VERSION:-0.19.6}"
# The benchmarks import psutil, transformers for models such as that of `peers --model qwen2.5-3b`, and for `quality`
# what reads a GGUF file and prints tables.
"$python" -m pip install --quiet --constraint "$venv/torch-constraint.txt" psutil 'transformers>=5,<6' \
    accelerate gguf rich
"$python" -c 'import deepspeed; print("deepspeed", deepspeed.__version__)'
