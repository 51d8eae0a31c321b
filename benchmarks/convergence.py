"""How far does zenflow's training lie from AdamW's? Paired runs over seeds, at equal steps and a tuned rate.

    python -m benchmarks.convergence --seeds 3

For every seed: ``resident`` (AdamW on the device), ``zenflow`` with its defaults (windows of 4 steps, nothing
stale, synchronous while the rate warms up), and ``zenflow`` at ``staleness=1``, a rule known to be bad from
scratch. Runs of one seed share initial weights and data, so their difference is the rule's doing. The last
rule
shows that the measurement would notice: without it, "no difference" might only mean "no resolution".
Writes ``benchmarks/results/convergence.json``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import write_results
from examples.settings import TrainConfig
from examples.stdlib_text import load_text
from examples.train_gpt import share_cores, train

REFERENCE, CANDIDATE, BAD_RULE = "resident", "zenflow", "zenflow, staleness 1"
LIMIT = 0.01
"""Allowed mean distance of the candidate's validation loss above the reference's, as a share."""


@dataclass(frozen=True, slots=True)
class Paired:
    """Differences of one rule to the reference of the same seed; all tuples are in the order of the seeds.

    Attributes:
        absolute: in nats per byte.
        relative: as shares of the reference's loss.
    """

    absolute: tuple[float, ...]
    relative: tuple[float, ...]

    @classmethod
    def of(cls, losses: Sequence[float], references: Sequence[float]) -> Paired:
        """Pair the losses with the reference losses of the same seeds."""
        absolute = tuple(loss - reference for loss, reference in zip(losses, references, strict=True))
        return cls(absolute, tuple(d / r for d, r in zip(absolute, references, strict=True)))

    @property
    def mean(self) -> float:
        """Mean relative difference."""
        return statistics.fmean(self.relative)

    @property
    def sd(self) -> float:
        """Standard deviation of the relative differences; not a number for one seed."""
        return statistics.stdev(self.relative) if len(self.relative) > 1 else float("nan")


def rules(config: TrainConfig) -> dict[str, TrainConfig]:
    """The runs of one seed."""
    return {
        REFERENCE: replace(config, policy="resident"),
        CANDIDATE: replace(config, policy="zenflow"),
        BAD_RULE: replace(config, policy="zenflow", staleness=1),
    }


def measure(config: TrainConfig, seeds: Sequence[int], console: Console) -> dict[str, list[float]]:
    """Validation losses of every rule, in the order of ``seeds``."""
    text = load_text(config.text_bytes)
    losses: dict[str, list[float]] = {rule: [] for rule in rules(config)}
    for seed in seeds:
        for rule, settings in rules(replace(config, seed=seed)).items():
            torch.compiler.reset()  # the last run's model can be freed, and its guards do not count
            result = train(settings, text=text)
            losses[rule].append(result.validation_loss)
            console.print(
                f"seed {seed}, {rule}: validation loss {result.validation_loss:.4f}, {result.seconds:.0f} s",
                highlight=False,
            )
    return losses


def report(losses: Mapping[str, Sequence[float]], seeds: Sequence[int], console: Console) -> bool:
    """Print the paired differences and what they show; True if both claims hold."""
    paired = {rule: Paired.of(values, losses[REFERENCE]) for rule, values in losses.items()}
    table = Table(
        title=f"Validation loss over {len(seeds)} seeds, and difference to {REFERENCE} of the same seed"
    )
    table.add_column("rule")
    for seed in seeds:
        table.add_column(f"seed {seed}", justify="right")
    table.add_column("mean difference ± sd", justify="right")
    for rule, values in losses.items():
        cells = [f"{loss:.4f}\n{d:+.4f}" for loss, d in zip(values, paired[rule].absolute, strict=True)]
        table.add_row(rule, *cells, f"{paired[rule].mean:+.2%} ± {paired[rule].sd:.2%}")
    console.print(table)

    close = paired[CANDIDATE].mean <= LIMIT
    console.print(
        f"{CANDIDATE} ends {paired[CANDIDATE].mean:+.2%} from {REFERENCE}; at most {LIMIT:+.0%} is wanted: "
        f"{'holds' if close else 'FAILS'}."
    )
    pairs = zip(paired[BAD_RULE].relative, paired[CANDIDATE].relative, strict=True)
    extra = [bad - good for bad, good in pairs]
    noise = 2 * statistics.stdev(extra) / len(extra) ** 0.5 if len(extra) > 1 else float("nan")
    visible = statistics.fmean(extra) > noise
    verdict = "the measurement sees a bad rule" if visible else "NOT RESOLVED, more seeds or steps are needed"
    console.print(
        f"{BAD_RULE} ends {statistics.fmean(extra):+.2%} above {CANDIDATE}, "
        f"noise (two standard errors) {noise:.2%}: {verdict}."
    )
    return close and visible


def rows(
    config: TrainConfig, losses: Mapping[str, Sequence[float]], seeds: Sequence[int]
) -> list[dict[str, object]]:
    """One row per rule for the results file."""
    collected: list[dict[str, object]] = []
    for rule, settings in rules(config).items():
        paired = Paired.of(losses[rule], losses[REFERENCE])
        collected.append(
            {
                "rule": rule,
                "seeds": list(seeds),
                "validation_loss": list(losses[rule]),
                "difference": list(paired.absolute),
                "relative_difference": list(paired.relative),
                "mean_relative_difference": paired.mean,
                "sd_relative_difference": paired.sd if len(seeds) > 1 else None,
                "config": asdict(settings),
            }
        )
    return collected


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; exits with 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1 (3)")
    kinds = {"int": int, "float": float, "str": str}
    names = (
        "steps",
        "batch",
        "context",
        "layers",
        "width",
        "lr",
        "warm_up",
        "update_interval",
        "inner",
        "device",
    )
    for field in fields(TrainConfig):
        if field.name in names:
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=kinds[str(field.type)],
                default=field.default,
                help="(%(default)s)",
            )
    given = vars(parser.parse_args(arguments))
    seeds = range(given.pop("seeds"))
    config = TrainConfig(**given)
    config = replace(config, evaluate_every=config.steps, save_every=config.steps)
    console = Console()
    share_cores(config.torch_device())
    losses = measure(config, seeds, console)
    holds = report(losses, seeds, console)
    write_results("convergence", rows(config, losses, seeds))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
