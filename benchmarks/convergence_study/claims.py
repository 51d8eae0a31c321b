"""Paired statistics over seeds, and what they say about the study's claims."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.convergence_study.outcomes import Outcomes
from benchmarks.convergence_study.plan import CONTROL, REFERENCE, RULES, Phase, Rule, Study, plan

LIMIT = 0.01
"""A rule that is known to be bad must end above the reference by more than this share of its validation loss."""

Losses = Mapping[str, Mapping[int, float]]
"""Validation loss, in nats per byte, by rule's name and seed; seeds that have not run are left out."""


@dataclass(frozen=True, slots=True)
class Paired:
    """Differences of one rule to the reference of the same seed, which shares initial weights and data.

    Attributes:
        absolute: by seed, in nats per byte.
        relative: by seed, as shares of the reference's loss.
    """

    absolute: Mapping[int, float]
    relative: Mapping[int, float]

    @classmethod
    def of(cls, losses: Mapping[int, float], references: Mapping[int, float]) -> Paired:
        """Pair losses with the reference losses of the same seeds; a seed that lacks either is left out."""
        absolute = {seed: losses[seed] - references[seed] for seed in losses if seed in references}
        return cls(absolute, {seed: d / references[seed] for seed, d in absolute.items()})

    @property
    def mean(self) -> float:
        """Mean relative difference; not a number without seeds."""
        return statistics.fmean(self.relative.values()) if self.relative else float("nan")

    @property
    def sd(self) -> float:
        """Standard deviation of the relative differences; not a number for one seed."""
        return statistics.stdev(self.relative.values()) if len(self.relative) > 1 else float("nan")

    @property
    def upper(self) -> float:
        """Two standard errors above the mean; not a number for one seed."""
        return self.mean + 2 * self.sd / len(self.relative) ** 0.5 if len(self.relative) > 1 else float("nan")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one claim; ``holds`` is None where a run is missing."""

    holds: bool | None
    sentence: str


def gather(study: Study, outcomes: Outcomes, phase: Phase, seeds: Sequence[int]) -> Losses:
    """The losses of one phase, as far as they have been measured."""
    losses: dict[str, dict[int, float]] = {rule.name: {} for rule in RULES[phase]}
    for run in plan(study, (phase,), seeds):
        row = outcomes.find(run) if run.phase == phase else None
        if row is not None:
            losses[run.rule.name][run.config.seed] = row["validation_loss"]
    return losses


def judge(phase: Phase, losses: Losses, seeds: Sequence[int]) -> list[Verdict]:
    """One verdict per claimed rule; from scratch, one more on whether the measurement would notice a bad rule."""
    judged = [rule for rule in RULES[phase] if rule.claimed or rule is CONTROL]
    pairs = {rule.name: Paired.of(losses[rule.name], losses[REFERENCE.name]) for rule in judged}
    verdicts = []
    for rule in RULES[phase]:
        if rule.claimed:
            expected = seeds[:1] if rule.one_seed else seeds
            verdicts.append(_near(rule, pairs[rule.name], expected))
    if phase == "scratch":
        claimed = [pairs[rule.name] for rule in RULES[phase] if rule.claimed and not rule.one_seed]
        verdicts.append(_resolution(pairs[CONTROL.name], claimed))
    return verdicts


def _near(rule: Rule, paired: Paired, seeds: Sequence[int]) -> Verdict:
    if set(paired.relative) != set(seeds):
        return Verdict(None, f"{rule.name}: NOT MEASURED on every seed.")
    holds = paired.mean <= rule.limit
    bound = f", {paired.upper:+.2%} with two standard errors" if len(seeds) > 1 else ", one seed"
    return Verdict(
        holds,
        f"{rule.name} ends {paired.mean:+.2%} from {REFERENCE.name}{bound}; at most {rule.limit:+.1%} is wanted: "
        f"{'holds' if holds else 'FAILS'}.",
    )


def _resolution(control: Paired, claimed: Sequence[Paired]) -> Verdict:
    """The control lies beyond the limit, and above every claimed rule by more than twice the spread over seeds."""
    if not control.relative or not all(paired.relative for paired in claimed):
        return Verdict(None, f"{CONTROL.name}: NOT MEASURED, so that nothing is known of the resolution.")
    worst = max(paired.mean for paired in claimed)
    spreads = [paired.sd for paired in claimed if len(paired.relative) > 1]
    noise = 2 * max(spreads) if spreads else 0.0
    visible = control.mean > max(LIMIT, worst + noise)
    said = f"twice the spread over seeds is {noise:.2%}" if spreads else "one seed shows no spread"
    return Verdict(
        visible,
        f"{CONTROL.name}, known to be bad, ends {control.mean:+.2%} from {REFERENCE.name}, the worst claimed rule "
        f"{worst:+.2%}, and {said}: "
        f"{'the measurement sees a bad rule' if visible else 'NOT RESOLVED, more seeds or steps are needed'}.",
    )
