"""Every recipe of docs/integrations.md runs as it is written, on a small model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zenflow_compile as zf
from tests.integrations.compare import Tokens, assert_trained, tiny_llama, weights
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.engine import Engine

DOCUMENT = Path(__file__).parents[2] / "docs" / "integrations.md"


def _recipes() -> dict[str, str]:
    """The Python blocks by the title of their section; those of one section run one after another."""
    sections = re.split(r"^##+ (.+)$", DOCUMENT.read_text(), flags=re.MULTILINE)
    blocks = {
        title: "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
        for title, text in zip(sections[1::2], sections[2::2], strict=True)
    }
    return {title: code for title, code in blocks.items() if code}


IMPORTS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)[0]
RECIPES = _recipes()


def _inputs() -> dict[str, Any]:
    """The names that recipes use. Matrices are just large enough to be offloaded under the default options."""
    model = tiny_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    dataset = Tokens()
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    return {"model": model, "dataset": dataset, "loader": loader}


@pytest.mark.parametrize("title", RECIPES)
def test_recipe_runs(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = _inputs()
    before = weights(names["model"])
    # Inductor would take half a minute for each; what the recipe is about is the same.
    code = (IMPORTS + RECIPES[title]).replace('(backend="zenflow")', '(backend="zenflow", options={"inner": "eager"})')
    exec(compile(code, f"{DOCUMENT}: {title}", "exec"), names)
    engines = [engine for engine in ops.live_engines() if isinstance(engine, Engine)]
    for engine in engines:
        assert engine.offloaded
        assert not any(each.host.open for each in engine.offloaded.values()), "gradients wait in update windows"
    assert_trained(before, weights(names["model"]))
    assert isinstance(zf.ZenFlowAdamW, type)
