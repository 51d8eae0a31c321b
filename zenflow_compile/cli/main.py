"""The command line: ``zenflow-compile run`` trains a program, ``plan`` predicts a run, ``doctor`` measures a machine.

Commands are imported when they are called: ``plan`` needs no torch, which takes seconds to import.
"""

from __future__ import annotations

import argparse
import string
import sys
from collections.abc import Sequence
from typing import Any

from zenflow_compile.options.options import FLAGS, INSTEAD, OPTION_NAMES, OPTIONS

_ROUNDS = 5
_TOKENS = 8192
_UNITS = {"B": 1, "MB": 10**6, "MIB": 2**20, "GB": 10**9, "GIB": 2**30, "TB": 10**12, "TIB": 2**40}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``zenflow-compile`` and ``python -m zenflow_compile``.

    Raises:
        SystemExit: 2 for a bad argument, after a message that names it.
    """
    parser = argparse.ArgumentParser(
        prog="zenflow-compile",
        description="Offload the optimizer of a program, plan offloading, and measure a machine for it.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    plan_parser = commands.add_parser(
        "plan",
        help="predict memory, time and traffic of every policy on given hardware",
        description="Predicts by simulation, for every policy, whether a model fits, the time of a step and its stall. "
        "No GPU is needed.",
    )
    _add_plan_arguments(plan_parser)
    doctor_parser = commands.add_parser(
        "doctor",
        help="measure the hardware that offloading depends on",
        description="Measures memory, links, update kernels and disk of this machine, in about half a minute; first it "
        "compiles the host kernel unless it is cached. Numbers are medians; run nothing else at the same time.",
    )
    _add_doctor_arguments(doctor_parser)
    run_parser = commands.add_parser(
        "run",
        help="train a program without changing it",
        description="Runs a program with torch.optim.AdamW, and torch.optim.Adam without weight decay, replaced by "
        "ZenFlowAdamW with the program's own hyperparameters, other optimizers of PyTorch by ZenFlow with their rule, "
        "and Inductor by the backend zenflow. Options come before the program, whose own arguments come after it.",
        allow_abbrev=False,
    )
    _add_run_arguments(run_parser)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        names = [each.partition("=")[0].lstrip("-").replace("-", "_") for each in unknown]
        remedies = "".join(f"; {name}: {INSTEAD[name]}" for name in names if name in INSTEAD)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{remedies}")
    if options.command == "plan":
        from zenflow_compile.cli import plan

        return plan.run(options, plan_parser)
    if options.command == "run":
        from zenflow_compile.cli import run

        given = list(sys.argv[1:] if arguments is None else arguments)
        if given[len(given) - len(options.arguments) - 1] == "--":  # argparse drops it
            options.arguments.insert(0, "--")
        return run.run(options, run_parser)
    from zenflow_compile.cli import doctor

    return doctor.run(options, doctor_parser)


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="a named model, such as llama2-7b, or the path of a config.json")
    model.add_argument("--params", type=float, metavar="N", help="a Llama-like model of about N parameters, as 7e9")
    model.add_argument("--config", metavar="PATH", help="a Hugging Face config.json")
    model.add_argument("--models", action="store_true", help="every named model: does it fit, and how fast is a step")
    hardware = parser.add_mutually_exclusive_group(required=True)
    hardware.add_argument("--hardware", help="a named machine, such as h200, or measured: this machine")
    hardware.add_argument("--doctor-json", metavar="FILE", help="the output of doctor --json on the machine")
    parser.add_argument(
        "--flops",
        type=float,
        metavar="F",
        help="FLOP/s of training on measured hardware (default: those of a matrix product)",
    )
    parser.add_argument(
        "--device-memory", type=memory_bytes, metavar="B", help="memory of a device, as 24GB (the hardware's)"
    )
    parser.add_argument(
        "--host-memory", type=memory_bytes, metavar="B", help="memory of a node, as 96GB (the hardware's)"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="devices of a node in use (all of the hardware's)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="equal nodes, connected by a network (1)")
    parser.add_argument("--tokens", type=int, default=_TOKENS, help=f"per device and optimizer step ({_TOKENS})")
    parser.add_argument(
        "--sequence", type=int, metavar="N", help="tokens of a sequence (2048, or the model's context if it is shorter)"
    )
    parser.add_argument("--dtype", metavar="{bf16,fp16,fp32}", help="of the weights (the model's own, or bf16)")
    parser.add_argument("--rule", default="AdamW", help="the update rule, such as Lion (AdamW)")
    parser.add_argument("--epoch-tokens", type=float, metavar="N", help="tokens of an epoch, for its hours")
    parser.add_argument(
        "--implicit",
        action="store_true",
        help="optimizer in backward: torch.compile(..., options=...) without an optimizer object",
    )
    recompute = parser.add_mutually_exclusive_group()
    recompute.add_argument(
        "--recompute",
        action="store_true",
        default=None,
        help="recompute activations in the backward, checkpointing every layer (where that makes the fastest step)",
    )
    recompute.add_argument("--no-recompute", action="store_false", dest="recompute", help="keep activations")
    parser.add_argument("--policy", default="auto", help="auto (all policies, and the fastest that fits) or one policy")
    for name, text in FLAGS.items():
        read: dict[str, Any] = {"metavar": "DIR"} if name == "nvme_path" else {"metavar": "X", "type": _value}
        if OPTIONS[name].default is False and name != "offload_weights":
            read = {"action": "store_true"}
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, help=text, **read)
    parser.add_argument(
        "--frontier",
        action="store_true",
        help="search the options that are not given: the least memory without a slower step, and what less costs",
    )
    parser.add_argument("--svg", metavar="FILE", help="with --frontier: draw it; needs the extra plots")
    parser.add_argument("--exact", action="store_true", help="with --frontier or --models: only exact plans")
    parser.add_argument(
        "--bytes",
        action="store_true",
        help="also print bytes per parameter by way to store state and gradients",
    )
    parser.add_argument("--explain", action="store_true", help="also print the equations with their numbers")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, tokens per second")
    parser.add_argument(
        "--trace", metavar="FILE", help="write the timeline of the recommended plan for ui.perfetto.dev"
    )


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", help="path of a Python script, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("--config", metavar="FILE", help="a DeepSpeed JSON, whose optimizer's numbers are not read")
    compiler = parser.add_mutually_exclusive_group()
    compiler.add_argument("--compile", action="store_true", help="compile the model of a program that does not")
    compiler.add_argument("--no-compile", action="store_true", help="leave the program's torch.compile alone")
    parser.add_argument("--keep-others", action="store_true", help="replace torch.optim.AdamW alone")
    parser.add_argument("--report", action="store_true", help="print zf.profile()'s report at the end")
    parser.add_argument("--live", action="store_true", help="show the last steps while the program trains")
    parser.add_argument("--dry-run", action="store_true", help="say what is replaced, and end at the first step")
    for name in OPTION_NAMES:
        read: dict[str, Any] = {"metavar": "X", "type": _value}
        if isinstance(OPTIONS[name].default, bool) and name != "offload_weights":
            read = {"action": argparse.BooleanOptionalAction}
        text = FLAGS.get(name) or f"{name} of ZenFlowAdamW"
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, help=text, **read)


def memory_bytes(text: str) -> float:
    """Bytes, with or without a unit."""
    size = _value(text)
    if not isinstance(size, (int, float)):
        raise argparse.ArgumentTypeError(f"{text!r} must be bytes, as 24GB, 24GiB or 2.4e10")
    return float(size)


def _value(text: str) -> Any:
    """An integer, also as 1e9, a number with a decimal point, bytes with a unit, several with commas, or the text."""
    if "," in text:
        return tuple(None if each.strip() == "None" else _value(each) for each in text.split(","))
    number = text.rstrip(string.ascii_letters + " ")
    try:
        if not number.strip("+-"):
            return float(text)  # nan and inf
        if unit := text[len(number) :].strip().upper():
            return int(float(number) * _UNITS[unit])
        if number.strip("+-").isdigit():
            return int(number)
        value = float(number)
        return int(value) if "e" in number.lower() and value.is_integer() and value > 1 else value
    except (KeyError, ValueError, OverflowError):
        return text


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="show what each of N processes on this machine has (1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, and bytes or parameters per second")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (cuda where there is one)")
    parser.add_argument(
        "--threads", type=int, nargs="+", metavar="N", help="thread counts (1, 2, 4, ... and all physical cores)"
    )
    parser.add_argument("--megabytes", type=int, metavar="MB", help="memory to measure in (3 times the largest cache)")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"repetitions at most ({_ROUNDS})")
    parser.add_argument("--nvme-path", metavar="DIR", help="also measure the disk of this directory")
