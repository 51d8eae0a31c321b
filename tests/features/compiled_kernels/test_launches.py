"""What is compiled before the first step is what steps launch."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, whose wheels are for Linux")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from tests.support.kernel_launches import Launch, record, recording, specialized, update_of
from zenflow_compile import rules
from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.planning.planners import ShardedBy, divide, empty_plan, shard_of
from zenflow_compile.rules.rule import Rule
from zenflow_compile.runtime.device_updates import triton_kernels, triton_updates
from zenflow_compile.runtime.device_updates.selection import Selection
from zenflow_compile.runtime.features.compiled_kernels import CompiledKernels
from zenflow_compile.runtime.features.compiled_kernels.launches import launches_of

CPU = torch.device("cpu")


def plan_of(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, **options: Any) -> ParamPlan:
    """As planned: along the longer side, a tenth of the slices selected."""
    dim = 0 if shape[0] >= shape[1] else 1
    return ParamPlan(
        index=0, name="w", shape=shape, dtype=dtype, placement=Placement.SPLIT_COLUMNS, dim=dim, slices=shape[dim],
        length=shape[1 - dim], k=len(range(0, shape[dim], 10)), **options,
    )  # fmt: skip


def compiled_ahead(plan: ParamPlan) -> list[Launch]:
    with recording() as recorders:
        for launch in launches_of(plan, host_weights=True):
            launch()
        return [launch for recorder in recorders.values() for launch in recorder.launches]


@pytest.mark.parametrize("scale_on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 2048), (3072, 8192), (100, 37), (1, 64)])
def test_launches_were_compiled_ahead(shape: tuple[int, int], dtype: torch.dtype, scale_on_device: bool) -> None:
    ahead = []
    for moments in ("fp32", "bf16", "fp8"):
        plan = plan_of(shape, dtype, compressed=True, moments=moments)
        ahead += [(each.kernel, specialized(each)) for each in compiled_ahead(plan)]
    for name, launch in record(shape, dtype, scale_on_device=scale_on_device).items():
        assert (launch.kernel, specialized(launch)) in ahead, name


@pytest.mark.parametrize(
    "rule", [rules.Lion(), rules.PlainSGD(), rules.AdamWAMSGrad()], ids=lambda rule: type(rule).__name__
)
def test_updates_of_any_rule_were_compiled_ahead(rule: Rule) -> None:
    for moments in ("fp32", "bf16", "fp8"):
        plan = plan_of((256, 2048), rule=rule, moments=moments)
        ahead = [(each.kernel, specialized(each)) for each in compiled_ahead(plan)]
        launch = update_of(rule, (256, 2048), torch.bfloat16, moments)
        assert (launch.kernel, specialized(launch)) in ahead, moments


def shares(shape: tuple[int, int]) -> list[ParamPlan]:
    """Of the first of two ranks: that divide the parameter, and of a model whose rows are sharded."""
    whole = plan_of(shape)
    divided = divide(replace(empty_plan(Options()), ranks=2, params=(whole,)))
    return [*divided.params, shard_of(whole, ShardedBy(0, 0, 2))]


@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 1024)])
def test_parts_of_ranks_are_compiled_as_they_are(shape: tuple[int, int]) -> None:
    of_share, of_shard = shares(shape)
    for plan in (of_share, of_shard):
        launches = {each.kernel.fn.__name__: each for each in compiled_ahead(plan)}
        split, adam = launches["_norms_and_split_kernel"], launches["update_slices"]
        assert (split.arguments["slices"], split.arguments["length"]) == (plan.slices, plan.length)
        assert (adam.arguments["k"], adam.arguments["length"]) == (plan.k, plan.length)
    # A share of the gradient comes as a block, and its slices lie apart in the weight.
    by_name = {each.kernel.fn.__name__: each for each in compiled_ahead(of_share)}
    assert by_name["_norms_and_split_kernel"].arguments["stride_row"] == of_share.length
    apart = {by_name["_place_slices_kernel"].arguments[name] for name in ("stride_row", "stride_column")}
    assert apart == ({2 * shape[1], 1} if shape[0] > shape[1] else {2, shape[1]})


def feature_of(*plans: ParamPlan) -> CompiledKernels:
    offloaded: Any = {number: SimpleNamespace(plan=plan) for number, plan in enumerate(plans)}
    return CompiledKernels(offloaded, CPU, host_weights=False)


def finish() -> None:
    for thread in threading.enumerate():
        if thread.name == "zenflow-compiler":
            thread.join()


def test_known_shapes_are_compiled_once() -> None:
    ranks = [replace(shares((64, 32))[1], index=index, name=f"w{index}") for index in range(2)]
    ranks[1] = replace(ranks[1], shard=replace(ranks[1].shard, whole=replace(ranks[1].shard.whole, name="w1")))
    feature, running = feature_of(plan_of((64, 32)), plan_of((64, 32), phase=1), *ranks), threading.active_count()
    with recording() as recorders:
        feature.start()
        finish()
        splits = recorders["_norms_and_split_kernel"].launches
        assert len(splits) == 2
        feature.start()
        assert threading.active_count() == running
        assert len(splits) == 2


def test_failed_compilation_is_left_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def refuse(*_: object) -> None:
        seen.append(threading.current_thread().name)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(triton_kernels, "norms_and_split", refuse)
    feature = feature_of(plan_of((64, 32)))
    with recording() as recorders:
        feature.start()
        finish()
        assert recorders["update_slices"].launches, "the others are compiled"
    assert seen == ["zenflow-compiler"]


def test_real_tensors_are_launched_in_any_thread() -> None:
    """A garbage collection closes an engine, and applies its updates, in whatever thread it runs."""
    weight, values = torch.zeros(8, 4), torch.ones(6, 4)
    selection = Selection.of(torch.arange(2), 8, CPU)
    done: list[str] = []

    class Kernel:
        def __getitem__(self, _: Any) -> Any:
            return lambda *_, **__: done.append(threading.current_thread().name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels, "_place_slices_kernel", Kernel())
        patch.setattr(
            triton_kernels, "norms_and_split", lambda *_: triton_kernels.merge_columns(weight, 0, selection, values)
        )
        feature_of(plan_of((64, 32))).start()
        finish()
    assert done[0] == "zenflow-compiler"


def test_close_compiles_no_further_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, seen = threading.Event(), threading.Event(), list[str]()

    def split(*_: object) -> None:
        begun.set()
        go_on.wait()
        seen.append("split")

    monkeypatch.setattr(triton_kernels, "norms_and_split", split)
    monkeypatch.setattr(triton_updates, "update_slices_", lambda *_, **__: seen.append("adam"))
    feature = feature_of(plan_of((64, 32)))
    feature.start()
    begun.wait()
    closing = threading.Thread(target=feature.close)
    closing.start()
    closing.join()  # it waits for no kernel: its thread may be the one that compiles
    go_on.set()
    finish()
    assert seen == ["split"]
