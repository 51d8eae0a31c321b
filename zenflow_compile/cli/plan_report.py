"""Prints a prediction: a row per policy, the memory of the best one, and the options to paste."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zenflow_compile.checks.printable import printable
from zenflow_compile.performance.rank_traffic import Exchange
from zenflow_compile.prediction.bytes_per_parameter import GRADIENTS, STATE, Combination
from zenflow_compile.prediction.forecast import Forecast
from zenflow_compile.prediction.predict import Prediction
from zenflow_compile.prediction.scenario import SOME_DISK, Scenario

_NOTHING = "-"
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
    where = "torch.compile" if asked.in_backward else "ZenFlowAdamW"
    console.print(Text(f"Fastest that fits: {shown.title}. Options to pass to {where}:"))
    console.print(Text(json.dumps(shown.options, indent=4)))
    if shown.options.get("nvme_path") == SOME_DISK:
        console.print(Text("nvme_path stands for a directory on a local disk."))
    if prediction.exactness is not None:
        console.print(Text(prediction.exactness))


def heading(asked: Scenario) -> str:
    """The scenario, in a sentence."""
    devices = "1 device" if asked.hardware.devices == 1 else f"{asked.hardware.devices} devices"
    if asked.hardware.nodes > 1:
        devices += f" on {asked.hardware.nodes} nodes"
    sequences = f" in sequences of {asked.model.context}" if asked.model.context else ""
    form = "without" if asked.in_backward else "with"
    return (
        f"{asked.model.name}, {asked.model.numel / 1e9:.2f}e9 parameters in {asked.dtype}, on {asked.hardware.name}, "
        f"{devices}, {asked.tokens} tokens per device and step{sequences}, {form} an optimizer object"
    )


def times(forecasts: Sequence[Forecast], *, hours: bool) -> Table:
    """Time and traffic, a row per policy."""
    table = made_table(
        "Predicted time",
        "After a policy: its ratio, update_stride (none: nothing is streamed), GB of spare_device_bytes. Host: time in "
        "which its workers update, all at the same time. Moves: traffic in model sizes per step, streamed state "
        "and loaded weights included.",
    )
    table.add_column("policy")
    for column in ("step", "stall", "host", "moves", "tokens/s", *(["hours"] if hours else [])):
        table.add_column(column, justify="right", no_wrap=True)
    for each in forecasts:
        cells = [seconds(value) for value in (each.step_s, each.stall_s, each.host_update_s)]
        cells += [f"{each.moves:.2f}", f"{each.tokens_per_s:.0f}"]
        if each.hours is not None:
            cells.append(f"{each.hours:.3g}")
        table.add_row(each.title, *cells, style=_style(each))
    return table


def memory(forecasts: Sequence[Forecast]) -> Table:
    """Memory, a row per policy, and whether it fits."""
    table = made_table("Memory, GB", "Device: of one device. Host and disk: of all nodes. Activations are an estimate.")
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
    table = Table(title=title, caption=caption, min_width=_WIDTH, box=SIMPLE_HEAD, pad_edge=False)
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
    table = made_table(
        f"Sent per step with {each.title}, GB",
        "By one device: to other devices, and over its link to the host. Times are those of process_group=.",
    )
    table.add_column("sharing", no_wrap=True)
    for column in ("to devices", "to host", "from host"):
        table.add_column(column, justify="right", no_wrap=True)
    for exchange, name in _SHARING.items():
        sent = prediction.exchanges[exchange]
        table.add_row(name, *(gigabytes(size) for size in (sent.sent, sent.to_host, sent.to_device)))
    return table


def bytes_table(title: str, combinations: Sequence[Combination]) -> Table:
    """Bytes per parameter, a row per way to store the state, a column per way to keep gradients."""
    on_disk = any(each.disk for each in combinations)
    table = made_table(
        f"Bytes per parameter with {title}",
        f"Host / device{' / disk' if on_disk else ''}: of the device without weights and activations. Columns: "
        "gradients as they are, as int8 (gradient_compression), or summed on the device (accumulate_on_device); "
        "shared: with shared_buffers. -: these do not go together.",
    )
    table.add_column("state", no_wrap=True)
    ways = [way for way in GRADIENTS if any(way.items() <= each.options.items() for each in combinations)]
    for way in ways:
        name = "int8" if "gradient_compression" in way else "summed" if "accumulate_on_device" in way else "plain"
        table.add_column(f"{name}, shared" if way["shared_buffers"] else name, justify="right")
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
    Exchange.CHANGED_SLICES: "process_group=",
    Exchange.SHARDED: "fully_shard",
    Exchange.WHOLE_WEIGHTS: "ZeRO-2, whole weights",
    Exchange.ALL_REDUCE: "DDP, an optimizer each",
}


def missing(shortages: Mapping[str, int]) -> str:
    """Missing GB by memory."""
    return ", ".join(f"{gigabytes(size)} on {memory}" for memory, size in shortages.items())


def _style(each: Forecast) -> str | None:
    return None if each.fits else "dim"


def seconds(value: float) -> str:
    """A time with its unit."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def gigabytes(size: float) -> str:
    """A size in GB without the unit."""
    return _NOTHING if not size else f"{size / 1e9:.1f}"
