"""The study's tables, for the terminal and for the documentation, from the rows of the results file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.console import Console
from rich.table import Table

from benchmarks.convergence_study.claims import Losses, Paired, gather, judge
from benchmarks.convergence_study.outcomes import Outcomes
from benchmarks.convergence_study.plan import PHASES, REFERENCE, RULES, Phase, Study, reference_run, sweep

TITLES: Mapping[Phase, str] = MappingProxyType({"scratch": "from scratch", "finetune": "fine-tuning"})


def report(study: Study, outcomes: Outcomes, phases: Sequence[Phase], seeds: Sequence[int], console: Console) -> bool:
    """Print losses, paired differences and verdicts; True if every claim was measured and holds."""
    verdicts = []
    for phase in phases:
        losses = gather(study, outcomes, phase, seeds)
        console.print(_rich(study, phase, losses, seeds))
        if context := _context(study, outcomes, phase, seeds[0]):
            console.print(context, highlight=False)
        verdicts += judge(phase, losses, seeds)
        for verdict in judge(phase, losses, seeds):
            console.print(verdict.sentence, highlight=False)
    return all(verdict.holds for verdict in verdicts)


def _rich(study: Study, phase: Phase, losses: Losses, seeds: Sequence[int]) -> Table:
    table = Table(
        title=f"{study.model}, {TITLES[phase]}: validation loss, and difference to {REFERENCE.name} of the same seed"
    )
    table.add_column("rule")
    for seed in seeds:
        table.add_column(f"seed {seed}", justify="right")
    table.add_column("mean difference ± sd", justify="right")
    for rule in RULES[phase]:
        paired = Paired.of(losses[rule.name], losses[REFERENCE.name])
        cells = [_cell(losses[rule.name], seed) for seed in seeds]
        with_difference = [
            f"{cell}\n{paired.absolute[seed]:+.4f}" if seed in paired.absolute else cell
            for seed, cell in zip(seeds, cells, strict=True)
        ]
        table.add_row(rule.name, *with_difference, _difference(paired))
    return table


def markdown(study: Study, outcomes: Outcomes, seeds: Sequence[int]) -> str:
    """Both phases with every seed, their verdicts, and the rates that were tried."""
    parts = []
    for phase in PHASES:
        losses = gather(study, outcomes, phase, seeds)
        config = study.configs[phase]
        lines = [
            f"**{study.model}, {TITLES[phase]}**: {config.steps} steps of {config.batch * config.context} bytes, the "
            f"first {config.warm_up} with a rising rate and synchronous, highest rate {config.lr:g}. "
            f"{_context(study, outcomes, phase, seeds[0])}".rstrip(),
            "",
            f"| rule | {', '.join(f'seed {seed}' for seed in seeds)} | against {REFERENCE.name}, mean ± sd |",
            "| --- | --- | --- |",
        ]
        for rule in RULES[phase]:
            paired = Paired.of(losses[rule.name], losses[REFERENCE.name])
            cells = ", ".join(_cell(losses[rule.name], seed) for seed in (seeds[:1] if rule.one_seed else seeds))
            lines.append(f"| {rule.name} | {cells} | {'' if rule is REFERENCE else _difference(paired)} |")
        lines += ["", *(f"- {verdict.sentence}" for verdict in judge(phase, losses, seeds))]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def summary(study: Study, outcomes: Outcomes, seeds: Sequence[int]) -> str:
    """One row per rule, mean ± sd of both phases."""
    headings = " | ".join(TITLES[phase] for phase in PHASES)
    lines = [f"| against {REFERENCE.name}, mean ± sd over {len(seeds)} seeds | {headings} |", "| --- | --- | --- |"]
    names = dict.fromkeys(rule.name for phase in reversed(PHASES) for rule in RULES[phase] if rule is not REFERENCE)
    gathered = {phase: gather(study, outcomes, phase, seeds) for phase in PHASES}
    for name in names:
        cells = [
            _difference(Paired.of(losses[name], losses[REFERENCE.name])) if name in losses else ""
            for losses in gathered.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(losses: Mapping[int, float], seed: int) -> str:
    return f"{losses[seed]:.4f}" if seed in losses else "-"


def _difference(paired: Paired) -> str:
    """Mean ± standard deviation; the number of seeds where that does not exist."""
    if not paired.relative:
        return "-"
    spread = f"± {paired.sd:.2%}" if len(paired.relative) > 1 else "(1 seed)"
    return f"{paired.mean:+.2%} {spread}"


def _context(study: Study, outcomes: Outcomes, phase: Phase, seed: int) -> str:
    """Size of the model, where the reference began, and its losses at other rates, as far as they are known."""
    row = outcomes.find(reference_run(study, phase, seed))
    if row is None:
        return ""
    said = [f"{row['parameters'] / 1e6:.2f}M parameters."]
    if "loss_before" in row:
        said.append(f"Loss before fine-tuning: {row['loss_before']:.4f}.")
    tried = {run.config.lr: outcomes.find(run) for run in sweep(study, (phase,), seed)}
    known = {rate: found["validation_loss"] for rate, found in tried.items() if found is not None}
    if len(known) > 1:
        losses = ", ".join(f"{loss:.4f} at {rate:g}" for rate, loss in known.items())
        said.append(f"{REFERENCE.name} of seed {seed} at other rates: {losses}.")
    return " ".join(said)
