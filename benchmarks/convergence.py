"""How far does every policy's training lie from AdamW's? Paired runs over seeds, from scratch and fine-tuning.

    python -m benchmarks convergence                  10M parameters, three seeds: about an hour on one core
    python -m benchmarks convergence --resume         go on where it was cut off
    python -m benchmarks convergence --again "zenflow, S = 8"    the same, with a rule whose code has changed
    python -m benchmarks convergence --model tiny     the model of examples.train_gpt
    python -m benchmarks convergence --tables         write what is in the results file into the documents

For every seed: AdamW on the device (the reference), zenflow with its defaults and windows of 2, 4 and "auto" steps, in
fine-tuning 8, too, synchronous while the rate warms up. Runs of one seed share initial weights and data, so their
difference is the rule's doing. ``zero_offload``, which is exact, and ``staleness=1``, which is known to be bad from
scratch, run on the first seed only; the latter shows that the measurement would notice: without it, "no difference"
might only mean "no resolution". Fine-tuning continues each seed's reference on C++ headers at a low rate, with fresh
moments. Writes ``benchmarks/results/convergence.json`` after every run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from benchmarks.common import fill, option_parser
from benchmarks.convergence_study.outcomes import Outcomes, Texts, checkpoint, perform, phase_text
from benchmarks.convergence_study.plan import PHASES, RULES, STUDIES, Run, Study, plan, sweep
from benchmarks.convergence_study.tables import markdown, report, summary
from examples.train_gpt import share_cores

ROOT = Path(__file__).parents[1]
CHECKPOINTS = ROOT / "runs" / "convergence"


def measure(
    runs: Sequence[Run], outcomes: Outcomes, folder: Path, console: Console, *, texts: Texts = phase_text
) -> None:
    """Perform the runs that have no outcome yet, or whose checkpoint is gone from ``folder`` and others continue it."""
    continued = {run.start.folder() for run in runs if run.start}
    for run in runs:
        keep = run.folder() in continued
        row = outcomes.find(run)
        if row is None or (keep and checkpoint(run, folder) is None):
            row = perform(run, folder, keep=keep, texts=texts)
            outcomes.add(run, row)
        console.print(
            f"seed {run.config.seed}, {run.phase}, {run.rule.name}, rate {run.config.lr:g}: "
            f"validation loss {row['validation_loss']:.4f}, {row['seconds']:.0f} s",
            highlight=False,
        )


def on_device(study: Study, device: str, inner: str) -> Study:
    """``study`` on ``device``, by the name of what is there, and with ``inner`` as the compiler of its graphs."""
    configs = {phase: replace(config, device=device, inner=inner) for phase, config in study.configs.items()}
    named = {phase: replace(config, device=str(config.torch_device())) for phase, config in configs.items()}
    return replace(study, configs=MappingProxyType(named))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; exits with 1 if a claim does not hold."""
    names = tuple(dict.fromkeys(rule.name for phase in PHASES for rule in RULES[phase]))
    parser = option_parser("convergence", __doc__)
    parser.add_argument("--model", choices=tuple(STUDIES), default="10m", help="%(default)s")
    parser.add_argument("--phase", choices=(*PHASES, "both"), default="both", help="%(default)s")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1 (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep what the results file has of this model")
    parser.add_argument(
        "--again",
        action="append",
        choices=names,
        metavar="RULE",
        help="as --resume, but run this rule again, and what continues its runs",
    )
    parser.add_argument("--sweep", action="store_true", help="at the end, try the reference at other rates")
    parser.add_argument("--tables", action="store_true", help="run nothing, fill the tables in docs")
    parser.add_argument("--inner", choices=("eager", "inductor"), default="eager", help="%(default)s")
    parser.add_argument("--device", default="auto", help="CUDA where there is one")
    given = parser.parse_args(arguments)
    if given.seeds < 1:
        parser.error(f"--seeds {given.seeds} must be at least 1")
    seeds = range(given.seeds)
    phases = PHASES if given.phase == "both" else (given.phase,)
    study = on_device(STUDIES[given.model], given.device, given.inner)
    outcomes = Outcomes.read(given.out)
    console = Console()
    if given.tables:
        fill(ROOT / "docs" / "convergence.md", "convergence", markdown(study, outcomes, seeds))
        fill(ROOT / "docs" / "guide" / "benchmarks.md", "convergence", summary(study, outcomes, seeds))
    else:
        outcomes.forget(given.model, given.again or (() if given.resume else names))
        share_cores(study.configs["scratch"].torch_device())
        runs = [*plan(study, phases, seeds), *(sweep(study, phases, seeds[0]) if given.sweep else ())]
        measure(runs, outcomes, CHECKPOINTS, console)
    return 0 if report(study, outcomes, phases, seeds, console) else 1


if __name__ == "__main__":
    sys.exit(main())
