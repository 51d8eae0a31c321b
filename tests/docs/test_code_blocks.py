"""The Python blocks of the README and of the tutorial run as they are written, one after another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.small_texts import save_tiny_model
from zenflow_compile.optimizer import ZenFlowAdamW

ROOT = Path(__file__).parents[2]


def run(page: str, names: dict[str, Any], replaced: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Run the blocks of ``page`` with ``names`` defined, without Inductor, and return all names."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    compiled = '(model, backend="zenflow"'
    code = "\n".join(blocks)
    for before, after in {compiled: compiled + ', options={"inner": "eager"}', **replaced}.items():
        assert before in code
        code = code.replace(before, after)
    exec(compile(code, page, "exec"), names)
    return names


class Model(nn.Module):
    """A model whose forward returns the loss, as the README's loop expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))

    def forward(self, batch: Tensor) -> Tensor:
        return (self.layers(batch) - batch).square().mean()


def assert_trained(before: dict[str, Tensor], model: nn.Module) -> None:
    assert [name for name, param in model.named_parameters() if torch.equal(before[name], param)] == []


def test_readme_loop_trains() -> None:
    torch.manual_seed(0)
    model = Model()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    names = run("README.md", {"model": model, "loader": torch.randn(6, 8, 128)})
    assert isinstance(names["optimizer"], ZenFlowAdamW)
    assert names["loss"].isfinite()
    assert_trained(before, model)


def test_loop_with_inference_trains() -> None:
    torch.manual_seed(0)
    model = Model()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    seen: list[int] = []

    def generate(model: nn.Module, prompts: Tensor) -> list[Tensor]:
        optimizer: ZenFlowAdamW = names["optimizer"]
        seen.append(optimizer.device_bytes)
        return [model(prompts).detach() + prompts, prompts]

    names: dict[str, Any] = {"model": model, "loader": torch.randn(3, 8, 128), "generate": generate}
    run("docs/guide/sharing_the_device.md", names)
    assert seen[1:] == [0, 0]
    assert_trained(before, model)


def test_tutorial_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    save_tiny_model(tmp_path / "tiny")
    with chdir(tmp_path):
        names = run("docs/tutorial.md", {}, {"fetch(MODEL)": "'tiny'"})  # a path, as the text says
    assert (tmp_path / "fine-tuned" / "config.json").exists()
    assert names["summary"]["steps"] == 8
    assert names["plan"]["recommended"] is not None
    printed = capsys.readouterr().out
    for shown in ("bytes on the device", "step time", "offload_gradients", "per step"):
        assert shown in printed
