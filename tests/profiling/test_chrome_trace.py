import dataclasses
import json

import pytest

from tests.profiling.synthetic import event, known_run, recording
from zenflow_compile.profiling.chrome_trace import chrome_trace, write_chrome_trace
from zenflow_compile.profiling.recording import Recording


def by_phase(trace, phase):
    return [entry for entry in trace["traceEvents"] if entry["ph"] == phase]


def track_names(trace):
    return {
        (entry["pid"], entry["tid"]): entry["args"]["name"]
        for entry in by_phase(trace, "M")
        if entry["name"] == "thread_name"
    }


def test_file_has_the_fields_of_the_format(tmp_path):
    path = tmp_path / "trace.json"
    write_chrome_trace([known_run()], path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] == "ms"
    names = track_names(trace)
    for entry in trace["traceEvents"]:
        assert entry["ph"] in {"M", "X", "i", "C"}
        assert isinstance(entry["pid"], int)
        assert isinstance(entry["tid"], int)
        assert isinstance(entry["name"], str)
        if entry["ph"] != "M":
            assert entry["ts"] >= 0
        if entry["ph"] == "X":
            assert entry["dur"] >= 0
            assert names[entry["pid"], entry["tid"]].startswith(entry["cat"])
        if entry["ph"] == "i":
            assert entry["s"] == "t"
    assert by_phase(trace, "M")[0]["args"]["name"] == "zenflow zenflow"


def test_all_events_have_times_in_microseconds():
    trace = chrome_trace([known_run()])
    assert len(by_phase(trace, "X")) + len(by_phase(trace, "i")) == len(known_run().events)
    (wait, later) = [entry for entry in by_phase(trace, "X") if entry["name"] == "wait"]
    assert (wait["ts"], wait["dur"]) == (2000.0, 4000.0)
    assert wait["args"] == {"step": 7, "param": "first"}
    assert later["ts"] == 42_000.0
    state = next(entry for entry in by_phase(trace, "X") if entry["name"] == "state")
    assert state["args"]["bytes"] == 500_000


def test_lanes_are_named_in_order():
    events = [*known_run().events, event("worker 10", "host_update", 0, 1), event("worker 2", "host_update", 0, 1)]
    trace = chrome_trace([recording(events)])
    names = [name for _, name in sorted(track_names(trace).items())]
    assert names == [
        "step", "compute", "windows", "D2H", "D2H (2)", "H2D", "worker 0", "worker 1", "worker 2", "worker 10"
    ]  # fmt: skip
    order = [entry["args"]["sort_index"] for entry in by_phase(trace, "M") if entry["name"] == "thread_sort_index"]
    assert order == sorted(order)


def test_spans_of_a_track_nest():
    """Perfetto misplaces spans of one thread that overlap without one being inside the other."""
    trace = chrome_trace([known_run()])
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for entry in by_phase(trace, "X"):
        tracks.setdefault((entry["pid"], entry["tid"]), []).append((entry["ts"], entry["ts"] + entry["dur"]))
    for spans in tracks.values():
        for a_start, a_end in spans:
            for b_start, b_end in spans:
                disjoint = a_end <= b_start or b_end <= a_start
                nested = (a_start <= b_start and b_end <= a_end) or (b_start <= a_start and a_end <= b_end)
                assert disjoint or nested


def test_bytes_in_flight():
    events = [
        event("D2H", "copy", 1, 5, size=6),
        event("D2H", "copy", 4, 7, size=2),
        event("D2H", "copy", 7, 8, size=3),
    ]
    counter = by_phase(chrome_trace([recording(events)]), "C")
    assert {entry["name"] for entry in counter} == {"D2H bytes in flight"}
    values = [(entry["ts"], entry["args"]["bytes"]) for entry in counter]
    assert values == [(0.0, 6), (3000.0, 8), (4000.0, 2), (6000.0, 3), (7000.0, 0)]


def test_optimizers_are_processes_on_one_clock():
    second = dataclasses.replace(
        recording([event("step", "step", 10, 20), event("compute", "forward", 10, 15)]), title="optimizer 2 of 2"
    )
    trace = chrome_trace([known_run(), second])
    assert {entry["pid"] for entry in trace["traceEvents"]} == {1, 2}
    (forward,) = [entry for entry in by_phase(trace, "X") if entry["pid"] == 2 and entry["name"] == "forward"]
    assert forward["ts"] == 10_000.0
    assert "optimizer 2 of 2" in [entry["args"].get("name") for entry in by_phase(trace, "M")]


@pytest.mark.parametrize("recordings", [[], [Recording(events=())]])
def test_empty_traces_load(recordings):
    assert by_phase(json.loads(json.dumps(chrome_trace(recordings))), "X") == []


def test_device_memory_is_a_counter():
    events = [
        event("memory", "forward", 1, 1, size=7),
        event("memory", "peak", 2, 2, size=9),
        event("step", "step", 0, 3),
    ]
    found = [(entry["name"], entry["ts"], entry["args"]) for entry in by_phase(chrome_trace([recording(events)]), "C")]
    assert found == [("device bytes", 1000.0, {"bytes": 7}), ("device bytes, peak", 2000.0, {"bytes": 9})]
