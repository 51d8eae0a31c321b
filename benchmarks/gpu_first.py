"""The first ten minutes on a GPU: what is missing, whether training is right, and the step of a 3B model.

    make gpu-first PYTHON=python3                           with the packages that the machine has, without network
    python -m benchmarks gpu_first --tiny --device cpu      a rehearsal, whose times mean nothing

Each line is printed as soon as it is known. In this order: packages and the compiler; ``zenflow-compile doctor``; 20
steps of a six-layer Llama under several policies against ``torch.optim.AdamW``; the step of a Llama with the shapes of
Qwen2.5-3B and 8,192 tokens, next to resident AdamW's. After it: ``make gpu-evidence``.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Nothing else at module level: packages may be missing, and this says which.
if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
_STEPS, _LR = 20, 1e-3
# Of the distance that the weights moved. An update that is lost or late is a twentieth; rounding, which Adam amplifies
# where gradients are near zero, much less.
_NEAR = 0.01
_POLICIES: dict[str, dict[str, Any]] = {
    "zero_offload": {"policy": "zero_offload"},
    "weights in host memory": {"policy": "zero_offload", "offload_weights": 1.0},
    "zenflow, update_interval=1": {"update_interval": 1},
    "zenflow": {},
}
_SYSTEMS = ("forward_backward", "adamw", "zenflow", "zero_offload")
_WARM_UP, _TIMED = 8, 8  # steps: two update windows each
_NEEDED = ("torch", "numpy", "sympy", "rich", "psutil")
_WANTED = {
    "triton": "Inductor compiles nothing for the device, and updates there are slower",
    "cuda.bindings": "each forward waits on the host for late updates (package cuda-bindings)",
    "pytest": "the parts of gpu-evidence that are tests do not run",
}


def missing() -> list[str]:
    """What nothing runs without, a sentence each that says how it comes here without a network."""
    packages = [name for name in _NEEDED if not _has(name)]
    found = []
    if packages:
        version = ".".join(map(str, sys.version_info[:2]))
        found.append(
            f"{', '.join(packages)}: not installed. On a machine with a network and Python {version}: `pip download -d "
            f"wheels {' '.join(packages)}`; here: `pip install --no-index --find-links wheels {' '.join(packages)}`"
        )
    if shutil.which("g++") is None:
        found.append("g++: not installed, and host updates are compiled by it: install the distribution's C++ compiler")
    return found


def _has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def check(device: str) -> bool:
    """Print the state of the installation; whether anything can run."""
    say("== installation")
    lacking = missing()
    for each in lacking:
        say(f"  {each}")
    for name, without in _WANTED.items():
        if device == "cuda" and not _has(name):
            say(f"  {name}: not installed; without it {without}")
    if any(each.startswith(tuple(_NEEDED)) for each in lacking):
        return False
    import torch

    say(f"  torch {torch.__version__}, Python {sys.version.split()[0]}")
    if device == "cuda" and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as error:  # of any kind: the driver's reason is what is wanted
            say(f"  no CUDA device: {error}")
        return False
    return True


def train(
    device: torch.device, options: dict[str, Any] | None, *, tiny: bool, inner: str, count: int = _STEPS
) -> list[torch.Tensor]:
    """Weights of a six-layer Llama after some steps, on the host; ``options`` None: ``torch.optim.AdamW``."""
    import torch

    import zenflow_compile as zf
    from benchmarks.systems.llama import Llama, LlamaConfig

    torch.manual_seed(0)
    torch.compiler.reset()
    width = 64 if tiny else 512
    config = LlamaConfig(
        vocabulary=16 * width, width=width, intermediate=2 * width, layers=6, heads=8, key_value_heads=4
    )
    model = Llama(config).to(device)
    optimizer: Any
    if options is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
        run = torch.compile(model, backend="inductor" if inner == "inductor" else "aot_eager")
    else:
        optimizer = zf.ZenFlowAdamW(model.named_parameters(), lr=_LR, **options)
        run = torch.compile(model, backend="zenflow", options={"inner": inner})
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        tokens = torch.randint(config.vocabulary, (2, 65), generator=generator).to(device)
        run(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if options is not None:
        optimizer.flush()
    weights = [param.detach().cpu().clone() for param in model.parameters()]
    if options is not None:
        optimizer.close()
    return weights


def compare(device: str, *, tiny: bool, inner: str) -> bool:
    """Print how far each policy's weights are from AdamW's; whether the exact ones are near."""
    import torch

    say(f"== {_STEPS} steps of a six-layer Llama, fp32, {inner}: distance from AdamW's weights, of what those moved")
    where = torch.device(device)
    try:
        expected = train(where, None, tiny=tiny, inner=inner)
        start = train(where, None, tiny=tiny, inner=inner, count=0)
    except Exception as error:  # of any kind: the steps below are still of interest
        say(f"  torch.optim.AdamW: FAILED, {_first_line(error)}")
        return False
    moved = _distance(expected, start)
    right = True
    for name, options in _POLICIES.items():
        begin = time.perf_counter()
        try:
            found = train(where, options, tiny=tiny, inner=inner)
        except Exception as error:  # of any kind: the other policies are still of interest
            say(f"  {name}: FAILED, {_first_line(error)}")
            right = False
            continue
        apart = _distance(found, expected) / moved if moved else math.nan
        near = apart <= _NEAR  # not so if it is NaN
        if name == "zenflow":
            verdict = ", which collects gradients: not AdamW's"
        else:
            verdict = ", near" if near else ", FAR: of the order of rounding is expected"
            right &= near
        say(f"  {name}: {apart:.2g}{verdict} ({time.perf_counter() - begin:.0f} s)")
    return right


def _distance(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """L2 norm of the difference of all weights."""
    import torch

    squares = [(mine.double() - theirs.double()).square().sum() for mine, theirs in zip(some, others, strict=True)]
    return float(torch.stack(squares).sum().sqrt())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def steps(device: str, *, tiny: bool, inner: str) -> bool:
    """Print the steady step of each system, one after another; whether all have a number."""
    from benchmarks.systems.case import Case
    from benchmarks.systems.process import TrainingWorker, WorkerError
    from zenflow_compile.runtime.host.cores import physical_cores

    cores = tuple(core.logical for core in physical_cores())
    model, tokens = ("llama-tiny", 32) if tiny else ("qwen2.5-3b", 8192)
    dtype = "bf16" if device == "cuda" else "fp32"
    say(f"== a step of {model}, {tokens:,} tokens, {dtype}: systems one after another, {_TIMED} steps each")
    reference, complete = None, True
    for system in _SYSTEMS:
        case = Case(
            system=system,
            model=model,
            tokens=tokens,
            dtype=dtype,
            device=device,
            cores=cores,
            threads=len(cores) if device == "cuda" else 1,
            inner=inner,
        )
        try:
            with TrainingWorker(case, warm_up=_WARM_UP) as worker:
                ready = worker.start()["start_seconds"]
                mean, _ = worker.run(settle=1, steps=_TIMED)
                peak = worker.ask("facts")["device_peak_mib"]
        except WorkerError as error:
            say(f"  {system}: FAILED, {error}")
            complete = False
            continue
        reference = mean if system == "adamw" else reference
        of = "" if reference is None else f", {mean / reference:.2f} x resident AdamW"
        memory = "" if peak is None else f", {peak / 1e3 * 1.048576:.1f} GB of the device"
        say(f"  {system}: {mean:.1f} ms{of}{memory} (ready after {ready:.0f} s)")
    return complete


def main(arguments: Sequence[str] | None = None) -> int:
    """Everything in turn; 1 if something is missing, far from AdamW, or without a number."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu_first", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to rehearse")
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor", help="(%(default)s)")
    given = parser.parse_args(arguments)
    if given.device == "cpu" and not given.tiny:
        parser.error("--device cpu needs --tiny: the shapes are those of a GPU's work")
    if not check(given.device):
        return 1
    say("== zenflow-compile doctor")
    doctor = subprocess.run([sys.executable, "-m", "zenflow_compile", "doctor"], cwd=ROOT, check=False)
    right = compare(given.device, tiny=given.tiny, inner=given.inner)
    complete = steps(given.device, tiny=given.tiny, inner=given.inner)
    say("next: make gpu-evidence" if right and complete else "something failed, see above")
    return int(bool(doctor.returncode) or not right or not complete)


if __name__ == "__main__":
    sys.exit(main())
