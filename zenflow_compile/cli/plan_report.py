"""Prints what ``plan`` found: a prediction, a frontier of memory against time, and what a machine can train.

A frontier is also drawn as SVG, by matplotlib: the extra ``plots``. The same frontier gives the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zenflow_compile.checks.validate import printable
from zenflow_compile.performance.traffic import Sharing
from zenflow_compile.prediction.answers import Fit, Frontier
from zenflow_compile.prediction.forecast import GRADIENTS, SOME_DISK, STATE, Combination, Forecast, Scenario, changed
from zenflow_compile.prediction.predict import Prediction
from zenflow_compile.prediction.search import Memory, device_first, host_first

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_NOTHING = "-"
_FASTER = 1.1  # a plan with other options is named if the known one's step takes so many times as long
_WIDTH = 60  # smallest width of tables, so that their captions fit


def print_prediction(prediction: Prediction, console: Console) -> None:
    """Print the prediction as wide as ``console``."""
    asked = prediction.scenario
    console.print(printable(heading(asked)), style="bold", highlight=False)
    if asked.note is not None:
        console.print(Text(asked.note))
    console.print(times(prediction.forecasts, hours=asked.epoch_tokens is not None))
    console.print(memory(prediction.forecasts))
    shown = prediction.shown
    console.print(breakdown(shown, prediction))
    if shown.weights is not None:
        console.print(weights(prediction.forecasts))
        console.print(Text(shown.weights.sentence))
    if prediction.exchanges:
        console.print(exchanged(shown, prediction))
    if prediction.recommended is None:
        console.print(Text(f"Nothing fits. {shown.title} comes nearest; missing GB: {missing(shown.shortages)}."))
        return
    rule = type(asked.rule).__name__
    optimizer = "ZenFlowAdamW" if rule == "AdamW" else f"ZenFlow with the rule {rule}"
    where = "torch.compile" if asked.in_backward else optimizer
    console.print(Text(f"Fastest that fits: {shown.title}, with {division(shown)}. Options to pass to {where}:"))
    console.print(Text(json.dumps(shown.options, indent=4)))
    if shown.options.get("nvme_path") == SOME_DISK:
        console.print(Text("nvme_path stands for a directory on a local disk."))
    if prediction.exactness is not None:
        console.print(Text(prediction.exactness))
    if prediction.not_in_files is not None:
        console.print(Text(prediction.not_in_files))


def more_options(prediction: Prediction, found: Fit) -> Text | None:
    """What a search of all options that are not given finds, a sentence if it is worth it; else None.

    A prediction searches few of them: others steer convergence, or store the state in fewer bytes.
    """
    best, known = found.best, prediction.recommended
    if best is None:
        return Text(f"With other options nothing fits either: {reason(found)}")
    if known is not None and known.step_s < _FASTER * best.step_s:
        return None
    options = pasted(best.options, recompute=best.recompute)
    return Text(f"With other options a step takes {seconds(best.step_s)} (--frontier shows what they cost): ") + options


def heading(asked: Scenario) -> str:
    """The scenario, in a sentence."""
    count = asked.hardware.all_devices
    devices = "1 device" if count == 1 else f"{count} devices"
    if asked.hardware.nodes > 1:
        devices += f" on {asked.hardware.nodes} nodes"
    sequences = f" in sequences of {asked.model.context}" if asked.model.context else ""
    form = "without" if asked.in_backward else "with"
    name = type(asked.rule).__name__
    rule = "" if name == "AdamW" else f", updated by {name}"
    return (
        f"{asked.model.name}, {asked.model.numel / 1e9:.2f}e9 parameters in {asked.dtype}, on {asked.hardware.name}, "
        f"{devices}, {asked.tokens} tokens per device and step{sequences}, {form} an optimizer object{rule}"
    )


def times(forecasts: Sequence[Forecast], *, hours: bool) -> Table:
    """Time and traffic, a row per policy."""
    table = made_table(
        "Predicted time",
        "After a policy: its ratio, update_stride (none: nothing is streamed), GB of device_share. Host: time in "
        "which its workers update, all at the same time. Moves: traffic in model sizes per step, streamed state "
        f"and loaded weights included. {_DIVIDED}",
    )
    table.add_column("policy")
    for column in ("micro", "step", "stall", "host", "moves", "tokens/s", *(["hours"] if hours else [])):
        table.add_column(column, justify="right", no_wrap=True)
    for each in forecasts:
        cells = [divided(each), *(seconds(value) for value in (each.step_s, each.stall_s, each.host_update_s))]
        cells += [f"{each.moves:.2f}", f"{each.tokens_per_s:.0f}"]
        if each.hours is not None:
            cells.append(f"{each.hours:.3g}")
        table.add_row(each.title, *cells, style=_style(each))
    return table


def memory(forecasts: Sequence[Forecast]) -> Table:
    """Memory, a row per policy, and whether it fits."""
    table = made_table("Memory, GB", "Device: of one device. Host and disk: of a node. Activations are an estimate.")
    table.add_column("policy", no_wrap=True)
    for column in ("device", "host", "disk"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("fits")
    for each in forecasts:
        needs = (each.needs.device, each.needs.host, each.needs.disk)
        fits = "yes" if each.fits else f"no: {missing(each.shortages)} missing"
        table.add_row(each.title, *(gigabytes(sum(items.values())) for items in needs), fits, style=_style(each))
    return table


def weights(forecasts: Sequence[Forecast]) -> Table:
    """Weights that cross the link, a row per policy."""
    table = made_table(
        "Weights in host memory, GB",
        "Kept: weights that stay on the device, of all. Ring: device memory of loaded ones. Then what crosses to the "
        "device per micro-batch and per step, and back per step.",
    )
    table.add_column("policy", no_wrap=True)
    for column in ("kept", "ring", "micro-batch", "step", "back"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in forecasts:
        if (found := each.weights) is not None:
            sizes = (found.ring_bytes, found.micro_batch_bytes, found.to_device, found.to_host)
            kept = f"{found.kept}/{found.kept + found.offloaded}"
            table.add_row(each.title, kept, *map(gigabytes, sizes), style=_style(each))
    return table


def made_table(title: str, caption: str) -> Table:
    """An empty table in the style of all of them."""
    table = Table(
        title=title, caption=caption, min_width=_WIDTH, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.title_justify = table.caption_justify = "left"
    return table


def breakdown(each: Forecast, prediction: Prediction) -> Table:
    """Memory of one policy by item, next to the hardware's."""
    hardware = prediction.scenario.hardware
    table = Table(title=f"Memory of {each.title}, GB", title_justify="left", show_header=False, box=None)
    memories = (
        ("device", each.needs.device, hardware.device_bytes),
        ("host", each.needs.host, hardware.host_bytes),
        ("disk", each.needs.disk, hardware.disk_bytes),
    )
    for memory, items, has in memories:
        parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in items.items() if size)
        available = "none" if has is None else gigabytes(has)
        if parts:
            table.add_row(memory, f"{gigabytes(sum(items.values()))} of {available}", parts)
    return table


def exchanged(each: Forecast, prediction: Prediction) -> Table:
    """What the devices send with the options of one policy, a row per way of sharing the work."""
    hardware = prediction.scenario.hardware
    several = hardware.nodes > 1
    rates = f"a device sends {gigabytes(hardware.peer_bandwidth or 0)} GB/s to others of its node"
    if several:
        rates += f" and {gigabytes(hardware.network_bandwidth or 0)} GB/s to other nodes"
    table = made_table(
        f"Sent per step with {each.title}, GB",
        "By one device: to other devices, and over its link to the host. By a node: to other nodes. Host: memory of a "
        f"node. Times are those of process_group=, where {rates}.",
    )
    table.add_column("sharing", no_wrap=True)
    for column in ("to devices", *(["to nodes"] if several else []), "to host", "from host", "host"):
        table.add_column(column, justify="right", no_wrap=True)
    for exchange, name in _SHARING.items():
        if exchange not in prediction.exchanges or (exchange is Sharing.HYBRID and not several):
            continue
        sent = prediction.exchanges[exchange]
        of_node = [sent.leaving] if several else []
        sizes = (sent.sent, *of_node, sent.to_host, sent.to_device, sent.host_bytes)
        table.add_row(name, *(gigabytes(size) for size in sizes))
    return table


def bytes_table(title: str, combinations: Sequence[Combination]) -> Table:
    """Bytes per parameter, a row per way to store the state, a column per way to keep gradients."""
    on_disk = any(each.disk for each in combinations)
    table = made_table(
        f"Bytes per parameter with {title}",
        f"Host / device{' / disk' if on_disk else ''}: of the device without weights and activations. Columns: "
        "gradient_transfer. -: these do not go together.",
    )
    table.add_column("state", no_wrap=True)
    ways = [way for way in GRADIENTS if any(way.items() <= each.options.items() for each in combinations)]
    for way in ways:
        table.add_column(way["gradient_transfer"], justify="right")
    found = {tuple(each.options.items()): each for each in combinations}
    for state in STATE:
        cells = []
        for way in ways:
            each = found.get((*state.items(), *way.items()))
            sizes = () if each is None else (each.host, each.device, *([each.disk] if on_disk else []))
            cells.append(" / ".join(f"{size:.1f}" for size in sizes) or _NOTHING)
        if any(cell != _NOTHING for cell in cells):
            table.add_row(f"{state['state_dtype']}{', split' if state['split_master'] else ''}", *cells)
    return table


_SHARING = {
    Sharing.CHANGED_SLICES: "process_group=",
    Sharing.SHARDED: "fully_shard",
    Sharing.HYBRID: "fully_shard, HSDP",
    Sharing.WHOLE_WEIGHTS: "ZeRO-2, whole weights",
    Sharing.ALL_REDUCE: "DDP, an optimizer each",
}


def missing(shortages: Mapping[str, int]) -> str:
    """Missing GB by memory."""
    return ", ".join(f"{gigabytes(size)} on {memory}" for memory, size in shortages.items())


def divided(each: Forecast) -> str:
    """Micro-batches of a step, with an ``r`` if activations are recomputed."""
    return f"{each.micro_batches}{' r' if each.recompute else ''}"


def division(each: Forecast) -> str:
    """The same in words."""
    several = "es" if each.micro_batches > 1 else ""
    recomputed = ", activations recomputed" if each.recompute else ""
    return f"{each.micro_batches} micro-batch{several} of {each.micro_batch_tokens} tokens{recomputed}"


def _style(each: Forecast) -> str | None:
    return None if each.fits else "dim"


def seconds(value: float) -> str:
    """A time with its unit."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def gigabytes(size: float) -> str:
    """A size in GB without the unit."""
    return _NOTHING if not size else f"{size / 1e9:.1f}"


def enough(size: float) -> str:
    """A size in GB, rounded up: so much memory has space for it."""
    return f"{math.ceil(size / 1e8) / 10:.1f}"


_DIVIDED = "Micro: micro-batches of a step; r: activations are recomputed."
_EXACT = "Exact: whether the numbers are those of the rule in every step, to rounding (--exact leaves the others out)."


def print_frontier(found: Frontier, console: Console) -> None:
    """Print the least memory without a slower step, what less costs, and the options of all plans."""
    console.print(printable(heading(found.scenario)), style="bold", highlight=False)
    if found.fastest is None:
        console.print(Text(f"Nothing fits: {reason(found)} The options of the nearest:"))
        console.print(pasted(changed(found.nearest.options), recompute=found.nearest.recompute), soft_wrap=True)
        return
    free_device, free_host = found.device[0], found.host[0]
    console.print(
        Text(
            f"The fastest plan that fits takes {seconds(found.fastest.step_s)}. As fast, but for 1%: with "
            f"{free_device.device_bytes / 1e9:.1f} GB of device memory (and {free_device.host_bytes / 1e9:.1f} GB of "
            f"the host), or with {free_host.host_bytes / 1e9:.1f} GB of host memory (and "
            f"{free_host.device_bytes / 1e9:.1f} GB of the device)."
        )
    )
    console.print(costs("Less device memory", found, found.device, device_first))
    console.print(costs("Less host memory", found, found.host, host_first))
    console.print(Text("Options to paste:"))
    for number, each in enumerate(found.points, start=1):
        console.print(Text(f"{number}: ") + pasted(each.options, recompute=each.recompute), soft_wrap=True)


def costs(title: str, found: Frontier, plans: Sequence[Forecast], memory: Memory) -> Table:
    """A row per plan, and what each GB less costs from one row to the next."""
    table = made_table(title, f"GB; ms/GB: slower than the row above, by GB less. {_DIVIDED} {_EXACT}")
    for column in ("plan", "micro", "device", "host", "disk", "step", "slower", "ms/GB", "tokens/s", "exact"):
        table.add_column(column, justify="right", no_wrap=True)
    assert found.fastest is not None
    before: Forecast | None = None
    for each in plans:
        cost = ""
        if before is not None:
            cost = f"{1e12 * (each.step_s - before.step_s) / (memory(before)[0] - memory(each)[0]):.0f}"
        table.add_row(
            str(found.points.index(each) + 1),
            divided(each),
            *(gigabytes(size) for size in (each.device_bytes, each.host_bytes, sum(each.needs.disk.values()))),
            seconds(each.step_s),
            f"{each.step_s / found.fastest.step_s - 1:.0%}",
            cost,
            f"{each.tokens_per_s:.0f}",
            "yes" if each.exact else "no",
        )
        before = each
    return table


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
    table = made_table("Models", f"GB; the fastest plan that fits. {_DIVIDED} {_EXACT}")
    table.add_column("model", no_wrap=True)
    for column in ("micro", "step", "tokens/s", "device", "host", "disk", "exact"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in fits:
        if (best := each.best) is not None:
            sizes = (best.device_bytes, best.host_bytes, sum(best.needs.disk.values()))
            times = (divided(best), seconds(best.step_s), f"{best.tokens_per_s:.0f}")
            exact = "yes" if best.exact else "no"
            table.add_row(each.scenario.model.name, *times, *map(gigabytes, sizes), exact)
    if table.row_count:
        console.print(table)
        console.print(Text("Options to paste:"))
    for each in fits:
        if each.best is not None:
            options = pasted(each.best.options, recompute=each.best.recompute)
            console.print(Text(f"{each.scenario.model.name}: ") + options, soft_wrap=True)
    too_large = [each for each in fits if each.best is None]
    if too_large:
        console.print(Text("Does not fit:"))
    for each in too_large:
        console.print(Text(f"{each.scenario.model.name}: {reason(each)}"))


def pasted(options: Mapping[str, Any], *, recompute: bool) -> Text:
    """Options of ``ZenFlowAdamW``, and beside them whether the model recomputes activations."""
    return Text(f"{json.dumps(options)} recompute={recompute}")


def reason(each: Fit | Frontier) -> str:
    """What the nearest plan lacks, and with what one would fit."""
    hardware, needed = each.scenario.hardware, each.nearest.needs.sums()
    shortages = each.nearest.shortages
    has = {"device": hardware.device_bytes, "host": hardware.host_bytes, "disk": hardware.disk_bytes or 1.0}
    more = {memory: size for memory, size in each.remedies.items() if memory in has}
    ways = []
    if len(shortages) > 1 or not each.remedies:
        ways.append(" and ".join(f"{enough(needed[memory])} GB of {memory} memory" for memory in shortages))
    if more:  # the memory that grows the least
        memory = min(more, key=lambda memory: more[memory] / has[memory])
        ways.append(f"{enough(more[memory])} GB of {memory} memory{' alone' if ways else ''}")
    if "files" in each.remedies:
        ways.append(f"{enough(each.remedies['files'])} GB of state in files on a disk")
    if "tokens" in each.remedies:
        ways.append(f"--tokens {each.remedies['tokens']}")
    return f"the nearest plan lacks GB: {missing(shortages)}. One fits with {', or with '.join(ways)}."


_SIZE = (10.0, 4.5)  # inches


def check_plots() -> None:
    """Refuse to draw without matplotlib.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "--svg draws with matplotlib, which is not installed; install it by pip install 'zenflow-compile[plots]', "
            "or leave --svg out"
        ) from None


def write_svg(found: Frontier, path: str | Path) -> None:
    """Draw step time over device memory, and over host memory; points have the numbers of the printed table.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    asked = found.scenario
    # Ids of elements are random without a salt. Text stays text.
    with matplotlib.rc_context({"svg.hashsalt": "zenflow-compile", "svg.fonttype": "none"}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        figure.suptitle(f"{asked.model.name} on {asked.hardware.name}, {asked.tokens} tokens per device and step")
        device, host = figure.subplots(1, 2, sharey=True)
        device.set_ylabel("time of a step, s")
        _draw(device, "device memory, GB", found, found.device, device_first)
        _draw(host, "host memory, GB", found, found.host, host_first)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _draw(axes: Axes, label: str, found: Frontier, plans: Sequence[Forecast], memory: Memory) -> None:
    sizes = [memory(each)[0] / 1e9 for each in plans]
    axes.plot(sizes, [each.step_s for each in plans], color="gray", linewidth=1, drawstyle="steps-pre", zorder=1)
    for size, each in zip(sizes, plans, strict=True):
        exact = each.exact
        axes.scatter(size, each.step_s, color="tab:blue", facecolor="tab:blue" if exact else "white", zorder=2)
        number = str(found.points.index(each) + 1)
        axes.annotate(number, (size, each.step_s), xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel(f"{label} (filled: exact)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
