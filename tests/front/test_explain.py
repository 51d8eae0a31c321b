from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from torch import nn

from tests.support.recording import RecordingEngine
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.backend import zenflow
from zenflow_compile.explanation import explain, megabytes, plan_table
from zenflow_compile.options.options import Options
from zenflow_compile.passes.base import Phase
from zenflow_compile.planning.planners import ParamSpec, make_plan
from zenflow_compile.runtime.parameters import host_weights


def test_shows_plan_and_graphs(recording: Callable[..., RecordingEngine]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    recording(model)
    compiled = torch.compile(model, backend=zenflow, options={"inner": "eager"})
    compiled(torch.randn(3, 8)).sum().backward()
    out = io.StringIO()
    found = explain(compiled, console=Console(file=out, width=200))
    printed = out.getvalue()
    assert [record.phase for record in found.graphs] == [Phase.FORWARD, Phase.BACKWARD]
    assert [record.inserted for record in found.graphs] == [1, 2]
    (offload,) = (line for line in found.graphs[1].lines if "zenflow.offload_gradients" in line.text)
    kinds = ["norms", "selection", "split", "copy"]
    names = [reason.split(": ")[:2] for reason in offload.reasons]
    assert names == [[name, kind] for name in ("2.weight", "0.weight") for kind in kinds]
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert "\x1b" not in printed
    for expected in (
        "2.weight",
        "8/16 columns",
        "zenflow.offload_gradients",
        "on the host: the gradient is final",
        "more nodes",
    ):
        assert expected in printed
    assert str(found).split() == printed.split()
    full = io.StringIO()
    explain(compiled, full=True, console=Console(file=full))
    assert "more nodes" not in full.getvalue()


def test_merged_gradients_are_explained(recording: Callable[..., RecordingEngine]) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    recording(model)
    compiled = torch.compile(model, backend=zenflow, options={"inner": "eager"})
    compiled(torch.randn(3, 8)).sum().backward()
    model[2].weight = model[0].weight
    compiled(torch.randn(3, 8)).sum().backward()
    backward = explain(compiled, console=Console(file=io.StringIO())).graphs[-1]
    assert dict(backward.counts)["merge_gradients"] == 1
    (line,) = (line for line in backward.lines if line.text.startswith("merged_gradient"))
    assert line.reasons == ("0.weight: the graph has it at several inputs; its gradients become one",)


def test_adaptive_windows_have_no_fixed_length() -> None:
    model = nn.Linear(16, 16)
    with ZenFlowAdamW(model.parameters(), update_interval=(None, 9), min_offload_size=0, device_share=0.0):
        printed = " ".join(str(explain(model, console=Console(file=io.StringIO()))).split())
    assert "2/16 columns, within 9" in printed or "2/16 rows, within 9" in printed
    assert "the host updates when gradients ask for it, after at most 9 steps" in printed.replace("# ", "")
    assert "every 9" not in printed


def test_explain_before_compilation(recording: Callable[..., RecordingEngine]) -> None:
    model = nn.Linear(8, 16)
    recording(model)
    assert "No graph has been compiled yet" in str(explain(model, console=Console(file=io.StringIO())))


def test_explain_without_an_optimizer() -> None:
    with pytest.raises(ValueError, match="0 optimizers own"):
        explain(nn.Linear(2, 2))


def test_weights_in_host_memory_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_weights, "SMALLEST_WEIGHT_BYTES", 4096)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with ZenFlowAdamW(model.named_parameters(), policy="zero_offload", offload_weights=1.0):
        compiled = torch.compile(model, backend="zenflow", options={"inner": "eager"})
        compiled(torch.randn(2, 64)).sum().backward()
        found = str(explain(compiled, console=Console(quiet=True)))
    assert "2 weights of 0.0328 MB, loaded around their uses within 0.0164 MB" in found
    assert "2 stay on the device, because it is small: 0.bias, 2.bias" in found


def test_shared_gradient_buffers_have_a_row() -> None:
    specs = [ParamSpec(f"w{number}", (64, 96), torch.bfloat16) for number in range(4)]
    plan = make_plan(specs, Options(device_share=0.0))
    out = Console(file=io.StringIO(), width=80, record=True)
    out.print(plan_table(plan))
    rows = {line.split()[0]: line.split() for line in out.export_text().splitlines() if line.strip()}
    assert rows["gradient"][-3:] == ["shared", *megabytes(plan.pool_bytes).split()]
    assert rows["all"][-2:] == megabytes(plan.host_bytes).split()
