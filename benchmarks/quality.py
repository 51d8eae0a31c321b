"""Does fine-tuning a pretrained model with offloading cost quality? Accuracy on movie reviews, loss on C++ headers.

    python -m benchmarks quality                      runs that have no result yet: hours on two cores
    python -m benchmarks quality --minutes 30         as many of them as begin within so many minutes
    python -m benchmarks quality --task reviews --rule AdamW --rule "zenflow, S = 4"
    python -m benchmarks quality --device cuda --seed 0 --out some.json
    .venv-deepspeed/bin/python -m benchmarks quality  DeepSpeed's ZenFlow, one run of seed 0 at each call
    python -m benchmarks quality --table --page       runs nothing; prints what is known, and writes it into the page

SmolLM2-135M (see ``examples.pretrained``) is fine-tuned on two tasks: on movie reviews as in ``examples.classify``, and
on the next token of the C++ headers that come with PyTorch. Runs of one seed see the same data in the same order. The
reference is ``torch.optim.AdamW`` under Inductor. Writes ``benchmarks/results/quality.json`` after each run.

Differences are paired: by held-out sentence or sequence, averaged over seeds, with the 95% interval of their mean by a
normal approximation, and by seed, with Student's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import zenflow_compile as zf
from benchmarks.common import RESULTS, ROOT, commit, fill, machine, markdown, option_parser, write_results
from benchmarks.systems import deepspeed_system
from examples.classify import held_out_scores, next_logits, rate
from examples.finetune_lm import Sequences, read_text
from examples.language_model import load
from examples.pretrained import MODEL, REVIEWS, fetch
from examples.reviews import Reviews
from zenflow_compile.rules import SGD, AdamW, Lion, Muon, Rule, muon_groups

LR, WEIGHT_DECAY, MAX_NORM = 2e-5, 0.01, 1.0
REFERENCE, FASTER, EXACT = "AdamW", "AdamW at twice the rate", "zero_offload"
RULES: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    FASTER: {},
    EXACT: {"policy": "zero_offload"},
    "zenflow, S = 4": {"update_interval": 4},
    "zenflow, S = 8": {"update_interval": 8},
    "zenflow, S = 4, 1% of the slices": {"update_interval": 4, "topk_ratio": 0.01},
    "zenflow, S = 4, 5% of the slices": {"update_interval": 4, "topk_ratio": 0.05},
    "zenflow, S = 4, one step late": {"update_interval": 4, "staleness": 1},
    "zenflow, S = 4, bf16 moments": {"update_interval": 4, "state_dtype": "bf16"},
    "zenflow, S = 4, 8-bit moments": {"update_interval": 4, "state_dtype": "fp8"},
    "zenflow, S = 4, summed gradients": {"update_interval": 4, "gradient_transfer": "mean"},
    "zenflow, S = 4, int8 gradients": {"update_interval": 4, "gradient_transfer": "int8"},
}
"""Options of ``ZenFlowAdamW`` by rule; the first two are AdamW's."""
OTHERS: dict[str, tuple[Rule, dict[str, Any]]] = {
    **{
        f"{type(rule).__name__}{windows}": (rule, options)
        for rule in (Lion(lr=4e-6, weight_decay=0.05), SGD(lr=0.05))
        for windows, options in (("", {"policy": "resident"}), (", S = 4", {"update_interval": 4}))
    },
    "Muon": (Muon(lr=LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"), {"policy": "zero_offload"}),
}
"""Other optimizers: rules of ``ZenFlow``, and its options; Lion and SGD in windows next to themselves. Muon has the
hidden matrices, AdamW the rest."""
DEEPSPEED = "DeepSpeed's ZenFlow, S = 4"
"""A rule of DeepSpeed's environment, see ``make deepspeed``, which trains under no other one."""

PAGE = ROOT / "docs" / "quality.md"
ON_ALL_SEEDS = (REFERENCE, *[rule for rule in RULES if rule.startswith("zenflow")][:3])
SEEDS = 3
STEPS = 150
_LAST = 20  # steps whose losses are averaged
_COMPILING = 5  # first steps, which are not timed
# Two-sided 95% quantiles of Student's distribution, by degrees of freedom.
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


class Task(Protocol):
    """A training task, and how a trained model is scored."""

    def loss(self, model: Callable[..., Any], step: int) -> Tensor:
        """Loss of the batch of a step."""

    def score(self, model: PreTrainedModel) -> dict[str, list[float]]:
        """By measure, a number of each held-out sentence or sequence, in the same order for all runs."""


class ReviewsTask:
    """Positive or negative, 16 sentences a step; 1,024 others are held out."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, path: Path | None, device: torch.device) -> None:
        self._reviews = Reviews(path or fetch(REVIEWS), tokenizer, tokens=48, held_out=1024, seed=seed)
        self._device = device

    def loss(self, model: Callable[..., Any], step: int) -> Tensor:
        batch = self._reviews.training_batch(step, 16).to(self._device)
        return F.cross_entropy(next_logits(model, batch), batch.labels)

    def score(self, model: PreTrainedModel) -> dict[str, list[float]]:
        correct, losses = held_out_scores(model, self._reviews, self._device)
        return {"accuracy": correct.int().tolist(), "loss": losses.tolist()}


class HeadersTask:
    """The next token, 4 sequences of 128 a step; one sequence in 16 is held out, 128 of them are scored."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, path: Path | None, device: torch.device) -> None:
        text = read_text([] if path is None else [str(path)])
        self._sequences = Sequences(text, tokenizer, 128, batch=4, seed=seed)
        self._device = device

    def loss(self, model: Callable[..., Any], step: int) -> Tensor:
        tokens = self._sequences.batch(step).to(self._device)
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    @torch.no_grad()
    def score(self, model: PreTrainedModel) -> dict[str, list[float]]:
        held_out = self._sequences.held_out[:128].to(self._device)
        return {"loss": [model(input_ids=each, labels=each).loss.item() for each in held_out.split(1)]}


TASKS: dict[str, Callable[[PreTrainedTokenizerBase, int, Path | None, torch.device], Task]] = {
    "reviews": ReviewsTask,
    "headers": HeadersTask,
}


def fine_tune(
    compiled: Callable[..., Any],
    model: PreTrainedModel,
    task: Task,
    optimizer: torch.optim.Optimizer,
    steps: int,
    after_backward: Callable[[int], None] = lambda step: None,
) -> tuple[list[float], list[float]]:
    """Train ``model`` as ``compiled``. Returns the loss of each step, and its seconds.

    Args:
        after_backward: called with the number of the step before its gradients are clipped.
    """
    scheduler = LambdaLR(optimizer, lambda step: rate(step, steps))
    losses, times = [], []
    for step in range(steps):
        since = time.perf_counter()
        loss = task.loss(compiled, step)
        loss.backward()
        after_backward(step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - since)
    return losses, times


@dataclass(frozen=True)
class Run:
    """One of the runs that the tables are made of.

    Attributes:
        task, rule, seed: see ``TASKS``, ``RULES`` and ``OTHERS``.
        steps: optimizer steps.
        inner: what compiles the graphs.
        model, data: instead of SmolLM2-135M, and of the task's sentences or text.
        device: that trains.
    """

    task: str
    rule: str
    seed: int
    steps: int = STEPS
    inner: str = "inductor"
    model: str | None = None
    data: str | None = None
    device: str = "cpu"

    def perform(self) -> dict[str, Any]:
        """Train, and return a row of the results."""
        begin = time.perf_counter()
        torch.compiler.reset()
        model, tokenizer = load(self.model or fetch(MODEL), torch.float32)
        device = torch.device(self.device)
        model.to(device)
        task = TASKS[self.task](tokenizer, self.seed, None if self.data is None else Path(self.data), device)
        losses, times = self._train(model, task)
        row = asdict(self) | {
            "commit": commit(),
            "train_loss": round(statistics.fmean(losses[-_LAST:]), 5),
            "step_s": round(statistics.fmean(times[_COMPILING:] or times), 3),
            "seconds": round(time.perf_counter() - begin, 1),
            "machine": machine(),
            "scores": {name: [round(each, 5) for each in values] for name, values in task.score(model).items()},
        }
        if self.rule == DEEPSPEED:
            deepspeed_system.end()
        return row

    def _train(self, model: PreTrainedModel, task: Task) -> tuple[list[float], list[float]]:
        """The loss of each step, and its seconds."""
        if self.rule == DEEPSPEED:
            return fine_tune_with_deepspeed(model, task, self)
        optimizer: Any
        resident = self.rule in (REFERENCE, FASTER)
        if resident:
            lr = 2 * LR if self.rule == FASTER else LR
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)
            compiled = torch.compile(model, backend="inductor" if self.inner == "inductor" else "aot_eager")
        else:
            optimizer = make_optimizer(self.rule, model)
            compiled = torch.compile(model, backend="zenflow", options={"inner": self.inner})
        found = fine_tune(compiled, model, task, optimizer, self.steps)
        if not resident:
            optimizer.close()
        return found


def make_optimizer(rule: str, model: PreTrainedModel) -> zf.ZenFlow:
    """Of one of ``OTHERS`` or of ``RULES``."""
    if rule in OTHERS:
        other, options = OTHERS[rule]
        if isinstance(other, Muon):
            return zf.ZenFlow(muon_groups(model, other), AdamW(lr=LR, weight_decay=WEIGHT_DECAY), **options)
        return zf.ZenFlow(model.named_parameters(), other, **options)
    return zf.ZenFlowAdamW(model.named_parameters(), lr=LR, weight_decay=WEIGHT_DECAY, **RULES[rule])


def fine_tune_with_deepspeed(model: PreTrainedModel, task: Task, run: Run) -> tuple[list[float], list[float]]:
    """As ``fine_tune``, by an engine of DeepSpeed, which clips and steps by itself.

    Its windows count as accumulated gradients, by which it would change a scheduler's rate once per window: the rate is
    set at each step instead. It clips the accumulated gradients, and not those of the selected columns; what it has
    accumulated since the last window is lost at the end. The caller calls ``deepspeed_system.end``.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed only counts with it
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": deepspeed_system.zero_optimization(run.device, windows=(0.1, 4)),
        "gradient_clipping": MAX_NORM,
    }
    engine = deepspeed_system.initialize(model, config, device=run.device, alone=True)
    if run.inner == "inductor":
        engine.compile()
    losses, times = [], []
    for step in range(run.steps):
        since = time.perf_counter()
        for group in engine.optimizer.param_groups:
            group["lr"] = LR * rate(step, run.steps)
        engine.optimizer._sync_selective_optimizer_lr()  # else only `step` does, after the selected columns' update
        loss = task.loss(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - since)
    return losses, times


def runs(**settings: Any) -> list[Run]:
    """All runs, those of the first seed first; ``settings``: other attributes of ``Run``."""
    found = [
        Run(task, rule, seed, **settings)
        for seed in range(SEEDS)
        for task in TASKS
        for rule in (*RULES, *OTHERS, DEEPSPEED)
        if seed == 0 or rule in ON_ALL_SEEDS
    ]
    return sorted(found, key=lambda run: (run.rule not in ON_ALL_SEEDS, run.seed))


@dataclass(frozen=True)
class Difference:
    """A rule's mean less the reference's, with half of its 95% interval over items, and over seeds if there are two."""

    mean: float
    over_items: float
    over_seeds: float | None

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Difference:
        """Of a rule's and the reference's numbers, by seed."""
        by_seed = [torch.tensor(ours).double() - torch.tensor(theirs).double() for ours, theirs in pairs]
        items = torch.stack(by_seed).mean(0)
        means = [each.mean().item() for each in by_seed]
        over_seeds = None
        if len(means) > 1:
            over_seeds = _STUDENT[len(means) - 1] * statistics.stdev(means) / math.sqrt(len(means))
        return cls(items.mean().item(), 1.96 * items.std().item() / math.sqrt(len(items)), over_seeds)


def table(rows: Sequence[dict[str, Any]], task: str, measure: str, where: str) -> Table:
    """One row per rule of what is known of a task's measure; a rule counts on the seeds that the reference has, too.

    Where it has none, means stand alone.

    Args:
        rows: of one device; where: its name.
    """
    found = {(row["rule"], row["seed"]): row for row in rows if row["task"] == task}
    compared = any(rule == REFERENCE for rule, _ in found)
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=f"{task}: {measure}, {where}")
    made.add_column("rule")
    for heading in ("seeds", "mean", "less AdamW", "95% over items", "over seeds"):
        made.add_column(heading, justify="right")
    scale, form = (100, "{:.2f}%") if measure == "accuracy" else (1, "{:.4f}")
    for rule in (*RULES, *OTHERS, DEEPSPEED):
        mine = [
            row for (name, seed), row in found.items() if name == rule and (not compared or (REFERENCE, seed) in found)
        ]
        if not mine:
            continue
        mean = statistics.fmean(statistics.fmean(row["scores"][measure]) for row in mine)
        cells = [str(len(mine)), form.format(scale * mean)]
        if rule != REFERENCE and compared:
            pairs = [(row["scores"][measure], found[REFERENCE, row["seed"]]["scores"][measure]) for row in mine]
            less = Difference.of(pairs)
            signed = form.replace("{:", "{:+")
            cells += [signed.format(scale * less.mean), "± " + form.format(scale * less.over_items)]
            cells.append("-" if less.over_seeds is None else "± " + form.format(scale * less.over_seeds))
        else:
            cells += ["-"] * 3
        made.add_row(rule, *cells)
    return made


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """A table of each task's measures that are known, by device."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(trained_on(row), []).append(row)
    return [
        table(group, task, measure, where)
        for where, group in groups.items()
        for task in TASKS
        for measure in next((row["scores"] for row in group if row["task"] == task), ())
    ]


def trained_on(row: Mapping[str, Any]) -> str:
    """The name of a row's device."""
    name: str = row["machine"]["cpu" if row["device"] == "cpu" else "device"]
    return name


def page(rows: Sequence[dict[str, Any]]) -> str:
    """What docs/quality.md has of the results."""
    return "\n".join(map(markdown, tables(rows)))


def known(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file; none if there is none."""
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def add_run_options(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add the options of benchmarks that fine-tune on the tasks; ``steps``: the default of a run."""
    parser.add_argument("--task", choices=tuple(TASKS), action="append", help="only this one")
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help="of a run (%(default)s)")
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor", help="%(default)s")
    parser.add_argument("--model", metavar="PATH", help="another one than SmolLM2-135M")
    parser.add_argument("--data", metavar="PATH", help="another file of sentences, or of text, of one --task")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here, help="%(default)s here")
    parser.add_argument("--table", action="store_true", help="run nothing")


def check_run_options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the program if a file of data is given for more than one task."""
    if given.data is not None and len(given.task or TASKS) != 1:
        parser.error(f"--data={given.data} is of one task: give --task {' or --task '.join(TASKS)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Perform what has no result yet, and print the tables."""
    parser = option_parser("quality", __doc__)
    parser.add_argument("--rule", choices=(*RULES, *OTHERS, DEEPSPEED), action="append", help="only this one")
    parser.add_argument("--seed", type=int, choices=range(SEEDS), action="append", help="only this one")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="begin no run later than that")
    add_run_options(parser, STEPS)
    parser.add_argument("--page", action="store_true", help="also write the tables into docs/quality.md")
    given = parser.parse_args(arguments)
    check_run_options(parser, given)
    if given.steps < 1 or not given.minutes >= 0:
        parser.error(f"--steps={given.steps} must be at least 1, and --minutes={given.minutes} at least 0")
    path = given.out or RESULTS / "quality.json"
    with_deepspeed = importlib.util.find_spec("deepspeed") is not None
    console, begin = Console(), time.monotonic()
    rows = known(path)
    settings = {name: getattr(given, name) for name in ("steps", "inner", "model", "data")}
    for run in [] if given.table else runs(**settings, device=given.device):
        chosen = run.task in (given.task or TASKS) and run.rule in (given.rule or (*RULES, *OTHERS, DEEPSPEED))
        chosen = chosen and run.seed in (given.seed or range(SEEDS)) and (run.rule == DEEPSPEED) == with_deepspeed
        if not chosen or any(asdict(run).items() <= row.items() for row in rows):
            continue
        if time.monotonic() - begin > 60 * given.minutes:
            break
        rows.append(run.perform())
        write_results("quality", rows, out=path)
        console.print(f"{run.task}, {run.rule}, seed {run.seed}: {rows[-1]['seconds']:.0f} s", highlight=False)
        if with_deepspeed:
            break  # it trains once in a process
    alike = [row for row in rows if settings.items() <= row.items()]
    for each in tables(alike):
        console.print(each)
    if given.page:
        fill(PAGE, "quality", page(alike))
    return 0


if __name__ == "__main__":
    sys.exit(main())
