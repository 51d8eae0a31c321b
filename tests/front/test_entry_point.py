"""``backend="zenflow"`` is known after ``import zenflow_compile``, whether the package is installed or not."""

from __future__ import annotations

import importlib.metadata as metadata
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
NOT_INSTALLED = """
import importlib.metadata as metadata
from importlib.metadata import MetadataPathFinder
found = MetadataPathFinder.find_distributions
MetadataPathFinder.find_distributions = staticmethod(
    lambda context=metadata.DistributionFinder.Context(): (
        each for each in found(context) if each.metadata["Name"] != "zenflow-compile"
    )
)
assert not [each for each in metadata.entry_points(group="torch_dynamo_backends") if each.name == "zenflow"]
"""
TRAIN = """
import sys
import torch
import zenflow_compile
model = torch.nn.Linear(4, 4)
before = model.weight.detach().clone()
compiled = torch.compile(model, backend="zenflow", options={"inner": "eager", "lr": 0.1})
compiled(torch.ones(2, 4)).sum().backward()
assert not torch.equal(model.weight, before)
entries = [each for each in metadata.entry_points(group="torch_dynamo_backends") if each.name == "zenflow"]
assert len(entries) == 1, entries
"""


@pytest.mark.parametrize(
    "before",
    [
        "import zenflow_compile, sys; assert 'torch' not in sys.modules",
        "import torch",
        "import torch; torch.compile(torch.nn.Linear(2, 2), backend='aot_eager')(torch.ones(2))",
    ],
    ids=["before_torch", "after_torch", "after_dynamo"],
)
def test_name_is_known_without_an_installation(before: str) -> None:
    script = f"{NOT_INSTALLED}\n{before}\n{TRAIN}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_installed_name_is_found_once() -> None:
    entries = [each for each in metadata.entry_points(group="torch_dynamo_backends") if each.name == "zenflow"]
    assert [each.value for each in entries] == ["zenflow_compile.backend:zenflow"]
    assert any(metadata.distributions(name="zenflow-compile"))
