"""The parts of a step sum to the step, and summary, picture and trace agree, with evaluation between the steps."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import zenflow_compile as zf
from tests.profiling.synthetic import MS, event, recording
from tests.support.training import take_step
from zenflow_compile.profiling.chrome_trace import chrome_trace
from zenflow_compile.profiling.gantt import draw
from zenflow_compile.profiling.lanes import BACKWARD, EVALUATION, FORWARD, IDLE, UPDATE, WAIT
from zenflow_compile.profiling.recording import Recording, intersect, length_ns, subtract, union
from zenflow_compile.profiling.report import render
from zenflow_compile.profiling.summary import Summary, summarize


def parts_ms(summary: Summary) -> dict[str, float]:
    """Return the parts of a step that were measured."""
    names = ("forward", "backward", "update", "merge", "select", "stall", "other")
    found = {name: summary[f"{name}_ms_per_step"] for name in names}  # type: ignore[literal-required]
    return {name: ms for name, ms in found.items() if ms is not None}


def evaluated() -> Recording:
    """Steps of 30, 40 and 50 ms, and an evaluation of 100 ms inside the second, with a wait in it."""
    events = []
    for step, begin, forward_ms, evaluation_ms in ((0, 0, 8, 0), (1, 30, 18, 100), (2, 170, 28, 0)):
        forward = begin + evaluation_ms + 2  # 2 ms of data loading
        end = forward + forward_ms + 20
        events += [
            event("step", "step", begin, end, step=step),
            event("compute", "forward", forward, forward + forward_ms, step=step),
            event("compute", "wait", forward + 1, forward + 4, step=step, param="w"),
            event("compute", "backward", forward + forward_ms, forward + forward_ms + 15, step=step),
            event("compute", "update", end - 5, end, step=step),
        ]
        if evaluation_ms:
            for batch in range(10):  # each forward takes 7 ms, and loading its batch 3 ms
                start = begin + 10 * batch
                events.append(event("compute", "inference", start, start + 7 + 3 * (batch == 9), step=step))
            events.append(event("compute", "wait", begin + 10, begin + 30, step=step, param="w"))
    return recording(events)


def test_parts_of_a_known_step() -> None:
    summary = summarize(evaluated())
    assert summary["step_ms"] == 40.0
    assert summary["evaluation_ms"] == 100.0
    assert parts_ms(summary) == {"forward": 15.0, "backward": 15.0, "update": 5.0, "stall": 3.0, "other": 2.0}
    assert summary["stall_share"] == 9 / 120
    assert summary["stall_by_param"] == {"w": 3.0}
    assert summary["step_ms_p95"] == pytest.approx(49.0)


def test_evaluation_changes_no_other_number() -> None:
    """The same run without its 100 ms of evaluation."""
    removed_ns = [(30 * MS, 130 * MS)]

    def earlier(moment_ns: int) -> int:
        return moment_ns - 100 * MS if moment_ns >= 130 * MS else moment_ns

    events = []
    for each in evaluated().events:
        inside = each.lane == "compute" and length_ns(intersect([(each.start_ns, each.end_ns)], removed_ns))
        if not inside:
            start, end = earlier(each.start_ns) / MS, earlier(each.end_ns) / MS
            events.append(event(each.lane, each.kind, start, end, step=each.step, param=each.param))
    with_it, without = summarize(evaluated()), summarize(recording(events))
    assert with_it | {"evaluation_ms": 0.0} == without


def test_evaluation_is_not_warm_up() -> None:
    """The first step is no longer than the others, apart from the evaluation in it."""
    events = [event("compute", "inference", 0, 500, step=0), event("step", "step", 0, 510, step=0)]
    events += [event("step", "step", 500 + 10 * i, 510 + 10 * i, step=i) for i in range(1, 5)]
    assert summarize(recording(events))["warm_up_steps"] == 0


def test_report_shows_the_parts_and_the_evaluation() -> None:
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as capture:
        console.print(render(evaluated(), width=100))
    text = " ".join(capture.get().split())
    assert "The last 3 steps, 220 ms, 100 ms of it evaluation" in text
    assert "step time 40.0 ms median, 40.0 ms mean" in text
    assert "15.0 ms forward + 15.0 ms backward + 5.00 ms update + 3.00 ms stall + 2.00 ms other" in text
    assert "evaluation (no_grad) 100 ms in all, left out of every other row" in text


def test_picture_and_trace_agree_with_the_summary() -> None:
    run = evaluated()
    summary = parts_ms(summarize(run))
    gantt = draw(run, width=220 + len("compute  ") + len(" 100%"))  # a cell is a millisecond
    assert gantt is not None
    cells = [cell.mark for cell in gantt.rows["compute"]]
    marks = {"forward": FORWARD, "backward": BACKWARD, "update": UPDATE, "stall": WAIT, "other": IDLE}
    assert {name: cells.count(mark) / 3 for name, mark in marks.items()} == pytest.approx(summary)
    assert cells.count(EVALUATION) == gantt.evaluation_ms == 100

    spans: dict[str, list[tuple[int, int]]] = {}
    for entry in json.loads(json.dumps(chrome_trace([run])))["traceEvents"]:
        if entry["ph"] == "X":
            begin = round(entry["ts"] * 1e3)
            spans.setdefault(entry["name"], []).append((begin, begin + round(entry["dur"] * 1e3)))
    evaluation = union(spans["evaluation"])
    stall = subtract(union(spans["wait"]), evaluation)
    traced = {name: length_ns(union(spans[name])) for name in ("backward", "update")}
    traced |= {"stall": length_ns(stall), "forward": length_ns(subtract(union(spans["forward"]), stall))}
    traced["other"] = length_ns(subtract(union(spans["step"]), evaluation)) - sum(traced.values())
    assert {name: ns / MS / 3 for name, ns in traced.items()} == pytest.approx(summary)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_parts_of_a_real_run_with_evaluation(inner: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = zf.ZenFlowAdamW(model.named_parameters(), update_interval=2, full_warm_up_rounds=0)
    compiled = torch.compile(model, backend="zenflow", options={"inner": inner})
    x = torch.randn(8, 64)

    def step() -> None:
        take_step(compiled(x).square().mean(), optimizer)

    @torch.no_grad()
    def evaluate() -> None:
        for _ in range(50):
            compiled(x)

    with optimizer:
        for _ in range(4):
            step()
        evaluate()
        with zf.profile(optimizer) as profile:
            for _ in range(4):
                step()
                evaluate()
            step()
    (run,) = profile.recordings()
    summary = summarize(run)
    assert summary["steps"] == 5
    assert summary["step_ms"] == pytest.approx(sum(parts_ms(summary).values()), rel=1e-9)
    spans = [each for each in run.events if each.lane == "compute" and each.kind == "inference"]
    assert len(spans) == 4 * 50
    assert length_ns(run.evaluation) > sum(each.duration_ns for each in spans)
    assert len(run.evaluation) == 4
    assert summary["evaluation_ms"] == pytest.approx(length_ns(run.evaluation) / MS)
    forwards = [each for each in run.events if each.lane == "compute" and each.kind == "forward"]
    assert len(forwards) == 5  # evaluation neither adds nor joins a training forward
    apart = union((each.start_ns, each.end_ns) for each in spans)
    assert not intersect(apart, union((each.start_ns, each.end_ns) for each in forwards))


def test_nested_inference_resumes_the_forward() -> None:
    """A teacher's forward without gradients between two graphs of a training forward."""
    model, teacher = nn.Linear(64, 64), nn.Linear(64, 64)
    named = [*model.named_parameters(prefix="model"), *teacher.named_parameters(prefix="teacher")]
    optimizer = zf.ZenFlowAdamW(named, update_interval=1, full_warm_up_rounds=0)
    options = {"inner": "eager"}
    student = torch.compile(model, backend="zenflow", options=options)
    taught = torch.compile(teacher, backend="zenflow", options=options)
    x = torch.randn(4, 64)
    with optimizer, zf.profile(optimizer) as profile:
        for _ in range(3):
            first = student(x)
            with torch.no_grad():
                target = taught(x)
            take_step((first - target).square().mean(), optimizer)
    (run,) = profile.recordings()
    of_compute = [each.kind for each in run.events if each.lane == "compute" and each.step == 2]
    phases = [kind for kind in of_compute if kind in ("forward", "inference", "backward", "update")]
    assert phases == ["forward", "inference", "forward", "backward", "update"]
