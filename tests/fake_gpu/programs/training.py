"""Trains a small stack on the GPU and on the CPU, and prints how far apart the weights end, with the warnings.

python -m tests.fake_gpu.programs.training '{"options": {...}, "compiled": true, "device": 0, "clip": false}'
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import zenflow_compile as zf


def train(device: torch.device, given: Mapping[str, Any]) -> list[Tensor]:
    """The weights at the end, on the host."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 96))]
    model = nn.Sequential(*layers).to(device)
    options: dict[str, Any] = {"lr": 1e-3, "device_share": 0.0} | given.get("options", {})
    with zf.ZenFlowAdamW(model.named_parameters(), **options) as optimizer:
        run = torch.compile(model, backend="zenflow", options={"inner": "eager"}) if given.get("compiled") else model
        generator = torch.Generator().manual_seed(1)
        for _ in range(given.get("steps", 12)):
            batch = torch.randn(16, 96, generator=generator).to(device)
            run(batch).square().mean().backward()
            if given.get("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return [param.detach().cpu().clone() for param in model.parameters()]


def main() -> None:
    given = json.loads(sys.argv[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(torch.device("cuda", given.get("device", 0)), given)
    torch.compiler.reset()
    expected = train(torch.device("cpu"), given)
    differences = [(mine - theirs).abs().max() for mine, theirs in zip(found, expected, strict=True)]
    apart = torch.stack(differences).max().item()  # of tensors: Python's would ignore a NaN
    said = [str(each.message) for each in caught if each.category in (UserWarning, RuntimeWarning)]
    print(json.dumps({"apart": apart, "warnings": said}))


if __name__ == "__main__":
    main()
