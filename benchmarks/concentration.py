"""Where is the gradient of a pretrained model, and does it stay there? By matrix, in columns, rows and longer sides.

    python -m benchmarks concentration                   both tasks, 200 steps each: half an hour on two cores
    python -m benchmarks concentration --task reviews    one; results of the other one stay
    python -m benchmarks concentration --table --page    runs nothing; prints what is known, and writes it into the page

SmolLM2-135M is fine-tuned by ``torch.optim.AdamW`` on the tasks of ``benchmarks.quality``. At each step the squared
norms of the columns and of the rows of each matrix's gradient are taken, before clipping. A share is that of the
squared norm of all matrices that a table is about, averaged over the steps.

ZenFlow (arXiv:2505.12242) says that 1% of the columns hold 85 to 90% of it, and that they remain the same ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from benchmarks.common import RESULTS, ROOT, commit, fill, machine, markdown, option_parser, write_results
from benchmarks.quality import (
    LR,
    PAGE,
    TASKS,
    WEIGHT_DECAY,
    add_run_options,
    check_run_options,
    fine_tune,
    known,
    trained_on,
)
from examples.language_model import load
from examples.pretrained import MODEL, fetch
from examples.report_picture import picture
from zenflow_compile.runtime.parameters.device_state import SCORE_DECAY

PICTURE = ROOT / "docs" / "concentration.svg"
RATIOS = (0.01, 0.05, 0.1)
LAGS = (1, 4, 16, 64)
STEPS = 200
FIRST = 20  # steps before it only feed the moving average
UPDATES_EVERY = 10  # steps
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")
EMBEDDING = KINDS[-1]


def top(values: Tensor, ratio: float) -> Tensor:
    """Whether each slice is among the share ``ratio`` with the largest values, at least one: (steps, slices)."""
    count = max(1, int(ratio * values.shape[1]))
    return torch.zeros(values.shape, dtype=torch.bool).scatter_(1, values.topk(count, dim=1).indices, True)


def averages(norms: Tensor) -> Tensor:
    """The moving average by which ``ZenFlowAdamW`` selects, in front of each step: of the steps before it alone."""
    before = torch.zeros_like(norms)
    for step in range(1, len(norms)):
        before[step] = SCORE_DECAY * before[step - 1] + (1 - SCORE_DECAY) * norms[step - 1]
    return before


def jaccard(chosen: Tensor, lag: int) -> float:
    """Slices that are chosen at a step and ``lag`` steps later, by those that are at one of them; mean over steps."""
    early, late = chosen[:-lag], chosen[lag:]
    return ((early & late).sum(1) / (early | late).sum(1)).mean().item()


@dataclass
class Matrix:
    """What was seen of one parameter: squared norms, (steps, slices).

    Attributes:
        name, shape: of the parameter.
        columns, rows: of its gradients.
        updates: of AdamW's updates without the decay, along the longer side; by step.
    """

    name: str
    shape: tuple[int, int]
    columns: Tensor
    rows: Tensor
    updates: dict[int, Tensor]

    @property
    def longer(self) -> Tensor:
        """Norms of the slices that the package selects: of whichever there are more."""
        return self.columns if self.shape[1] >= self.shape[0] else self.rows

    def result(self, totals: Tensor) -> dict[str, Any]:
        """Shares of ``totals``, the squared norms of all gradients by step, and how the chosen slices change."""

        def share(norms: Tensor, chosen: Tensor, since: int = FIRST) -> float:
            return _rounded(((norms * chosen).sum(1) / totals)[since:].mean().item())

        sides = {"columns": self.columns, "rows": self.rows, "longer side": self.longer}
        score = averages(self.longer)
        chosen = {ratio: top(self.longer, ratio) for ratio in RATIOS}
        selected = {ratio: top(score, ratio) for ratio in RATIOS}
        row: dict[str, Any] = {"name": self.name, "shape": list(self.shape)}
        row["norm"] = _rounded((self.rows.sum(1) / totals)[FIRST:].mean().item())
        for side, norms in sides.items():
            row |= {f"{side}, {ratio:.0%}": share(norms, top(norms, ratio)) for ratio in RATIOS}
        for ratio in RATIOS:
            row[f"by the average, {ratio:.0%}"] = share(self.longer, selected[ratio])
            for lag in LAGS:
                late = torch.zeros_like(chosen[ratio])
                late[lag:] = chosen[ratio][:-lag]
                row[f"{lag} steps old, {ratio:.0%}"] = share(self.longer, late, FIRST + lag)
                row[f"Jaccard, {lag} steps, {ratio:.0%}"] = _rounded(jaccard(chosen[ratio][FIRST:], lag))
                row[f"Jaccard of the average, {lag} steps, {ratio:.0%}"] = _rounded(
                    jaccard(selected[ratio][FIRST:], lag)
                )
        steps = [step for step in self.updates if step >= FIRST]
        moved = torch.stack([self.updates[step] for step in steps])
        row["update"] = moved.sum(1).mean().item()
        for ratio in RATIOS:
            row[f"update, by itself, {ratio:.0%}"] = (moved * top(moved, ratio)).sum(1).mean().item()
            row[f"update, by the average, {ratio:.0%}"] = (moved * selected[ratio][steps]).sum(1).mean().item()
        return row


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def observe(
    task: str, *, steps: int, inner: str, model: str | None, data: str | None, device: str
) -> list[dict[str, Any]]:
    """Fine-tune one model, and return a row of each matrix."""
    torch.compiler.reset()
    network, tokenizer = load(model or fetch(MODEL), torch.float32)
    network.to(device)
    given = TASKS[task](tokenizer, 0, None if data is None else Path(data), torch.device(device))
    matrices = {name: weight for name, weight in network.named_parameters() if weight.dim() == 2}
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    seen: dict[str, tuple[list[Tensor], list[Tensor]]] = {name: ([], []) for name in matrices}
    updates: dict[str, dict[int, Tensor]] = {name: {} for name in matrices}

    def after_backward(step: int) -> None:
        if step and (step - 1) % UPDATES_EVERY == 0:  # the moments are those of the step before
            for name, weight in matrices.items():
                updates[name][step - 1] = update_norms(optimizer.state[weight]).cpu()
        for name, weight in matrices.items():
            assert weight.grad is not None
            squared = weight.grad.square()
            for norms, dim in zip(seen[name], (0, 1), strict=True):
                norms.append(squared.sum(dim).cpu())

    compiled = torch.compile(network, backend="inductor" if inner == "inductor" else "aot_eager")
    losses, _ = fine_tune(compiled, network, given, optimizer, steps, after_backward)
    found = [
        Matrix(name, tuple(weight.shape), torch.stack(seen[name][0]), torch.stack(seen[name][1]), updates[name])
        for name, weight in matrices.items()
    ]
    totals = torch.stack([matrix.rows.sum(1) for matrix in found]).sum(0)
    about = {"task": task, "steps": steps, "inner": inner, "model": model, "data": data, "seed": 0, "device": device}
    about |= {"commit": commit(), "machine": machine(), "losses": [round(loss, 4) for loss in losses]}
    return [about | {"matrices": [matrix.result(totals) for matrix in found]}]


def update_norms(state: Mapping[str, Tensor]) -> Tensor:
    """Squared norms of AdamW's update without rate and decay, m_hat / (sqrt(v_hat) + eps), along the longer side."""
    step = state["step"].item()
    update = state["exp_avg"] / (1 - 0.9**step) / ((state["exp_avg_sq"] / (1 - 0.999**step)).sqrt() + 1e-8)
    return update.square().sum(0 if update.shape[1] >= update.shape[0] else 1)


def kind(name: str) -> str:
    """Which of ``KINDS`` a parameter is, by the module that it belongs to."""
    return name.split(".")[-2]


def layer(name: str) -> int | None:
    """The number of a parameter's layer; None outside of them."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def held(matrices: Iterable[Mapping[str, Any]], measure: str, of: str = "norm") -> float:
    """A measure of several matrices together, as a share of ``of``."""
    chosen = list(matrices)
    return float(sum(each[measure] for each in chosen) / sum(each[of] for each in chosen))


def shares(result: Mapping[str, Any]) -> Table:
    """Which share of the squared norm the top slices hold, by kind of matrix."""
    headings = [f"{side}\n{ratio:.0%}" for side in ("columns", "rows", "longer") for ratio in RATIOS]
    made = _table(
        f"{_run(result)}: squared gradient norm in the top slices",
        "matrices",
        ["of all", *headings],
    )
    whole = sum(each["norm"] for each in result["matrices"])
    for name, matrices in _by_kind(result).items():
        of_all = sum(each["norm"] for each in matrices) / whole
        cells = [
            held(matrices, f"{side}, {ratio:.0%}") for side in ("columns", "rows", "longer side") for ratio in RATIOS
        ]
        made.add_row(name, f"{of_all:.1%}", *(f"{cell:.0%}" for cell in cells))
    return made


def persistence(result: Mapping[str, Any]) -> Table:
    """What slices chosen earlier hold of a step's norm, and the Jaccard index of both choices, of all layers' matrices.

    Columns "average" have the index of choices by the moving average.
    """
    headings = [f"{name}\n{ratio:.0%}" for ratio in RATIOS for name in ("hold", "Jaccard", "average")]
    made = _table(
        f"{_run(result)}: slices of the longer side that were chosen earlier",
        "chosen",
        headings,
    )
    matrices = _of_layers(result)
    for label, measure in (("in the same step", "longer side"), ("by earlier steps' average", "by the average")):
        cells = []
        for ratio in RATIOS:
            cells += [f"{held(matrices, f'{measure}, {ratio:.0%}'):.0%}", "", ""]
        made.add_row(label, *cells)
    for lag in LAGS:
        cells = []
        for ratio in RATIOS:
            cells.append(f"{held(matrices, f'{lag} steps old, {ratio:.0%}'):.0%}")
            for name in ("Jaccard", "Jaccard of the average"):
                each = [row[f"{name}, {lag} steps, {ratio:.0%}"] for row in matrices]
                cells.append(f"{sum(each) / len(each):.2f}")
        made.add_row(f"{lag} step{'s' * (lag > 1)} earlier", *cells)
    return made


def of_updates(result: Mapping[str, Any]) -> Table:
    """Which share of the squared norm of AdamW's update the slices hold."""
    headings = [f"{ratio:.0%}" for ratio in RATIOS]
    made = _table(
        f"{_run(result)}: squared norm of AdamW's update in the top slices",
        "chosen by",
        headings,
    )
    for label, name in (("the update itself", "by itself"), ("the gradients' average", "by the average")):
        cells = [held(_of_layers(result), f"update, {name}, {ratio:.0%}", "update") for ratio in RATIOS]
        made.add_row(label, *(f"{cell:.0%}" for cell in cells))
    return made


def by_layer(result: Mapping[str, Any]) -> Table:
    """What the top 10% of the longer side hold, by layer and kind: darker is more."""
    known_kinds = {kind(each["name"]) for each in result["matrices"]}
    kinds = [name for name in KINDS if name != EMBEDDING and name in known_kinds]
    headings = [name.removesuffix("_proj") for name in kinds]
    made = _table(f"{_run(result)}: top 10% of the longer side", "layer", headings)
    found = {(layer(each["name"]), kind(each["name"])): each for each in result["matrices"]}
    for number in sorted({number for number, _ in found if number is not None}):
        cells = []
        for name in kinds:
            share = held([found[number, name]], "longer side, 10%")
            shade = 255 - int(200 * share)
            ink = 0 if shade > 110 else 255
            cells.append(Text(f"{share:4.0%}", style=f"rgb({ink},{ink},{ink}) on rgb({shade},{shade},255)"))
        made.add_row(str(number), *cells)
    return made


TABLES: tuple[Callable[[Mapping[str, Any]], Table], ...] = (shares, persistence, of_updates)


def _run(result: Mapping[str, Any]) -> str:
    return f"{result['task']}, {trained_on(result)}"


def _table(title: str, first: str, others: Sequence[str]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=title, title_justify="left")
    made.add_column(first)
    for other in others:
        made.add_column(other, justify="right")
    return made


def _of_layers(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [each for each in result["matrices"] if kind(each["name"]) != EMBEDDING]


def _by_kind(result: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    groups = {"of the layers": _of_layers(result)}
    for name in KINDS:
        groups[name] = [each for each in result["matrices"] if kind(each["name"]) == name]
    return {name: matrices for name, matrices in groups.items() if matrices}


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """What docs/quality.md has of the results of several tasks."""
    return "\n".join(markdown(table(row)) for row in rows for table in TABLES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on the tasks that are asked for, and print the tables."""
    parser = option_parser("concentration", __doc__)
    add_run_options(parser, STEPS)
    parser.add_argument("--page", action="store_true", help="also write docs/quality.md and docs/concentration.svg")
    given = parser.parse_args(arguments)
    check_run_options(parser, given)
    if given.steps <= (least := FIRST + max(LAGS)):
        parser.error(f"--steps={given.steps} must be more than {least}, by which the last slices are compared")
    path = given.out or RESULTS / "concentration.json"
    rows = known(path)
    settings = {name: getattr(given, name) for name in ("steps", "inner", "model", "data")}
    for task in () if given.table else given.task or TASKS:
        found = observe(task, **settings, device=given.device)
        same = {"task": task, "device": given.device, **settings}
        rows = [row for row in rows if not same.items() <= row.items()] + found
        write_results("concentration", rows, out=path, seed=0)
    rows = [row for row in rows if settings.items() <= row.items()]
    console = Console()
    for row in rows:
        for table in (*TABLES, by_layer):
            console.print(table(row))
    if given.page:
        fill(PAGE, "concentration", page(rows))
        title = "Share of a matrix's squared gradient norm in the top 10% of its longer side"
        PICTURE.write_text(picture(lambda of: of.print(Columns(map(by_layer, rows), padding=(0, 6))), title, 120))
    return 0


if __name__ == "__main__":
    sys.exit(main())
