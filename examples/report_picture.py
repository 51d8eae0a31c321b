"""Trains a small GPT on the CPU under two policies, and writes SVG pictures: both on one time scale, and a report.

    python -m examples.report_picture --out docs

The pictures need no network: they name fonts that are installed, and link none.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import zenflow_compile as zf
from examples.gpt import GPT, GPTConfig
from examples.stdlib_text import load_text, training_batch
from examples.train_gpt import CORES_OF_PYTORCH, share_cores

CONTEXT, BATCH = 64, 2
POLICIES = ("zero_offload", "zenflow")
_WARM_UP_STEPS = 8  # compilation, and two update windows

# rich's own format links a web font.
_SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: "Fira Code", "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px;
  line-height: {line_height}px;
}}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def record(policy: str, *, layers: int, width: int, steps: int, inner: str) -> zf.Profile:
    """Train for ``steps`` steps after a warm-up, and return their profile."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=CONTEXT, layers=layers, width=width, heads=width // 32))
    text = load_text(4_000_000)
    windows: dict[str, Any] = {"full_warm_up_rounds": 0} if policy == "zenflow" else {}
    optimizer = zf.ZenFlowAdamW(
        model.named_parameters(), lr=1e-3, policy=policy, workers=1.0 - CORES_OF_PYTORCH, **windows
    )
    compiled = torch.compile(model, backend="zenflow", options={"inner": inner})

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            compiled(*training_batch(text, seed=0, step=step, batch=BATCH, context=CONTEXT)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with optimizer:
        train(0, _WARM_UP_STEPS)
        with zf.profile(optimizer, flops_per_step=model.flops_per_token * BATCH * CONTEXT) as profile:
            train(_WARM_UP_STEPS, _WARM_UP_STEPS + steps)
    return profile


def picture(show: Callable[[Console], None], title: str, columns: int) -> str:
    """What ``show`` prints on a terminal of so many columns, as an SVG."""
    console = Console(record=True, file=io.StringIO(), width=columns, force_terminal=True, color_system="truecolor")
    show(console)
    return console.export_svg(title=title, code_format=_SVG, unique_id="zenflow")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m examples.report_picture``."""
    parser = argparse.ArgumentParser(prog="python -m examples.report_picture", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for compare.svg and report.svg")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="of the GPT (%(default)s)")
    parser.add_argument("--width", type=int, default=384, metavar="N", help="of the GPT (%(default)s)")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="profiled steps (%(default)s)")
    parser.add_argument("--columns", type=int, default=92, metavar="N", help="width of the terminal (%(default)s)")
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor", help="what compiles the graphs")
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"--steps {given.steps} must be at least 1")
    if not 80 <= given.columns <= 100:
        parser.error(f"--columns {given.columns} must be from 80 to 100, what a page shows")
    share_cores(torch.device("cpu"))
    size = {"layers": given.layers, "width": given.width}
    profiles = [record(policy, **size, steps=given.steps, inner=given.inner) for policy in POLICIES]
    comparison = zf.compare(profiles)
    pictures = {
        "compare.svg": picture(lambda console: console.print(comparison), "zf.compare([a, b])", given.columns),
        "report.svg": picture(profiles[-1].report, "zf.profile(optimizer).report()", given.columns),
    }
    given.out.mkdir(parents=True, exist_ok=True)
    for name, text in pictures.items():
        (given.out / name).write_text(text, encoding="utf-8")
        print(f"wrote {given.out / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
