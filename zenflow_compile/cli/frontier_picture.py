"""Draws a frontier as SVG, by matplotlib: the extra ``plots``. The same frontier gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zenflow_compile.prediction.forecast import Forecast
from zenflow_compile.prediction.frontier import Frontier
from zenflow_compile.prediction.search import Memory, device_first, host_first

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    axes.set_xlabel(f"{label} (filled: AdamW's numbers)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
