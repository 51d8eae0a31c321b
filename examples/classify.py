"""Fine-tune a pretrained language model to tell positive movie reviews from negative ones.

    python -m examples.classify                        zenflow
    python -m examples.classify --policy resident      plain AdamW on the device
    python -m examples.classify --compare              all three policies, one table
    python -m examples.classify --resume runs/classify/checkpoint.pt

The model and the sentences come from two Python packages, see ``examples.pretrained``. Where they cannot be had, the
small GPT of ``examples.train_gpt`` trains from random weights instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

import zenflow_compile as zf
from examples.language_model import ModelError, load
from examples.pretrained import MODEL, REVIEWS, UnavailableError, fetch
from examples.reviews import Batch, Reviews

POLICIES = ("resident", "zero_offload", "zenflow")
_LOSS_EVERY = 5  # steps
_OF_BOTH = {"policy", "inner", "seed", "live", "out"}  # settings that the small GPT has, too
_FREE_ON_RESUME = {"out", "resume", "save_every", "live"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one run. The defaults take less than four minutes on two cores.

    Attributes:
        policy: where optimizer state lives: ``resident``, ``zero_offload`` or ``zenflow``.
        steps: optimizer steps.
        batch: sentences per step.
        tokens: of a sentence with its prompt, at most.
        lr: the highest learning rate, reached after a tenth of the steps; it falls to 0 after that.
        weight_decay: decoupled decay, as in AdamW.
        update_interval: steps per update window (``zenflow`` only).
        topk_ratio: share of the slices that the device updates in every step (``zenflow`` only).
        held_out: sentences that measure accuracy, before and after.
        seed: of the order of the sentences.
        inner: what compiles the rewritten graphs, ``inductor`` or ``eager``.
        save_every: steps between checkpoints, each of which replaces the last; one always follows the last step.
        live: show the last steps below the progress bar.
        model: GGUF file or folder of the model; None: that of ``examples.pretrained``.
        sentences: file of ``number<TAB>rating<TAB>sentence``; None: that of ``examples.pretrained``.
        out: folder for the checkpoint; None writes none.
        resume: checkpoint to go on from.
    """

    policy: str = "zenflow"
    steps: int = 24
    batch: int = 16
    tokens: int = 48
    lr: float = 2e-5
    weight_decay: float = 0.01
    update_interval: int = 4
    topk_ratio: float = 0.1
    held_out: int = 256
    seed: int = 0
    inner: str = "inductor"
    save_every: int = 12
    live: bool = False
    model: str | None = None
    sentences: str | None = None
    out: str | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "tokens", "held_out", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True, slots=True)
class Result:
    """Losses, accuracy, time and memory of a run.

    Attributes:
        losses: of each step, in nats per label.
        before, after: share of the held-out sentences that are classified correctly.
        step_ms: mean time of a step, without those that compile; None if there are too few.
        device_bytes, host_bytes: optimizer state on the device; state, gradients and uploads in host memory.
        seconds: the whole run.
    """

    losses: list[float]
    before: float
    after: float
    step_ms: float | None
    device_bytes: int
    host_bytes: int
    seconds: float


def train(settings: Settings, console: Console) -> Result:
    """Fine-tune one model.

    Raises:
        UnavailableError: a package cannot be had.
        ModelError, ValueError, OSError: a file cannot be used, or a checkpoint is of other settings.
    """
    begin = time.perf_counter()
    saved = _read(settings.resume) if settings.resume else None
    if saved:
        _must_continue(settings, saved)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, tokenizer = load(settings.model or fetch(MODEL, console), dtype)
    sentences = Path(settings.sentences) if settings.sentences else fetch(REVIEWS, console)
    reviews = Reviews(sentences, tokenizer, tokens=settings.tokens, held_out=settings.held_out, seed=settings.seed)
    model.to(device)
    before: float = saved["before"] if saved else accuracy(model, reviews, device)
    console.print(f"accuracy before: {before:.1%} of {settings.held_out} sentences", highlight=False)

    if saved:
        model.load_state_dict(saved["model"])
    optimizer = make_optimizer(settings, model)
    scheduler = LambdaLR(optimizer, lambda step: rate(step, settings.steps))
    compiled = torch.compile(model, backend="zenflow", options={"inner": settings.inner})
    losses: list[Tensor] = []
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        losses = [torch.tensor(each) for each in saved["losses"]]
    with ExitStack() as stack:
        bar = stack.enter_context(_progress(console))
        task = bar.add_task(settings.policy, total=settings.steps, completed=len(losses), loss="-")
        stack.enter_context(optimizer)
        recorded = zf.live(optimizer, console=Console(stderr=True)) if settings.live else zf.profile(optimizer)
        profile = stack.enter_context(recorded)
        for step in range(len(losses), settings.steps):
            batch = reviews.training_batch(step, settings.batch).to(device)
            loss = F.cross_entropy(next_logits(compiled, batch), batch.labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach())  # reading it here would wait for the device
            if (step + 1) % _LOSS_EVERY == 0:
                bar.update(task, loss=f"{loss.item():.3f}")
            bar.advance(task)
            if settings.out and ((step + 1) % settings.save_every == 0 or step + 1 == settings.steps):
                optimizer.synchronize()  # the state and the weights are of the same step
                state: dict[str, Any] = {"settings": asdict(settings), "before": before, "losses": _floats(losses)}
                for name, each in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
                    state[name] = each.state_dict()
                _write(state, Path(settings.out))
        sizes = optimizer.device_bytes, optimizer.host_bytes
    after = accuracy(model, reviews, device)
    if not console.quiet:
        profile.report(console)
    console.print(
        f"{settings.policy}: accuracy {before:.1%} before, {after:.1%} after {settings.steps} steps", highlight=False
    )
    if settings.out:
        console.print(f"checkpoint: {_checkpoint(settings.out)}", highlight=False)
    return Result(_floats(losses), before, after, profile.summary()["step_ms"], *sizes, time.perf_counter() - begin)


def make_optimizer(settings: Settings, model: PreTrainedModel) -> zf.ZenFlowAdamW:
    """The optimizer: the one line that differs from a loop under ``torch.optim.AdamW``."""
    of_zenflow: dict[str, Any] = {"update_interval": settings.update_interval, "topk_ratio": settings.topk_ratio}
    return zf.ZenFlowAdamW(
        model.named_parameters(),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        policy=settings.policy,
        **(of_zenflow if settings.policy == "zenflow" else {}),
    )


@torch.no_grad()
def held_out_scores(model: PreTrainedModel, reviews: Reviews, device: torch.device) -> tuple[Tensor, Tensor]:
    """Whether each held-out sentence is classified correctly, and its loss: both (sentences,), on the CPU."""
    correct, losses = [], []
    for batch in reviews.held_out_batches(64):
        logits = next_logits(model, batch.to(device)).cpu()
        losses.append(F.cross_entropy(logits, batch.labels, reduction="none"))
        correct.append(torch.tensor(reviews.label_tokens)[logits[:, reviews.label_tokens].argmax(-1)] == batch.labels)
    return torch.cat(correct), torch.cat(losses)


def accuracy(model: PreTrainedModel, reviews: Reviews, device: torch.device) -> float:
    """Share of the held-out sentences that the model classifies as their ratings do."""
    return held_out_scores(model, reviews, device)[0].double().mean().item()


def next_logits(model: Any, batch: Batch) -> Tensor:
    """Logits of the token that follows each prompt: fp32, (sentences, vocabulary)."""
    output = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1].float()
    return logits


def _floats(losses: Sequence[Tensor]) -> list[float]:
    return [each.item() for each in losses]


def rate(step: int, steps: int) -> float:
    """Learning rate of a step as a share of the highest: it rises for a tenth of the steps, then falls to 0."""
    warm_up = max(1, steps // 10)
    return min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))


def _progress(console: Console) -> Progress:
    loss = TextColumn("loss {task.fields[loss]}")
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        loss,
        TimeRemainingColumn(),
        console=console,
    )


def _checkpoint(out: str | Path) -> Path:
    return Path(out) / "checkpoint.pt"


def _write(state: dict[str, Any], folder: Path) -> None:
    """Replace the checkpoint atomically: an interrupted write leaves the earlier one."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "checkpoint.new"
    torch.save(state, new)
    os.replace(new, _checkpoint(folder))


def _read(given: str) -> dict[str, Any]:
    """The checkpoint to go on from.

    Raises:
        FileNotFoundError, ValueError: there is none, or it is damaged.
    """
    path = Path(given)
    if not path.is_file():
        raise FileNotFoundError(f"resume={path} does not exist; give the path that a run printed")
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True)
        Settings(**saved["settings"])
    except Exception as error:
        raise ValueError(f"resume={path} is not a checkpoint of this example, or is damaged") from error
    return saved


def _must_continue(settings: Settings, saved: dict[str, Any]) -> None:
    """Raise ``ValueError`` unless the run goes on as the saved one would have."""
    for name, value in asdict(settings).items():
        if name not in _FREE_ON_RESUME and (before := saved["settings"][name]) != value:
            raise ValueError(
                f"{name}={value} differs from the checkpoint's {before}; a resumed run keeps its settings: leave "
                f"{name} out, or start a new run"
            )
    if len(saved["losses"]) >= settings.steps:
        raise ValueError(
            f"resume={settings.resume} is the end of a run of {settings.steps} steps; nothing is left to do"
        )


def compare(settings: Settings, console: Console) -> list[Result]:
    """Train every policy on the same sentences, one after another, and print one table."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=f"{settings.steps} steps")
    table.add_column("policy")
    for heading in ("accuracy", "loss", "step s", "device MB", "host MB"):
        table.add_column(heading, justify="right")
    results = []
    for policy in POLICIES:
        torch.compiler.reset()  # each run pays for its own compilation, and the last run's model can be freed
        results.append(found := train(replace(settings, policy=policy, out=None), console))
        last = found.losses[-10:]
        step = "-" if found.step_ms is None else f"{found.step_ms / 1e3:.2f}"
        sizes = (f"{each / 1e6:,.0f}" for each in (found.device_bytes, found.host_bytes))
        table.add_row(policy, f"{found.after:.1%}", f"{sum(last) / len(last):.3f}", step, *sizes)
    console.print(table)
    return results


def parse(arguments: Sequence[str] | None = None) -> tuple[Settings, bool]:
    """Read the command line. Returns the settings, and whether to compare all policies."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.classify",
        description=__doc__.partition("\n")[0],
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--compare", action="store_true", default=False, help="train every policy and print one table")
    parser.add_argument("--policy", choices=POLICIES, help="where optimizer state lives (zenflow)")
    parser.add_argument("--inner", choices=("inductor", "eager"), help="what compiles the graphs (inductor)")
    parser.add_argument("--live", action="store_true", help="show the last steps while it trains")
    for each in fields(Settings):
        if each.name not in ("policy", "inner", "live"):
            kind = type(each.default) if each.default is not None else str
            parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, metavar="VALUE", help=f"{each.default}")
    given = vars(parser.parse_args(arguments))
    comparing: bool = given.pop("compare")
    if comparing and given.keys() & {"resume", "out"}:
        parser.error("--compare starts three runs and writes no checkpoint; leave --resume and --out out")
    saved: dict[str, Any] = {"out": None if comparing else "runs/classify"}
    try:
        if "resume" in given:
            saved = _read(given["resume"])["settings"]
        return Settings(**saved | given), comparing
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m examples.classify``."""
    settings, comparing = parse(arguments)
    console = Console()
    try:
        compare(settings, console) if comparing else train(settings, console)
    except UnavailableError as reason:
        given = {each.name for each in fields(Settings) if getattr(settings, each.name) != each.default}
        if others := sorted(given - _OF_BOTH):
            raise SystemExit(
                f"error: {reason}; leave {', '.join(others)} out to train a small GPT instead, or give --model and "
                "--sentences"
            ) from None
        console.print(f"{reason}: a small GPT trains from random weights instead", highlight=False)
        from examples import train_gpt

        return train_gpt.main(arguments)
    except (ModelError, ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
