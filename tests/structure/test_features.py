"""A feature is its folder and its lines in ``features/__init__.py``: in a copy of the package, they come and go."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEATURES = Path("zenflow_compile/runtime/features")
NAMES = sorted(path.parent.name for path in (ROOT / FEATURES).glob("*/__init__.py"))

TRAINING = """
import torch, zenflow_compile as zf
from torch import nn

def trained(make, entry):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = make(model)
    call = entry(model)
    inputs = torch.randn(8, 16)
    with zf.profile() as profile:
        for _ in range(6):
            call(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, profile

def ours(model):
    window = (None, 4) if EXACT is False else 1
    return zf.ZenFlowAdamW(model.named_parameters(), lr=1e-3, min_offload_size=1, update_interval=window)

def compiled(model):
    return torch.compile(model, backend="zenflow", options={"inner": "eager"})

EXACT = True
expected, _ = trained(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), lambda model: model)
found, profile = trained(ours, compiled)
for mine, theirs in zip(found.parameters(), expected.parameters()):
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
profile.report()
EXACT = False
trained(ours, compiled)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, in which a test may write."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "zenflow_compile", tmp_path / "zenflow_compile", ignore=ignored)
    return tmp_path


def train(package: Path) -> str:
    """Compare a run with AdamW, and print its report; then train with a window that is measured."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAINING], cwd=package, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.tier2
@pytest.mark.parametrize("name", NAMES)
def test_package_trains_without_a_feature(package: Path, name: str) -> None:
    listed = package / FEATURES / "__init__.py"
    lines = listed.read_text().splitlines(keepends=True)
    (imported,) = (line for line in lines if f".{name} import " in line)
    kind = imported.split()[-1]
    kept = [line for line in lines if kind not in line]
    assert len(lines) - len(kept) == 2
    listed.write_text("".join(kept))
    shutil.rmtree(package / FEATURES / name)
    assert "selected norm share" in train(package)


@pytest.mark.tier1
def test_feature_is_added_by_a_folder_and_two_lines(package: Path) -> None:
    (package / FEATURES / "update_norms").mkdir()
    shutil.copy(Path(__file__).parent / "update_norms.py", package / FEATURES / "update_norms/__init__.py")
    listed = package / FEATURES / "__init__.py"
    text = listed.read_text()
    text = text.replace(
        "\nFEATURES", "from zenflow_compile.runtime.features.update_norms import UpdateNorms\n\nFEATURES"
    )
    listed.write_text(text.replace("    SelectedNorms,\n", "    SelectedNorms,\n    UpdateNorms,\n"))
    report = train(package)
    assert "update of 0" in report
    assert "update of 2" in report
