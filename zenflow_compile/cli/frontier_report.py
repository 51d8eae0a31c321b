"""Prints a frontier of memory against time, and what a machine can train."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zenflow_compile.checks.printable import printable
from zenflow_compile.cli.plan_report import gigabytes, heading, made_table, missing, seconds
from zenflow_compile.prediction.forecast import Forecast
from zenflow_compile.prediction.frontier import Fit, Frontier
from zenflow_compile.prediction.search import Memory, device_first, host_first

NOTHING_FITS = "Nothing fits. The nearest plan lacks GB: {}. Its options:"
_EXACT = "AdamW: whether the numbers are those of AdamW, to rounding (--exact leaves the others out)."


def print_frontier(found: Frontier, console: Console) -> None:
    """Print the least memory without a slower step, what less costs, and the options of all plans."""
    console.print(printable(heading(found.scenario)), style="bold", highlight=False)
    if found.fastest is None:
        console.print(Text(NOTHING_FITS.format(missing(found.nearest.needs.shortages(found.scenario.hardware)))))
        console.print(Text(json.dumps(found.nearest.pasted)), soft_wrap=True)
        return
    free_device, free_host = found.device[0], found.host[0]
    console.print(
        Text(
            f"The fastest plan that fits takes {seconds(found.fastest.step_s)}. As fast, but for 1%: with "
            f"{gigabytes(free_device.device_bytes)} GB of device memory (and {gigabytes(free_device.host_bytes)} GB of "
            f"the host), or with {gigabytes(free_host.host_bytes)} GB of host memory (and "
            f"{gigabytes(free_host.device_bytes)} GB of the device)."
        )
    )
    console.print(costs("Less device memory", found, found.device, device_first))
    console.print(costs("Less host memory", found, found.host, host_first))
    console.print(Text("Options to paste:"))
    for number, each in enumerate(found.points, start=1):
        console.print(Text(f"{number}: {json.dumps(each.options)}"), soft_wrap=True)


def costs(title: str, found: Frontier, plans: Sequence[Forecast], memory: Memory) -> Table:
    """A row per plan, and what each GB less costs from one row to the next."""
    table = made_table(title, f"GB; ms/GB: slower than the row above, by GB less. {_EXACT}")
    for column in ("plan", "device", "host", "disk", "step", "slower", "ms/GB", "tokens/s", "AdamW"):
        table.add_column(column, justify="right", no_wrap=True)
    assert found.fastest is not None
    before: Forecast | None = None
    for each in plans:
        cost = "" if before is None else f"{milliseconds_per_gb(before, each, memory):.0f}"
        table.add_row(
            str(found.points.index(each) + 1),
            *(gigabytes(size) for size in (each.device_bytes, each.host_bytes, sum(each.needs.disk.values()))),
            seconds(each.step_s),
            f"{each.step_s / found.fastest.step_s - 1:.0%}",
            cost,
            f"{each.tokens_per_s:.0f}",
            "yes" if each.exact else "no",
        )
        before = each
    return table


def milliseconds_per_gb(before: Forecast, after: Forecast, memory: Memory) -> float:
    """What a GB less of one memory costs between two plans."""
    return 1e3 * (after.step_s - before.step_s) / ((memory(before)[0] - memory(after)[0]) / 1e9)


def print_models(fits: Sequence[Fit], console: Console) -> None:
    """Print a row per model, and the options of those that fit."""
    scenario = fits[0].scenario
    hardware = scenario.hardware
    console.print(
        printable(
            f"{hardware.name} with {gigabytes(hardware.device_bytes)} GB of device memory and "
            f"{gigabytes(hardware.host_bytes)} GB of host memory, {scenario.tokens} tokens per device and step"
        ),
        style="bold",
        highlight=False,
    )
    table = made_table("Models", f"GB; tokens/s of the fastest plan that fits. {_EXACT}")
    table.add_column("model", no_wrap=True)
    for column in ("1e9", "step", "tokens/s", "device", "host", "disk", "AdamW"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("fits")
    for each in fits:
        best, model = each.best, each.scenario.model
        size = f"{model.numel / 1e9:.2f}"
        if best is None:
            lacks = f"no: {missing(each.nearest.needs.shortages(hardware))} missing"
            table.add_row(model.name, size, *[""] * 6, lacks, style="dim")
            continue
        memory = (best.device_bytes, best.host_bytes, sum(best.needs.disk.values()))
        exact = "yes" if best.exact else "no"
        rate = f"{best.tokens_per_s:.0f}"
        table.add_row(model.name, size, seconds(best.step_s), rate, *map(gigabytes, memory), exact, "yes")
    console.print(table)
    console.print(Text("Options to paste:"))
    for each in fits:
        if each.best is not None:
            console.print(Text(f"{each.scenario.model.name}: {json.dumps(each.best.options)}"), soft_wrap=True)
