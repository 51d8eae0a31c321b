"""Runs every recipe of docs/integrations.md as it is written, on a small model.

``test_sharded_trainers`` runs the one of sharding, which needs several processes.
"""

from __future__ import annotations

import re
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from tests.integrations.compare import Tokens, assert_trained, difference, tiny_llama, weights
from tests.integrations.vision import import_timm
from zenflow_compile.runtime.engine import Engine

DOCUMENT = Path(__file__).parents[2] / "docs" / "integrations.md"


def _recipes() -> dict[str, str]:
    """Map the title of a section to its Python blocks, which run one after another."""
    sections = re.split(r"^##+ (.+)$", DOCUMENT.read_text(), flags=re.MULTILINE)
    blocks = {
        title: "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
        for title, text in zip(sections[1::2], sections[2::2], strict=True)
    }
    return {title: code for title, code in blocks.items() if code}


IMPORTS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)[0]
RECIPES = _recipes()
SHARDED = "Sharded by FSDP2"


def _inputs() -> dict[str, Any]:
    """Make the names that recipes use. Matrices are just large enough to be offloaded under the default options."""
    dataset = Tokens()
    return {
        "model": tiny_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3),
        "dataset": dataset,
        "loader": DataLoader(dataset, batch_size=4),
        "tokenizer": PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
            pad_token="<pad>",
            eos_token="<eos>",
        ),
    }


def _vision_inputs() -> dict[str, Any]:
    timm = import_timm()
    images = [(torch.randn(3, 16, 16), index % 4) for index in range(16)]
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 4}
    return {"vision_model": timm.models.VisionTransformer(**sizes), "image_loader": DataLoader(images, batch_size=4)}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("title", [title for title in RECIPES if title != SHARDED])
def test_recipe_runs(title: str, tmp_path: Path) -> None:
    names = _vision_inputs() if title == "timm" else _inputs()
    trained = names["vision_model" if title == "timm" else "model"]
    before = weights(trained)
    offloaded, graphs, updated = [0], [0], WeakSet[Engine]()
    run_step = Engine.run_step

    def recorded(engine: Engine) -> bool:
        offloaded.append(len(engine.offloaded))
        graphs.append(len(engine.graphs))
        updated.add(engine)
        return run_step(engine)

    # Inductor would take half a minute per recipe.
    code = (IMPORTS + RECIPES[title]).replace('(backend="zenflow")', '(backend="zenflow", options={"inner": "eager"})')
    code = code.replace('(model, backend="zenflow")', '(model, backend="zenflow", options={"inner": "eager"})')
    with chdir(tmp_path), mock.patch.object(Engine, "run_step", recorded):
        exec(compile(code, f"{DOCUMENT}: {title}", "exec"), names)
    assert max(offloaded) > 0, "no optimizer has offloaded anything"
    assert max(graphs) > 0, "nothing was compiled"
    assert not any(engine.windows_hold_gradients for engine in updated)  # of those that are left
    if title == "PEFT":  # only some of the model's modules have adapters
        assert difference(before, weights(names["model"])) > 0
    else:
        assert_trained(before, weights(trained))


def test_every_framework_has_a_recipe() -> None:
    """Guard against sections whose code is not found."""
    titles = re.findall(r"^## (.+)$", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert set(titles) - set(RECIPES) == {
        "Programs that were run",
        "In every framework",
        "Known readers",
        "Several devices",
    }
    assert SHARDED in RECIPES
