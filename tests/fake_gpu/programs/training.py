"""Trains a model on the GPU and on the CPU, and prints how far apart the weights end, with the warnings.

python -m tests.fake_gpu.programs.training '{"options": {...}, "compiled": true, "device": 0, "clip": false}'

``model`` is the name of a member of the zoo, instead of a small stack; ``offload_all`` is the step after which all
leaves the GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import zenflow_compile as zf
from tests.support import zoo


def stack() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 96))))


def batches_of_stack(step: int) -> tuple[Tensor, ...]:
    return (torch.randn(16, 96, generator=torch.Generator().manual_seed(step)),)


STACK = zoo.Member("stack", stack, batches_of_stack, loss=lambda model, inputs: model(*inputs).square().mean())


def train(device: torch.device, given: Mapping[str, Any], seen: dict[str, Any]) -> list[Tensor]:
    """The weights at the end, on the host; ``seen`` gets what the run shows of itself."""
    member = zoo.BY_NAME[given["model"]] if "model" in given else STACK
    torch.manual_seed(0)
    model = member.build().to(device)
    options: dict[str, Any] = {"lr": 1e-3, "device_share": 0.0} | given.get("options", {})
    with tempfile.TemporaryDirectory() as folder:
        if "nvme_path" in options:
            options["nvme_path"] = folder
        with zf.ZenFlowAdamW(model.named_parameters(), **options) as optimizer:
            run = (
                torch.compile(model, backend="zenflow", options={"inner": "eager"}) if given.get("compiled") else model
            )
            for step in range(given.get("steps", 12)):
                batch = [each.to(device) if isinstance(each, Tensor) else each for each in member.inputs(step)]
                member.loss(run, tuple(batch)).backward()
                if given.get("clip"):
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                if step == given.get("offload_all"):
                    optimizer.offload_all()
            optimizer.synchronize()
            seen["in turn"] = len(optimizer.engine.plan.params_in_turn)
            return [param.detach().cpu().clone() for param in model.parameters()]


def main() -> None:
    given, seen = json.loads(sys.argv[1]), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(torch.device("cuda", given.get("device", 0)), given, seen)
    seen["kernels"] = "zenflow_compile.runtime.device_updates.triton_kernels" in sys.modules
    torch.compiler.reset()
    expected = train(torch.device("cpu"), {**given, "offload_all": None}, {})
    differences = [(mine - theirs).abs().max() for mine, theirs in zip(found, expected, strict=True)]
    apart = torch.stack(differences).max().item()  # of tensors: Python's would ignore a NaN
    said = [str(each.message) for each in caught if each.category in (UserWarning, RuntimeWarning)]
    print(json.dumps({"apart": apart, "warnings": said, **seen}))


if __name__ == "__main__":
    main()
