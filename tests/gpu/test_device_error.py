"""After an error of the device the training thread raises and the process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CHILD = """
import sys
import torch
from tests.gpu.training import GPU, make_model, offloading, train
from zenflow_compile.runtime.device.cuda import CudaStreams

entry, values, close = (word == "yes" for word in sys.argv[1:])
if not values:
    CudaStreams.has_values = False
model = make_model()
optimizer = offloading(model)
train(model, optimizer, compiled=entry, steps=6)
torch.zeros(1, device=GPU)[torch.full((1,), 9, device=GPU)]  # out of bounds: an assertion on the device
try:
    train(model, optimizer, compiled=entry, steps=100)
except RuntimeError as error:
    print("raised", error, flush=True)
if close:
    try:
        optimizer.close()
    except RuntimeError as error:
        print("closed with", error, flush=True)
print("end of main", flush=True)
"""


def yes(value: bool) -> str:
    return "yes" if value else "no"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("close", [False, True], ids=["exit", "close"])
def test_device_assertion_raises_and_process_ends(close: bool, compiled: bool, stream_values: bool) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", CHILD, yes(compiled), yes(stream_values), yes(close)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert "raised" in finished.stdout, finished.stdout[-4000:]
    assert "end of main" in finished.stdout, finished.stdout[-4000:]
