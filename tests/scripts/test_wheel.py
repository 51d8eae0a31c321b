"""The source distribution has what a checkout has. Its wheel contains the package alone, and runs the README's loop."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "zenflow_compile"
MODEL = """
import sys, torch
from torch import nn
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    def forward(self, batch):
        return (self.layers(batch) - batch).square().mean()
model = Model()
loader = [torch.randn(8, 256) for _ in range(6)]
before = [param.detach().clone() for param in model.parameters()]
"""
CHECK = """
assert not any(map(torch.equal, before, model.parameters()))
assert optimizer.__class__.__module__ == "zenflow_compile.optimizer"
assert loss.isfinite()
print(zf.__file__)
"""


def run(*command: object, folder: Path) -> str:
    """Run a command without the environment's paths to this checkout, and return its standard output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    checkout = tmp_path_factory.mktemp("checkout") / "project"  # a copy: building leaves files behind
    left_out = shutil.ignore_patterns(
        ".git", ".venv*", ".*_cache", "build", "dist", "*.egg-info", "__pycache__", "runs"
    )
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=left_out)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(checkout.parent)!r})"
    run(sys.executable, "-c", build, folder=checkout)
    (found,) = checkout.parent.glob("zenflow_compile-*.tar.gz")
    unpacked = tmp_path_factory.mktemp("source")
    run("tar", "-xf", found, folder=unpacked)
    (folder,) = unpacked.iterdir()
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", built, source, folder=built)
    (found,) = built.glob("zenflow_compile-*.whl")
    return found


def test_source_distribution_contents(source: Path) -> None:
    """Its tests, examples and documentation are those of the checkout. The links of a checkout are in it nowhere."""
    for folder in ("zenflow_compile", "tests", "examples", "benchmarks", "docs", "scripts", ".ci"):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        expected = {path for path in files if not {"__pycache__", "_build"} & {*path.parts}}
        assert expected == {path.relative_to(source) for path in (source / folder).rglob("*") if path.is_file()}
    for name in ("Makefile", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"):
        assert (source / name).read_bytes() == (ROOT / name).read_bytes()
    assert not (source / "passes").exists()
    assert not (source / "runtime").exists()


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_link_of_a_checkout_is_not_a_second_package(name: str) -> None:
    command = [sys.executable, "-c", f"import {name}"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not (ROOT / name / "__init__.py").exists():  # a source distribution, or a checkout without links
        pytest.skip("there is no link here")
    assert f"import zenflow_compile.{name}" in process.stderr.splitlines()[-1]


def test_wheel_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    kinds = (".py", ".typed", ".cpp", ".h", ".html")
    files = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.suffix in kinds}
    assert {"zenflow_compile/py.typed", "zenflow_compile/native/host_rule.cpp"} <= files
    assert {name for name in names if ".dist-info/" not in name} == files
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.timeout(600)
def test_installed_wheel_runs_the_readme_loop(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    # Torch and the other dependencies come from this environment. Path files of that folder are not followed, so an
    # editable install of this checkout is not seen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install")
    run(*pip, "--no-deps", "--no-index", "--disable-pip-version-check", "--ignore-installed", wheel, folder=tmp_path)

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    loop = next(block for block in blocks if "ZenFlowAdamW(model.parameters()" in block)
    (tmp_path / "loop.py").write_text(MODEL + loop + CHECK)
    printed = run(python, "loop.py", folder=tmp_path)
    assert Path(printed.splitlines()[-1]).is_relative_to(site)

    assert "doctor" in run(environment / "bin" / "zenflow-compile", "--help", folder=tmp_path)
    listed = run(python, "-c", "import torch; print(torch._dynamo.list_backends())", folder=tmp_path)
    assert "zenflow" in listed
    for name in ("tests", "benchmarks", "examples", "passes", "runtime", "scripts"):
        found = run(python, "-c", f"import importlib.util as u; print(u.find_spec({name!r}))", folder=tmp_path)
        assert str(site) not in found, found
