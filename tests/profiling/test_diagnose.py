import dataclasses
from itertools import pairwise

import pytest

from tests.profiling.synthetic import event, known_run, recording
from zenflow_compile.profiling.content import sentences_of
from zenflow_compile.profiling.diagnose import diagnose, milliseconds, percent
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.summary import summarize


def run(*, waits=(), workers=((0.0, 0.0),), d2h=0.0, h2d=0.0, up="copy", slack=9.0, steps=3, **changes) -> Recording:
    """Steps of 10 ms forward, 20 backward and the given (start, ms) waits, which make the forward longer.

    The weight that a host update is of is used ``slack`` ms after the step began.
    """
    events = []
    stalled = sum(ms for _, ms in waits)
    period = 30 + stalled
    for step in range(steps):
        origin = step * period
        backward = origin + 10 + stalled
        events += [
            event("step", "step", origin, origin + period, step=step),
            event("compute", "forward", origin, backward, step=step),
            event("compute", "backward", backward, origin + period, step=step),
            event("D2H", "copy", backward, backward + d2h, step=step, size=int(d2h * 1e7)),
            event("H2D", up, origin, origin + h2d, step=step, size=int(h2d * 1e7)),
        ]
        for index, (start, ms) in enumerate(waits):
            events.append(
                event("compute", "wait", origin + start, origin + start + ms, step=step, param=f"layers.{index}")
            )
        for index, (start, ms) in enumerate(workers):
            of = {"step": step, "param": "layers.0"}
            events.append(event(f"worker {index}", "host_update", origin + start, origin + start + ms, **of))
            events.append(event("slack", "slack", origin, origin + slack, **of))
    return recording(events, **changes)


def without(kind: str, made: Recording) -> Recording:
    return dataclasses.replace(made, events=tuple(each for each in made.events if each.kind != kind))


CASES = {
    "compute-bound, all hidden, busy workers": (
        run(workers=((10.0, 15.0),), d2h=5.0, h2d=1.0),
        ["device's own work limits", "host update 100% hidden", "no offloading option"],
        [],
    ),
    "compute-bound with capacity left": (
        run(workers=((10.0, 5.0),), d2h=5.0, h2d=1.0),
        ["device's own work limits", "update_interval=2"],
        ["raise"],
    ),
    "host update longer than its time": (
        run(waits=((1.0, 20.0), (25.0, 5.0)), workers=((0.0, 50.0),), d2h=2.0, h2d=1.0),
        ["host update limits", "update_interval from 4 to 8", "topk_ratio", "workers", "1 worker)"],
        ["device_share"],
    ),
    "host update on two workers": (
        run(waits=((8.0, 10.0),), workers=((0.0, 12.0), (0.0, 12.0)), d2h=2.0, h2d=1.0),
        ["host update limits", "12.0 ms per step on each of 2 workers", "25%"],
        [],
    ),
    "device to host": (
        run(waits=((6.0, 10.0),), workers=((0.0, 2.0),), d2h=30.0, h2d=1.0),
        ["from device to host limit", "10.0 GB/s", "raise topk_ratio"],
        ["update_interval"],
    ),
    "host to device": (
        run(waits=((6.0, 10.0),), workers=((0.0, 2.0),), d2h=1.0, h2d=15.0),
        ["from host to device limit", "update_interval from 4 to 8"],
        ["topk_ratio"],
    ),
    "loads of weights": (
        run(waits=((6.0, 10.0),), workers=((0.0, 2.0),), d2h=1.0, h2d=15.0, up="load"),
        ["Loads of weights limit", "offload_weights", "micro-batch"],
        ["update_interval"],
    ),
    "first layers": (
        run(waits=((0.0, 3.0),), workers=((20.0, 6.0),), d2h=2.0, h2d=1.0),
        ["first layers", "layers.0", "device_share", "3.00 ms"],
        ["update_interval"],
    ),
    "late flushes, though lanes have capacity": (
        run(waits=((8.0, 3.0),), workers=((20.0, 6.0),), d2h=2.0, h2d=1.0),
        ["too late (most at layers.0)", "option workers"],
        ["device_share"],
    ),
    "waits for weights whose updates were not late": (
        run(waits=((8.0, 3.0),), workers=((20.0, 6.0),), slack=33.0, d2h=2.0, h2d=1.0),
        ["too late, 3.00 ms of waiting"],
        ["layers.0"],
    ),
    "waits without any host update": (
        run(waits=((8.0, 3.0),), workers=(), d2h=2.0, h2d=1.0),
        ["The step waits (most at layers.0), 3.00 ms of waiting", "no host update ran"],
        ["option", "device_share"],
    ),
    "not compiled": (
        without("forward", run(workers=((10.0, 15.0),), d2h=5.0, h2d=1.0)),
        ["device's own work limits", "host update 100% not waited for"],
        ["hid", "outside"],
    ),
    "most of a step is data loading": (
        without("backward", run(workers=((5.0, 5.0),), d2h=5.0, h2d=1.0)),
        ["Most of a step runs outside", "(20.0 ms of 30.0 ms)", "no option changes that"],
        ["device's own"],
    ),
    "data loading, and nothing offloaded": (
        recording([event("step", "step", 0, 10), event("compute", "forward", 0, 2)], policy="resident"),
        ["Nothing was offloaded (policy resident); policy"],
        ["device's own"],
    ),
    "blocking policy": (
        run(waits=((8.0, 10.0),), workers=((0.0, 10.0),), policy="zero_offload", update_interval=1, blocking=True),
        ["by design", "zero_offload", 'policy="zenflow"', "25%"],
        ["overlap_step"],
    ),
    "overlap turned off": (
        run(waits=((8.0, 10.0),), workers=((0.0, 10.0),), blocking=True),
        ["by design", "overlap_step=True"],
        ['policy="zenflow"'],
    ),
    "resident": (
        recording([event("step", "step", 0, 10), event("compute", "forward", 0, 9)], policy="resident"),
        ["Nothing was offloaded", "resident", "10.0 ms"],
        [],
    ),
    "nothing": (Recording(events=()), ["Nothing was measured"], []),
}


@pytest.mark.parametrize("case", CASES)
def test_names_the_limit_and_the_option(case):
    made, wanted, unwanted = CASES[case]
    sentence = diagnose(summarize(made)).sentence
    for text in wanted:
        assert text in sentence
    for text in unwanted:
        assert text not in sentence


def test_data_loading_is_said_first():
    waiting = without("backward", run(waits=((8.0, 5.0),), workers=(), d2h=2.0, h2d=1.0))
    first, second = sentences_of(waiting, summarize(waiting))
    assert first.startswith("Most of a step runs outside of the compiled graphs and the optimizer (20.0 ms of 35.0 ms)")
    assert second.startswith("The step waits")


def test_means_are_named():
    """Three steps of 20 ms and one of 60: no step takes 30."""
    ends = [20, 40, 60, 120]
    steps = [event("step", "step", start, end) for start, end in pairwise([0, *ends])]
    made = recording([*steps, event("compute", "forward", 0, 120), event("worker 0", "host_update", 0, 50)])
    assert "(30.0 ms per step" in diagnose(summarize(made)).sentence


@pytest.mark.parametrize("case", CASES)
def test_diagnosis_is_one_sentence(case):
    sentence = diagnose(summarize(CASES[case][0])).sentence
    assert sentence.endswith(".")
    assert ". " not in sentence
    assert "\n" not in sentence
    assert "None" not in sentence
    assert "nan" not in sentence.lower()


def test_every_case_has_its_own_text():
    sentences = {diagnose(summarize(made)).sentence for made, _, _ in CASES.values()}
    assert len(sentences) == len(CASES)


def test_diagnosis_without_recorded_phases():
    """Without forward and backward events, the lane that is nearly always busy is the limit."""
    events = [event("step", "step", 0, 10), event("compute", "wait", 1, 6), event("worker 0", "host_update", 0, 9)]
    assert "host update limits" in diagnose(summarize(recording(events))).sentence


def test_impossible_option_is_not_suggested():
    exact = dataclasses.replace(known_run(), update_interval=1)
    assert "update_interval=0" not in diagnose(summarize(exact)).sentence


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00 ms"), (0.456, "0.46 ms"), (9.99, "9.99 ms"), (9.999, "10.0 ms"), (99.97, "100 ms"), (9999, "9999 ms")],
)
def test_milliseconds(value, text):
    assert milliseconds(value) == text


def test_long_times_are_seconds():
    assert milliseconds(12_345) == "12.3 s"


@pytest.mark.parametrize(("share", "text"), [(0, "0%"), (0.001, "<1%"), (0.994, ">99%"), (1.0, "100%"), (0.5, "50%")])
def test_percent(share, text):
    assert percent(share) == text
