import gc
import html
import json
import weakref
from dataclasses import InitVar, dataclass, field
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

import zenflow_compile as zf
from tests.support.calls import interrupted
from zenflow_compile.measure import bandwidth
from zenflow_compile.performance.hardware import Bandwidths
from zenflow_compile.planning.plan import ParamPlan, Placement, Plan
from zenflow_compile.profiling.profiler import profile
from zenflow_compile.runtime import ops
from zenflow_compile.timeline import Timeline, record_new_engine

_ids = count(1_000_000)
MS = 1_000_000


def plan_of(policy="zenflow", *, blocking=False):
    weight = ParamPlan(
        index=0, name="weight", shape=(8, 16), dtype=torch.float32, placement=Placement.SPLIT_COLUMNS, dim=1,
        slices=16, length=8, k=4, interval=4, blocking=blocking,
    )  # fmt: skip
    bias = ParamPlan(index=1, name="bias", shape=(8,), dtype=torch.float32, placement=Placement.DEVICE)
    return Plan(policy=policy, params=(weight, bias))


@dataclass(eq=False)
class FakeEngine:
    """Has the part of an engine that a profile reads."""

    plan: Plan = field(default_factory=plan_of)
    model_bytes: InitVar[int] = 544
    schedule: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(adaptive_windows=None))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    worker_cores: tuple[int, ...] = (0,)
    report_rows: tuple[tuple[str, str], ...] = ()
    timeline: Timeline | None = None
    id: int = field(default_factory=lambda: next(_ids))
    synchronized: int = 0
    failure: Exception | None = None

    def __post_init__(self, model_bytes):
        self.registry = SimpleNamespace(model_bytes=model_bytes)
        ops.register_engine(self)

    @property
    def access(self):
        return self

    def record_collectives(self):
        return lambda: None

    def synchronize(self):
        self.synchronized += 1
        if self.timeline is not None:  # what was in flight ends here
            self.timeline.add("H2D", "copy", 31 * MS, 32 * MS, step=0, bytes=384)
        if self.failure:
            raise self.failure

    def train(self, steps=1, *, stall_ms=0):
        for step in range(steps):
            if self.timeline is None:
                continue
            origin = step * 10 * MS
            self.timeline.add("step", "step", origin, origin + 10 * MS, step=step)
            self.timeline.add("worker 0", "host_update", origin + MS, origin + 3 * MS, step=step, bytes=1000)
            if stall_ms:
                self.timeline.add("compute", "wait", origin, origin + stall_ms * MS, step=step)


@dataclass
class FakeOptimizer:
    engine: FakeEngine


@pytest.fixture(autouse=True)
def measurements(monkeypatch):
    """The measurements that were asked for; none is made."""
    asked = []

    def rates(device, cores):
        asked.append((device, cores))
        return Bandwidths(host=1e9, to_host=2e6, to_device=4e6)

    monkeypatch.setattr(bandwidth, "rates", rates)
    return asked


@pytest.fixture(autouse=True)
def no_other_engines():
    """Engines that other tests left alive are out of sight meanwhile."""
    gc.collect()
    others = list(ops.live_engines())
    for engine in others:
        ops.unregister_engine(engine.id)
    yield
    for engine in ops.live_engines():
        ops.unregister_engine(engine.id)
    for engine in others:
        ops.register_engine(engine)


def test_attaches_on_entry_and_detaches_on_exit():
    engine = FakeEngine()
    with profile() as prof:
        assert isinstance(engine.timeline, Timeline)
        assert engine.synchronized == 0
        engine.train(3)
    assert engine.timeline is None
    assert engine.synchronized == 1
    engine.train(3)
    summary = prof.summary()
    assert summary["steps"] == 3
    assert summary["h2d_bytes_per_step"] == 128  # came in while leaving
    assert summary["traffic_model_sizes_per_step"] == pytest.approx(128 / 544)


def test_summary_reads_the_plan():
    engine = FakeEngine(plan_of("zero_offload", blocking=True))
    with profile() as prof:
        engine.train()
    summary = prof.summary()
    assert (summary["policy"], summary["blocking"], summary["update_interval"]) == ("zero_offload", True, 4)
    assert summary["selected_share"] == 4 / 16


def records_new_engines():
    born = FakeEngine()
    record_new_engine(born)
    return born.timeline is not None


def test_only_the_given_optimizers():
    wanted, other = FakeEngine(), FakeEngine()
    with profile(FakeOptimizer(wanted)):
        assert wanted.timeline is not None
        assert other.timeline is None
        assert not records_new_engines()


def test_engines_created_inside_are_recorded():
    with profile() as prof:
        engine = FakeEngine(Plan(policy="zenflow", params=()), model_bytes=0)
        record_new_engine(engine)
        engine.plan, engine.registry.model_bytes = plan_of(), 544  # parameters may come later
        engine.train(2)
    assert engine.timeline is None
    summary = prof.summary()
    assert summary["steps"] == 2
    assert summary["update_interval"] == 4
    assert not records_new_engines()


def test_closed_and_deleted_engines_are_reported():
    closed, dying = FakeEngine(), FakeEngine()
    gone = weakref.ref(dying)
    with profile() as prof:
        closed.train(2)
        ops.unregister_engine(closed.id)
        dying.train(3)
        del dying
        gc.collect()
        assert gone() is None  # the profile keeps no engine alive
    assert closed.synchronized == 0
    assert [summary["steps"] for summary in prof.summaries()] == [2, 3]
    assert all(summary["policy"] == "zenflow" for summary in prof.summaries())


def test_reads_inside_the_block():
    engine = FakeEngine()
    with profile() as prof:
        engine.train(2)
        assert prof.summary()["steps"] == 2
        assert engine.synchronized == 0


def test_several_optimizers_are_kept_apart():
    small, large, idle = FakeEngine(model_bytes=10), FakeEngine(model_bytes=1000), FakeEngine()
    with profile() as prof:
        small.train(2, stall_ms=5)
        large.train(4)
    assert [summary["steps"] for summary in prof.summaries()] == [2, 4]
    assert prof.summary()["steps"] == 4
    assert prof.summary()["stall_ms_per_step"] == 0.0
    assert [recording.title for recording in prof.recordings()] == ["optimizer 1 of 2", "optimizer 2 of 2"]
    assert idle.synchronized == 1


def test_exception_in_the_block_propagates():
    engine = FakeEngine(failure=RuntimeError("worker died"))
    with pytest.raises(KeyError, match="mine"), profile():
        raise KeyError("mine")
    assert engine.synchronized == 0
    assert engine.timeline is None


def test_failure_in_flight_raises_and_detaches():
    broken, other = FakeEngine(failure=RuntimeError("worker died")), FakeEngine()
    with pytest.raises(RuntimeError, match="worker died"), profile():
        broken.train()
    assert broken.timeline is None
    assert other.timeline is None
    assert not records_new_engines()


def test_innermost_of_nested_profiles_records():
    engine = FakeEngine()
    with profile() as outer:
        engine.train(1)
        with profile() as inner:
            engine.train(2)
        engine.train(1)
    assert inner.summary()["steps"] == 2
    assert outer.summary()["steps"] == 2
    assert engine.timeline is None


def test_profiles_end_in_any_order():
    engine = FakeEngine()
    first, second = profile(), profile()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    engine.train(2)
    second.__exit__(None, None, None)
    assert engine.timeline is None
    assert not records_new_engines()
    assert (first.summary()["steps"], second.summary()["steps"]) == (0, 2)


def test_profile_that_was_not_entered_cannot_end():
    with pytest.raises(RuntimeError, match="was not entered; use it as"):
        profile().__exit__(None, None, None)


def test_profile_is_entered_once():
    prof = profile()
    with prof:
        pass
    with pytest.raises(RuntimeError, match="already entered"), prof:
        pass


def test_report_without_recordings(capsys, tmp_path):
    with profile() as prof:
        pass
    assert prof.summary()["steps"] == 0
    prof.report()
    assert "Nothing was measured" in capsys.readouterr().out
    prof.export_chrome_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_report_and_trace(capsys, tmp_path):
    engine = FakeEngine()
    with profile(FakeOptimizer(engine)) as prof:
        engine.train(5)
    prof.report()
    prof.report(Console(width=100))
    assert capsys.readouterr().out.count("worker 0") == 2
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert sum(entry["name"] == "host_update" for entry in trace["traceEvents"]) == 5


def test_only_reports_measure_bandwidths(capsys, measurements):
    engine = FakeEngine()
    with profile() as prof:
        engine.train(5)
    prof.summary()
    prof.recordings()
    assert measurements == []
    prof.report(Console(quiet=True))
    assert measurements == []
    prof.report()
    assert measurements == [(torch.device("cpu"), (0,))]
    # 96 elements: (24 + 4) / 4 + 4 bytes of each per step on the host, 4 down, 4 / 4 up.
    limits = " ".join(capsys.readouterr().out.split()).split("limit: ")[1:]
    assert limits[0].startswith("at least host 0.00 ms at 1.0 GB/s, D2H 0.19 ms at 2.00 MB/s, H2D 0.02 ms at")
    assert limits[1].startswith("at best 10.0 ms per step, no stall, and the host update is hidden from update_i")


def test_page_says_what_the_report_says(tmp_path, measurements):
    engine = FakeEngine()
    with profile(FakeOptimizer(engine), flops_per_step=1e15) as prof:
        engine.train(5)
    prof.save_html(tmp_path / "profile.html")
    assert measurements == [(torch.device("cpu"), (0,))]
    text = (tmp_path / "profile.html").read_text(encoding="utf-8")
    assert "limit: at best" in text
    assert "100000 TFLOP/s, 100% of the device&#x27;s 100000 TFLOP/s" in text  # more than a matrix product's


def test_notebook_shows_the_page_without_measuring(measurements):
    engine = FakeEngine()
    with profile() as prof:
        engine.train(50)
    shown = prof._repr_html_()
    assert measurements == []
    assert shown.startswith('<iframe srcdoc="&lt;!DOCTYPE html')
    assert 'sandbox="allow-scripts"' in shown
    assert html.unescape(shown).count('"starts":') == 4  # compute, D2H, H2D, worker 0
    assert len(shown) < 40_000


@pytest.mark.tier1
@pytest.mark.parametrize(("wrong", "error"), [(0, ValueError), (float("nan"), ValueError), ("1e9", TypeError)])
def test_flops_are_a_number_above_zero(wrong, error):
    with pytest.raises(error, match=r"flops_per_step=.* leave it out"):
        profile(flops_per_step=wrong)


@pytest.mark.tier1
@pytest.mark.parametrize(("wrong", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError)])
def test_steps_are_counted_from_one(wrong, error, tmp_path, measurements):
    with profile() as prof:
        FakeEngine().train()
    with pytest.raises(error, match=rf"steps={wrong} must be an integer >= 1"):
        prof.report(steps=wrong)
    with pytest.raises(error, match=rf"steps={wrong} must be an integer >= 1"):
        prof.save_html(tmp_path / "profile.html", steps=wrong)
    assert not measurements
    assert not list(tmp_path.iterdir())


def test_evaluation_alone_has_a_row(capsys):
    engine = FakeEngine()
    with profile() as prof:
        engine.timeline.add("compute", "inference", MS, 3 * MS, step=0)
    prof.report(Console(width=100))
    assert "evaluation (no_grad)  2.00 ms in all" in capsys.readouterr().out


def test_newest_steps_of_the_largest_optimizer():
    small, large = FakeEngine(model_bytes=10), FakeEngine(model_bytes=1000)
    with profile() as prof:
        assert prof.newest(4) is None
        small.train(2)
        large.train(9)
        newest = prof.newest(4)
    assert [event.step for event in newest.events if event.lane == "step"] == [5, 6, 7, 8]
    assert newest.model_bytes == 1000


def test_limits_are_left_out_when_memory_is_full(capsys):
    engine = FakeEngine()
    with profile() as prof:
        engine.train(5)
    with interrupted(bandwidth.rates, torch.OutOfMemoryError("CUDA out of memory")):
        prof.report()
    text = capsys.readouterr().out
    assert "step time" in text
    assert "limit:" not in text


def test_nothing_offloaded_measures_nothing(capsys, measurements):
    resident = plan_of("resident")
    engine = FakeEngine(plan=Plan(policy="resident", params=resident.params[1:]))
    with profile() as prof:
        engine.train(5)
    prof.report()
    assert measurements == []
    assert "limit:" not in capsys.readouterr().out


def test_keeps_at_most_max_events(capsys):
    engine = FakeEngine()
    with profile(max_events=10) as prof:
        engine.train(100)
    # Of ten events the first ones are of a step that has lost others.
    assert [event.step for event in prof.recordings()[0].events if event.lane == "step"] == [96, 97, 98, 99]
    assert [event.step for event in prof.newest(9).events if event.lane == "step"] == [96, 97, 98, 99]
    assert len(prof.newest(2).events) == 4
    prof.report()
    assert "4; of earlier ones not all events were kept (max_events)" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match="max_events=0"):
        profile(max_events=0)


@pytest.mark.tier1
@pytest.mark.parametrize(
    "wrong", [torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), torch.nn.Linear(1, 1), None]
)
def test_refuses_other_optimizers(wrong):
    with pytest.raises(TypeError, match="ZenFlowAdamW"):
        profile(wrong)


def test_engines_without_a_timeline_are_ignored():
    class Bare:
        id = next(_ids)

    bare = Bare()
    ops.register_engine(bare)
    with profile() as prof:
        pass
    assert prof.summaries() == []


@pytest.mark.parametrize(("policy", "hidden"), [("zero_offload", 0.0), ("zenflow", None)])
def test_blocking_updates_are_exposed(policy, hidden):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = zf.ZenFlowAdamW(model.named_parameters(), policy=policy)
    compiled = torch.compile(model, backend="zenflow", options={"inner": "eager"})
    with optimizer, zf.profile(optimizer) as profile:
        for _ in range(8):
            compiled(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    summary = profile.summary()
    assert summary["compilations"] == 2  # with the backward, which is compiled when it runs first
    assert summary["compilation_ms"] > 0
    (recording,) = profile.recordings()
    steps = [each for each in recording.events if each.lane == "step"]
    assert summary["step_ms"] * 8 < sum(each.duration_ns for each in steps) / 1e6 - 0.9 * summary["compilation_ms"]
    assert hidden is None or summary["hidden_fraction"] == hidden
