"""What is compiled before the first step is what steps launch."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, whose wheels are for Linux")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from tests.support.kernel_launches import Launch, record, recording, specialized
from zenflow_compile.planning.plan import ParamPlan, Placement
from zenflow_compile.runtime.device_updates import triton_kernels
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
    with recording() as recorders, triton_kernels.compiling_for(CPU):
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


def feature_of(*plans: ParamPlan) -> CompiledKernels:
    offloaded: Any = {number: SimpleNamespace(plan=plan) for number, plan in enumerate(plans)}
    return CompiledKernels(offloaded, CPU, host_weights=False)


def finish() -> None:
    for thread in threading.enumerate():
        if thread.name == "zenflow-compiler":
            thread.join()


def test_further_parameters_of_known_shapes_cost_nothing() -> None:
    feature, running = feature_of(plan_of((64, 32)), plan_of((64, 32), phase=1)), threading.active_count()
    with recording() as recorders:
        feature.start()
        finish()
        splits = recorders["_norms_and_split_kernel"].launches
        assert len(splits) == 1
        feature.start()
        assert threading.active_count() == running
        assert len(splits) == 1


def test_failed_compilation_is_left_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def refuse(*_: object) -> None:
        seen.append(threading.current_thread().name)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(triton_kernels, "norms_and_split", refuse)
    feature = feature_of(plan_of((64, 32)))
    feature.start()
    finish()
    assert seen == ["zenflow-compiler"]


def test_close_waits_for_one_kernel_and_compiles_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, seen = threading.Event(), threading.Event(), list[str]()

    def split(*_: object) -> None:
        begun.set()
        go_on.wait()
        seen.append("split")

    monkeypatch.setattr(triton_kernels, "norms_and_split", split)
    monkeypatch.setattr(triton_kernels, "adam_columns_", lambda *_, **__: seen.append("adam"))
    feature = feature_of(plan_of((64, 32)))
    feature.start()
    begun.wait()
    closing = threading.Thread(target=feature.close)
    closing.start()
    while not feature.closed:
        pass
    go_on.set()
    closing.join()
    assert seen == ["split"]
