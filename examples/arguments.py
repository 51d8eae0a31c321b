"""The command line of ``examples.train_gpt``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from examples.checkpoint import load_checkpoint
from examples.settings import TrainConfig
from zenflow_compile.rules import KINDS

POLICIES = ("resident", "zero_offload", "zenflow")
DEFAULT_OUT = "runs/train_gpt"
_COUNTS = (
    "steps",
    "batch",
    "context",
    "layers",
    "width",
    "warm_up",
    "seed",
    "staleness",
    "evaluate_every",
    "save_every",
)


def parse(arguments: Sequence[str] | None = None) -> tuple[TrainConfig, bool]:
    """Read the command line. Returns the settings, and whether to compare all policies."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_gpt",
        description="Train a small GPT on the source of Python's standard library.",
        argument_default=argparse.SUPPRESS,
    )
    defaults = TrainConfig()
    parser.add_argument("--compare", action="store_true", default=False, help="train every policy and print one table")
    parser.add_argument("--policy", choices=POLICIES, help=f"where optimizer state lives ({defaults.policy})")
    parser.add_argument(
        "--optimizer", choices=(*KINDS, "Muon"), help=f"update rule, which wants its own --lr ({defaults.optimizer})"
    )
    parser.add_argument("--inner", choices=("inductor", "eager"), help=f"what compiles the graphs ({defaults.inner})")
    for name in _COUNTS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{getattr(defaults, name)}")
    parser.add_argument("--update-interval", type=interval, metavar="N|auto", help=f"{defaults.update_interval}")
    dtypes = ("fp32", "bf16", "fp8")
    parser.add_argument("--state-dtype", choices=dtypes, help=f"of moments on the host ({defaults.state_dtype})")
    parser.add_argument("--lr", type=float, help=f"highest learning rate ({defaults.lr})")
    parser.add_argument(
        "--fsdp",
        action="store_true",
        help="shard the model over the ranks of torchrun; its checkpoints are folders that load on any number of them",
    )
    parser.add_argument("--live", action="store_true", help="show the last steps while it trains")
    parser.add_argument("--device", help="for example cpu or cuda:1 (cuda where there is one)")
    parser.add_argument("--out", help=f"folder for checkpoints ({DEFAULT_OUT})")
    parser.add_argument(
        "--start-from", metavar="PATH", help="start with the weights of this checkpoint, and nothing else of it"
    )
    parser.add_argument(
        "--resume", metavar="PATH", help="go on from this checkpoint, with the settings it was made with"
    )
    given = vars(parser.parse_args(arguments))
    comparing: bool = given.pop("compare")
    given.setdefault("out", None if comparing else DEFAULT_OUT)
    try:
        if "resume" not in given:
            return TrainConfig(**given), comparing
        if comparing:
            raise ValueError("--resume continues one run and --compare starts three; use one of them")
        saved = load_checkpoint(given["resume"])["config"]
        config = replace(TrainConfig.of_checkpoint(saved), **given)
        config.must_continue(saved)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    return config, comparing


def interval(text: str) -> int | Literal["auto"]:
    """Read an update interval; raises ``ValueError``, which argparse reports, if it is neither a number nor auto."""
    return "auto" if text == "auto" else int(text)
