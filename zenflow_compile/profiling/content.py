"""What a report says: sentences, and rows of a name and a value; the same on a terminal and in a page."""

from __future__ import annotations

from zenflow_compile.checks.validate import printable
from zenflow_compile.performance.equations import Limit
from zenflow_compile.profiling.diagnose import diagnose, hidden_text, milliseconds, outside_of_graphs, percent
from zenflow_compile.profiling.gains import gain_of, limit_of_run, reached
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.summary import Summary

NOT_MEASURED = "-"
_TIGHTEST = 3  # blocks in the row on slack
_DENSE_LINES = 3


def sentences_of(recording: Recording, summary: Summary) -> list[str]:
    """Say what limits this run and which option would help, and by how much if the bandwidths tell."""
    found = diagnose(summary)
    said = (outside_of_graphs(summary), found.sentence, gain_of(found.change, recording, summary))
    return [printable(each) for each in dict.fromkeys(said) if each is not None]


def rows_of(recording: Recording, summary: Summary) -> list[tuple[str, str]]:
    """Name and value of every row; a dash where nothing was measured."""
    rows = [*_rows(recording, summary), *_limit_rows(recording, summary), *recording.rows]
    return [(name, printable(value)) for name, value in rows]


def _rows(recording: Recording, s: Summary) -> list[tuple[str, str]]:
    steps = str(s["steps"])
    if s["warm_up_steps"]:
        steps += f", the first {s['warm_up_steps']} left out below (warm-up)"
    if recording.older_dropped:
        steps += "; of earlier ones not all events were kept (max_events)"
    parts = (  # they add up to step_ms
        ms_text(s["forward_ms_per_step"], " forward"),
        ms_text(s["backward_ms_per_step"], " backward"),
        ms_text(s["update_ms_per_step"], " update"),
        ms_text(s["merge_ms_per_step"], " merge"),
        ms_text(s["select_ms_per_step"], " re-selection"),
        ms_text(s["stall_ms_per_step"], " stall"),
        *([] if s["rank_wait_ms_per_step"] is None else [ms_text(s["rank_wait_ms_per_step"], " waits for ranks")]),
        ms_text(s["other_ms_per_step"], " other"),
    )
    rows = [
        ("steps", steps),
        (
            "step time",
            join(
                ms_text(s["step_ms_median"], " median"),
                ms_text(s["step_ms"], " mean"),
                ms_text(s["step_ms_p95"], " p95"),
            ),
        ),
        ("parts of a step", join(*parts, separator=" + ")),
    ]
    if s["compilations"]:
        took = f"{_count(s['compilations'], 'time')}, {milliseconds(s['compilation_ms'])} in all"
        rows.append(("compilation", f"{took}, left out of every other row"))
    if s["evaluation_ms"]:
        rows.append(("evaluation (no_grad)", f"{milliseconds(s['evaluation_ms'])} in all, left out of every other row"))
    rows += [("stall", _share(s["stall_share"], " of the time")), *_device_rows(recording, s)]
    if s["state_note"] is not None:
        rows.append(("state on the host", s["state_note"]))
    busy = _share(s["worker_busy_share"], f" busy ({_count(s['workers'], 'worker')})")
    hidden, links = _hidden(s), _link_shares(recording, s)
    rows += [
        ("host update", join(ms_text(s["host_update_ms_per_step"], " per step"), hidden, busy)),
        *_slack_rows(s),
        ("host bandwidth", _rate(s["host_update_gb_per_s"])),
        ("device to host", join(size_text(s["d2h_bytes_per_step"], " per step"), _rate(s["d2h_gb_per_s"]), links[0])),
        ("host to device", join(size_text(s["h2d_bytes_per_step"], " per step"), _rate(s["h2d_gb_per_s"]), links[1])),
    ]
    if s["state_moves"]:
        rows.append(("of it state", size_text(s["state_bytes_per_step"], " per step")))
    if s["weight_bytes_per_step"]:
        rows.append(("of it weights", size_text(s["weight_bytes_per_step"], " per step")))
    if s["sent_bytes_per_step"] is not None:
        waits = ms_text(s["rank_wait_ms_per_step"], " of waiting")
        rows.append(("other ranks", join(size_text(s["sent_bytes_per_step"], " sent per step"), waits)))
    traffic = _sizes(s["traffic_model_sizes_per_step"], " model sizes per step")
    of_state = _sizes(s["state_model_sizes_per_step"] if s["state_moves"] else None, " of state")
    norm = _share(s["selected_norm_share"], " of the squared gradient norm")
    return [
        *rows,
        ("traffic", join(traffic, of_state)),
        ("selected norm share", join(norm, _share(s["selected_share"], " of the elements"), separator=" in ")),
        ("windows flushed", str(s["windows_flushed"])),
        *_adaptive_windows(s),
        ("re-selections", str(s["selections"])),
        *_dense_rows(s),
    ]


def _device_rows(recording: Recording, s: Summary) -> list[tuple[str, str]]:
    """FLOP/s where the model's work is known, and memory where the device counts it."""
    rows = []
    if recording.flops_per_step is not None and s["step_ms"]:
        flops = recording.flops_per_step / s["step_ms"] * 1e3
        share = NOT_MEASURED
        if recording.device_flops is not None:
            peak = max(recording.device_flops, flops)  # the device may have been busy when it was measured
            share = f"{percent(flops / peak)} of the device's {_flops(peak)}"
        rows.append(("device work", join(_flops(flops), share)))
    if (phases := s["device_bytes_by_phase"]) or s["device_bytes_peak"] is not None:
        after = (f"{size_text(count, f' after the {phase}')}" for phase, count in phases.items())
        rows.append(("device memory", join(size_text(s["device_bytes_peak"], " at most"), *after)))
    return rows


def _flops(per_second: float) -> str:
    value, unit = (per_second / 1e12, "TFLOP/s") if per_second >= 1e11 else (per_second / 1e9, "GFLOP/s")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _link_shares(recording: Recording, s: Summary) -> tuple[str, str]:
    """The rates of copies down and up as shares of the link's measured bandwidths."""
    if recording.bandwidths is None:
        return NOT_MEASURED, NOT_MEASURED
    seen = reached(recording.bandwidths, s)
    down, up = s["d2h_gb_per_s"], s["h2d_gb_per_s"]
    return (
        _share(None if down is None else 1e9 * down / seen.to_host, " of the link"),
        _share(None if up is None else 1e9 * up / seen.to_device, " of the link"),
    )


def _hidden(s: Summary) -> str:
    """How much of the host's updates ran under the device's work, and how much did not."""
    share, hidden = s["hidden_fraction"], hidden_text(s)
    if share is None or hidden is None:
        return NOT_MEASURED
    if not s["forward_recorded"]:
        return f"{hidden} (a model that is not compiled records no forward)"
    return f"{hidden}, {percent(1 - share)} exposed"


def _dense_rows(summary: Summary) -> list[tuple[str, str]]:
    """The user's lines that gave offloaded parameters dense gradients; no row without any."""
    lines = list(summary["dense_gradients"].items())
    texts = [f"{count}, for {line}" for line, count in lines[:_DENSE_LINES]]
    if others := sum(count for _, count in lines[_DENSE_LINES:]):
        texts.append(f"{others}, for {_count(len(lines) - _DENSE_LINES, 'other line')}")
    return [("dense gradients" if number == 0 else "", text) for number, text in enumerate(texts)]


def _slack_rows(summary: Summary) -> list[tuple[str, str]]:
    """The blocks whose host updates have the least time to spare."""
    if summary["blocking"]:
        return []  # the step waits for every update by design
    tightest = list(summary["slack_by_block"].items())[:_TIGHTEST]
    texts = [
        f"{block}: {milliseconds(times['slack_ms'])} until its next use, {milliseconds(times['taken_ms'])} taken"
        for block, times in tightest
    ]
    return [("least slack" if number == 0 else "", text) for number, text in enumerate(texts)]


def _adaptive_windows(s: Summary) -> list[tuple[str, str]]:
    """Bounds and mean of the length of adaptive update windows; no row where windows are of fixed length."""
    if not s["adaptive_windows"]:
        return []
    longest, mean = s["update_interval"] or 1, s["mean_window_steps"]
    # Norms are used two steps late, so that the first two steps of an update window never flush it.
    shortest = min(3, longest)
    if s["shortest_window_measured"]:
        by_time = s["shortest_window"]
        value = f"auto, {shortest} to {longest}"
        value += ", time not measured yet" if by_time is None else f", at least {by_time} by time"
    else:
        value = f"auto, {max(shortest, s['shortest_window'] or 1)} to {longest}"
    if mean is not None:
        value += f", {mean:.1f} on average"
    return [("update interval", value)]


def _limit_rows(recording: Recording, summary: Summary) -> list[tuple[str, str]]:
    """The shortest step that this machine's bandwidths allow; no rows where they were not measured."""
    limit = limit_of_run(recording, summary)
    if limit is None or recording.traffic is None or recording.bandwidths is None:
        return []
    seen = reached(recording.bandwidths, summary)
    needs = [("host", limit.host_ms, seen.host), ("D2H", limit.to_host_ms, seen.to_host)]
    needs.append(("H2D", limit.to_device_ms, seen.to_device))
    if limit.disk_ms and seen.disk is not None:
        needs.append(("disk", limit.disk_ms, seen.disk))
    rates = join(*(f"{name} {milliseconds(ms)} at {_rate(rate / 1e9)}" for name, ms, rate in needs))
    return [("limit: at least", f"{rates} per step"), ("limit: at best", _at_best(limit, recording.traffic.blocking))]


def _at_best(limit: Limit, blocking: bool) -> str:
    stall = f"{milliseconds(limit.stall_ms)} of it stall" if limit.stall_ms else "no stall"
    step = f"{milliseconds(limit.step_ms)} per step, {stall}"
    if blocking:
        return step
    if limit.smallest_interval is None:
        return f"{step}, and no update_interval hides the host update"
    return f"{step}, and the host update is hidden from update_interval={limit.smallest_interval} on"


def join(*values: str, separator: str = ", ") -> str:
    """Join the values that were measured; a dash if none was."""
    return separator.join(value for value in values if value != NOT_MEASURED) or NOT_MEASURED


def ms_text(value: float | None, suffix: str = "") -> str:
    return NOT_MEASURED if value is None else milliseconds(value) + suffix


def _share(value: float | None, suffix: str) -> str:
    return NOT_MEASURED if value is None else percent(value) + suffix


def _rate(gb_per_s: float | None) -> str:
    if gb_per_s is None:
        return NOT_MEASURED
    return f"{gb_per_s:.1f} GB/s" if gb_per_s >= 0.1 else f"{1000 * gb_per_s:.2f} MB/s"


def _sizes(value: float | None, suffix: str) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f}{suffix}"


def size_text(count: float | None, suffix: str = "") -> str:
    """Bytes in the decimal units that bandwidths are given in."""
    if count is None:
        return NOT_MEASURED
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}{suffix}"
    return f"{count:.0f} bytes{suffix}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
