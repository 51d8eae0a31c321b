"""Compile caches on disk, which plain Inductor shares with us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
import torch
from tests.support.recording import RecordingEngine

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
engine = RecordingEngine(model.named_parameters()) if sys.argv[1] == "zenflow" else None
if engine:
    from zenflow_compile.backend import zenflow
compiled = torch.compile(model, backend=zenflow if engine else "inductor")
compiled(torch.randn(3, 8)).sum().backward()
from torch._dynamo.utils import counters
print(json.dumps({
    "ran": sorted({op for op, _ in engine.executed}) if engine else [],
    "grads": [None if p.grad is None else p.grad.sum().item() for p in model.parameters()],
    "received": [g.sum().item() for _, g in sorted(engine.received.items())] if engine else [],
    "hits": counters["inductor"]["fxgraph_cache_hit"],
}))
"""

TWO_RATIOS = """
import sys
import torch
import zenflow_compile as zf

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
optimizer = zf.ZenFlowAdamW(model.named_parameters(), topk_ratio=float(sys.argv[1]), device_share=0, min_offload_size=0)
compiled = torch.compile(model, backend="zenflow")
for _ in range(2):
    compiled(torch.ones(3, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.close()
print(sum(param.double().sum().item() for param in model.parameters()))
"""

# A new folder has no headers that were compiled before, and no test of the processor.
COMPILES_LITTLE = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "TORCHINDUCTOR_VEC_ISA_OK": "1"}

OPS = ["begin_backward", "fetch_parameters_", "offload_gradients"]


def run(backend: str, cache: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(last_line(SCRIPT, backend, cache))
    return found


def last_line(script: str, argument: str, cache: Path) -> str:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **COMPILES_LITTLE, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", script, argument], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_inductor_and_zenflow_share_a_cache(tmp_path: Path) -> None:
    """AOTAutograd's cache does not see our passes: with it on, the second process would load the first one's graphs."""
    ours, plain, ours_again = (run(name, tmp_path) for name in ("zenflow", "inductor", "zenflow"))
    assert plain["ran"] == []
    assert None not in plain["grads"]
    for run_of_ours in (ours, ours_again):
        assert run_of_ours["ran"] == OPS
        assert [grad is None for grad in run_of_ours["grads"]] == [True, False, True, False]
        assert run_of_ours["received"] == pytest.approx(plain["grads"][::2], rel=1e-4)
    assert ours_again["hits"] > 0, "rewritten graphs must be cacheable"


@pytest.mark.long
def test_another_topk_ratio_is_another_cache_entry(tmp_path: Path) -> None:
    """Shapes of our nodes' results depend on the plan, which the nodes only name by number."""
    alone = last_line(TWO_RATIOS, "0.5", tmp_path / "alone")
    last_line(TWO_RATIOS, "0.1", tmp_path / "shared")
    assert last_line(TWO_RATIOS, "0.5", tmp_path / "shared") == alone
