import dataclasses
import io
import random
import re

import pytest
from rich.console import Console

from tests.profiling.synthetic import MS, event, known_run, recording
from zenflow_compile.performance.hardware import Bandwidths
from zenflow_compile.performance.traffic import Traffic
from zenflow_compile.profiling.gantt import Cell, draw
from zenflow_compile.profiling.lanes import BACKWARD, COPY, EXPOSED, FORWARD, HOST, IDLE, STATE, UPDATE, WAIT
from zenflow_compile.profiling.recording import Recording, intersect, length_ns, union
from zenflow_compile.profiling.report import can_show_blocks, print_report
from zenflow_compile.timeline import AdaptiveWindows

TRAFFIC = Traffic(
    host=60e6, to_host=4e6, to_device=1e6, blocking=False,
    host_per_window=224_000_000, host_per_gradient=4_000_000, upload_per_window=4_000_000,
)  # fmt: skip


def printed(recordings, *, width=80, encoding="utf-8", **console_options):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    print_report(recordings, Console(file=file, width=width, **console_options))
    file.flush()
    return raw.getvalue().decode(encoding)


def many_workers():
    events = list(known_run().events)
    events += [event(f"worker {i}", "host_update", 5 * i, 5 * i + 4, step=7) for i in range(2, 12)]
    return recording(events)


def limited():
    bandwidths = Bandwidths(host=123.4e9, to_host=10e9, to_device=5e9)
    return dataclasses.replace(known_run(), traffic=TRAFFIC, bandwidths=bandwidths)


@pytest.mark.parametrize(
    "made", [known_run(), many_workers(), limited(), Recording(events=())], ids=["known", "many", "limited", "empty"]
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252", "latin-1"])
@pytest.mark.parametrize("width", [60, 80, 132])
def test_fits_without_control_codes(made, encoding, width):
    text = printed([made], width=width, encoding=encoding)
    assert "\x1b" not in text
    assert all(character == "\n" or character.isprintable() for character in text)
    assert max(len(line) for line in text.splitlines()) <= width


def test_80_columns_when_output_is_not_a_terminal(capsys, monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    print_report([known_run()], Console())
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "compute" in text


def test_color_only_adds_codes(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    colored = printed([known_run()], force_terminal=True, color_system="standard")
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == printed([known_run()])


def test_blocks_only_if_the_encoding_has_them():
    assert "█" in printed([known_run()])
    text = printed([known_run()], encoding="ascii")
    assert "f forward" in text
    assert "8 host update, hidden" in text
    assert not can_show_blocks(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="latin-1")))


def test_numbers_in_the_table():
    text = " ".join(printed([known_run()]).split())
    for part in (
        "steps 2",
        "step time 40.0 ms median, 40.0 ms mean, 40.0 ms p95",
        "9.00 ms forward + 20.0 ms backward + 6.00 ms update + 1.00 ms merge + 4.00 ms stall + 0.00 ms other",
        "stall 10% of the time",
        "host update 30.0 ms per step, 93% hidden, 7% exposed, 34% busy (2 workers)",
        "host bandwidth 15.4 GB/s",
        "device to host 8.00 MB per step, 1.6 GB/s",
        "host to device 1.25 MB per step, 0.8 GB/s",
        "250.00 kB per step",
        "traffic 0.90 model sizes per step, 0.03 of state",
        "selected norm share 61% of the squared gradient norm in 10% of the elements",
        "windows flushed 4",
        "re-selections 1",
    ):
        assert part in text


def test_values_of_a_narrow_table_are_below_the_names():
    lines = printed([known_run()], width=40).splitlines()
    assert lines[lines.index("step time") + 1] == "  40.0 ms median, 40.0 ms mean, 40.0 ms"
    assert max(map(len, lines)) <= 40


def test_unmeasured_values_are_a_dash():
    bare = recording([event("step", "step", 0, 10)], norms=None, selected_share=None, model_bytes=0)
    lines = {line[:20].strip(): line[20:].strip() for line in printed([bare]).splitlines()}
    for name in ("host bandwidth", "traffic", "selected norm share"):
        assert lines[name] == "-", name
    assert lines["parts of a step"] == "0.00 ms stall + 10.0 ms other"
    assert lines["stall"] == "0% of the time"
    empty = printed([Recording(events=())])
    assert "None" not in empty
    assert "nan" not in empty
    assert "Nothing was measured" in empty


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (AdaptiveWindows(3, 4, measured=True), "auto, 3 to 4, at least 3 by time, 1.0 on average"),
        (AdaptiveWindows(None, 4, measured=True), "auto, 3 to 4, time not measured yet, 1.0 on average"),
        (AdaptiveWindows(3, 4, measured=False), "auto, 3 to 4, 1.0 on average"),
        (AdaptiveWindows(1, 4, measured=False), "auto, 3 to 4, 1.0 on average"),
        (None, None),
    ],
)
def test_adaptive_windows_have_a_row(bounds, said):
    lines = printed([dataclasses.replace(known_run(), adaptive_windows=bounds)]).splitlines()
    found = [line[20:].strip() for line in lines if line.startswith("update interval")]
    assert found == ([said] if said else [])


def limits(bandwidths, traffic=TRAFFIC):
    """Return the report's text on limits: the run's steps take 40 ms, of which 4 are a stall."""
    made = dataclasses.replace(known_run(), traffic=traffic, bandwidths=bandwidths)
    text = " ".join(printed([made]).split())
    return text[text.index("limit: at least") :].strip()


def test_limits_with_measured_bandwidths():
    assert limits(Bandwidths(host=20e9, to_host=10e9, to_device=5e9)) == (
        "limit: at least host 3.00 ms at 20.0 GB/s, D2H 0.40 ms at 10.0 GB/s, H2D 0.20 ms at 5.0 GB/s per step "
        "limit: at best 36.0 ms per step, no stall, and the host update is hidden from update_interval=1 on"
    )


def test_limits_use_the_faster_bandwidth():
    """It reached 15.4, 1.6 and 0.8 GB/s."""
    text = limits(Bandwidths(host=1e9, to_host=1e6, to_device=1e6))
    assert "host 3.90 ms at 15.4 GB/s, D2H 2.50 ms at 1.6 GB/s, H2D 1.20 ms at 0.8 GB/s" in text


def test_limits_include_the_disk_if_measured():
    filed = dataclasses.replace(TRAFFIC, files=25e6)
    bandwidths = Bandwidths(host=20e9, to_host=10e9, to_device=5e9)
    assert "disk 50.0 ms at 1.0 GB/s" in limits(dataclasses.replace(bandwidths, disk=1e9), filed)
    assert "disk" not in limits(bandwidths, filed)


def test_limits_name_the_unavoidable_stall():
    heavy = dataclasses.replace(TRAFFIC, host=2e9, host_per_gradient=1_000_000_000)
    assert limits(Bandwidths(host=20e9, to_host=10e9, to_device=5e9), heavy).endswith(
        "limit: at best 40.0 ms per step, 4.00 ms of it stall, and no update_interval hides the host update"
    ), "never above what was measured"
    blocking = dataclasses.replace(TRAFFIC, blocking=True)
    assert limits(Bandwidths(host=20e9, to_host=10e9, to_device=5e9), blocking).endswith(
        "limit: at best 39.0 ms per step, 3.00 ms of it stall"
    )


def test_compilation_has_a_row_and_no_other_time():
    events = list(known_run().events)
    later = [
        dataclasses.replace(each, start_ns=each.start_ns + 100 * MS, end_ns=each.end_ns + 100 * MS) for each in events
    ]
    compiling = [
        event("step", "step", 0, 100, step=6),
        event("compute", "compile", 1, 60),
        event("compute", "compile", 61, 100),
    ]
    text = " ".join(printed([recording([*compiling, *later])]).split())
    assert "compilation 2 times, 98.0 ms in all, left out of every other row" in text
    assert "step time 40.0 ms median" in text


def test_forwards_that_are_not_recorded_are_said():
    events = [each for each in known_run().events if each.kind != "forward"]
    text = " ".join(printed([recording(events)]).split())
    assert "93% not waited for (a model that is not compiled records no forward)" in text
    assert "host update, not waited for" in text  # the legend
    assert "hid" not in text


def test_no_limit_without_measured_bandwidths():
    assert "limit" not in printed([dataclasses.replace(known_run(), traffic=TRAFFIC)])


def test_report_is_sentences_then_lanes_then_table():
    sentences, lanes, table = printed([known_run()]).rstrip().split("\n\n")
    assert sentences.startswith("The first layers' updates have too little time")
    assert lanes.startswith("The last 2 steps, 80.0 ms")
    assert table.startswith("steps ")


def test_shares_of_the_link():
    """It reached 1.6 GB/s down and 0.8 GB/s up."""
    text = " ".join(printed([limited()]).split())
    assert "8.00 MB per step, 1.6 GB/s, 16% of the link" in text
    assert "1.25 MB per step, 0.8 GB/s, 17% of the link" in text


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"flops_per_step": 2e12, "device_flops": 100e12}, "50 TFLOP/s, 50% of the device's 100 TFLOP/s"),
        ({"flops_per_step": 2e9}, "50 GFLOP/s"),
        ({"device_flops": 100e12}, None),
    ],
)
def test_device_work_only_if_the_program_tells_it(told, said):
    lines = printed([dataclasses.replace(known_run(), **told)]).splitlines()
    found = [line.removeprefix("device work").strip() for line in lines if line.startswith("device work")]
    assert found == ([said] if said else [])


def test_device_memory_by_phase():
    measured = [event("memory", kind, 39, 39, step=7, size=size) for kind, size in (("forward", 3e9), ("peak", 4e9))]
    of_others = [event("memory", "forward", 100, 100, step=9, size=9e9)]
    text = " ".join(printed([recording([*known_run().events, *measured, *of_others])]).split())
    assert "device memory 4.00 GB at most, 3.00 GB after the forward" in text
    assert "device memory" not in printed([known_run()])


def test_every_optimizer_has_its_report():
    titled = [dataclasses.replace(known_run(), title=f"optimizer {i} of 2") for i in (1, 2)]
    text = printed(titled)
    assert text.index("optimizer 1 of 2") < text.index("optimizer 2 of 2")
    assert text.count("step time") == 2


def test_no_recordings_still_print():
    assert "Nothing was measured" in printed([])


def test_gantt_cells():
    """One step of 20 ms on 20 cells, so every cell is one millisecond."""
    events = [
        event("step", "step", 0, 20, step=3),
        event("compute", "forward", 0, 8),
        event("compute", "wait", 2, 4),
        event("compute", "merge", 4, 5),
        event("compute", "backward", 8, 16),
        event("compute", "update", 16, 18),
        event("D2H", "copy", 9, 12),
        event("H2D", "state", 1, 2),
        event("H2D", "copy", 2.4, 2.6),
        event("worker 0", "host_update", -5, 4),
    ]
    gantt = draw(recording(events), width=20 + len("worker 0  ") + len(" 100%"))
    assert gantt is not None
    assert [cell.mark for cell in gantt.rows["compute"]] == [
        *[FORWARD] * 2, *[WAIT] * 2, UPDATE, *[FORWARD] * 3, *[BACKWARD] * 8, *[UPDATE] * 2, *[IDLE] * 2
    ]  # fmt: skip
    assert gantt.rows["D2H"] == (*[Cell(IDLE)] * 9, *[Cell(COPY, 8)] * 3, *[Cell(IDLE)] * 8)
    assert gantt.rows["H2D"] == (Cell(IDLE), Cell(STATE, 8), Cell(COPY, 2), *[Cell(IDLE)] * 17)  # 0.2 of a slice
    assert gantt.rows["worker 0"] == (*[Cell(HOST, 8)] * 2, *[Cell(EXPOSED, 8)] * 2, *[Cell(IDLE)] * 16)
    assert gantt.busy == {"D2H": pytest.approx(0.15), "H2D": pytest.approx(0.06), "worker 0": pytest.approx(0.2)}
    assert gantt.ruler == "|step 3" + " " * 13


def test_cell_shows_the_longest_kind():
    events = [
        event("step", "step", 0, 16),
        event("compute", "forward", 0, 16),
        event("compute", "wait", 0.0, 0.4),
        event("compute", "wait", 1.0, 1.6),
    ]
    gantt = draw(recording(events), width=16 + len("compute  ") + len(" 100%"))
    assert gantt is not None
    assert [cell.mark for cell in gantt.rows["compute"][:3]] == [FORWARD, WAIT, FORWARD]


@pytest.mark.parametrize("seed", range(5))
def test_levels_are_busy_shares_within_an_eighth(seed):
    draw_from = random.Random(seed)
    events = [event("step", "step", 0, 400), event("compute", "forward", 0, 250), event("compute", "wait", 250, 400)]
    for lane, kind in (("D2H", "copy"), ("H2D", "copy"), ("worker 0", "host_update")):
        starts = sorted(draw_from.uniform(0, 400) for _ in range(60))
        events += [event(lane, kind, start, start + draw_from.expovariate(0.3)) for start in starts]
    run = recording(events)
    gantt = draw(run, width=40 + len("worker 0  ") + len(" 100%"))
    for lane in ("D2H", "H2D", "worker 0"):
        busy = intersect(
            union((each.start_ns, each.end_ns) for each in run.events if each.lane == lane), [(0, 400 * MS)]
        )
        assert gantt.busy[lane] == pytest.approx(length_ns(busy) / (400 * MS))
        for number, cell in enumerate(gantt.rows[lane]):
            share = length_ns(intersect(busy, [(number * 10 * MS, (number + 1) * 10 * MS)])) / (10 * MS)
            assert abs((cell.level or 0) / 8 - share) <= 1 / 8
            assert (cell.mark is IDLE) == (share == 0)
        text = printed([run], width=40 + len("worker 0  ") + len(" 100%"), encoding="ascii")
        assert re.search(rf"^{lane} +[1-8.]{{40}} +{100 * gantt.busy[lane]:.0f}%$", text, re.MULTILINE)


def test_gantt_shows_the_last_steps_only():
    steps = [event("step", "step", 10 * i, 10 * i + 10, step=i) for i in range(9)]
    gantt = draw(recording(steps), width=80, steps=4)
    assert gantt is not None
    assert gantt.steps == 4
    assert gantt.span_ms == 40.0
    assert gantt.ruler.replace("|step", "").split() == ["5", "6", "7", "8"]


def test_step_numbers_never_run_into_each_other():
    steps = [event("step", "step", i, i + 1, step=100_000 + i) for i in range(12)]
    gantt = draw(recording(steps), width=60, steps=12)
    assert gantt is not None
    assert gantt.ruler.count("|") == 12
    assert len(gantt.ruler) == 60 - len("compute  ") - len(" 100%")


def test_workers_in_numeric_order():
    gantt = draw(many_workers(), width=80)
    assert gantt is not None
    assert list(gantt.rows) == ["compute", "D2H", "H2D", *(f"worker {i}" for i in range(12))]


def test_compact_lanes_without_workers_are_idle():
    """Long update windows: no host update in the last steps."""
    steps = [event("step", "step", 0, 10), event("D2H", "copy", 0, 5)]
    gantt = draw(recording(steps), width=80, compact=True)
    assert gantt is not None
    assert {cell.mark for cell in gantt.rows["workers"]} == {IDLE}
    assert gantt.busy == {"copies": pytest.approx(0.25), "workers": 0.0}


def test_gantt_without_events():
    assert draw(Recording(events=()), width=80) is None
    assert draw(recording([event("step", "step", 5, 5)]), width=80) is None
