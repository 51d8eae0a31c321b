"""Pages agree with the repository: links, tables, citation and the files of continuous integration."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LABELS = {
    "resident AdamW, `torch.compile`": "adamw",
    "zenflow": "zenflow",
    "zero_offload": "zero_offload",
    "DeepSpeed ZeRO-Offload": "deepspeed_zero_offload",
    "DeepSpeed ZenFlow, overlap on": "deepspeed_zenflow",
}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(page: str) -> None:
    """Sphinx checks the links of docs/."""
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_named_source_files_exist() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = {name for page in pages for name in re.findall(r"`([\w./]+\.(?:py|h|cpp))`", page.read_text())}
    named -= {"test_optim.py"}  # PyTorch's
    assert len(named) > 20
    assert {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)} == set()


def test_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_readme_results_match_the_results_file() -> None:
    rows = json.loads((ROOT / "benchmarks/results/peers.json").read_text())["rows"]
    measured = {(row["model"], row["system"]): row for row in rows}
    table = re.findall(r"^\| ([^|]+) \| ([\d.]+) ms \| ([\d.]+) \| ([\d.]+) ms \| ([\d.]+) \|$", readme(), re.MULTILINE)
    assert {label for label, *_ in table} == {*LABELS}
    for label, *cells in table:
        for model, written in zip(("optimizer-bound", "compute-bound"), (cells[:2], cells[2:]), strict=True):
            row = measured[model, LABELS[label]]
            ratio = row["step_over_adamw"]
            expected = (row["step_ms"]["median"], 1.0 if ratio is None else ratio["median"])
            for text, value in zip(written, expected, strict=True):
                decimals = len(text.partition(".")[2])
                assert round(value, decimals) == float(text), f"{label}, {model}: {value} in peers.json"


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_citation_file() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= reference.keys()
        for author in reference["authors"]:
            assert author.keys() in ({"family-names", "given-names"}, {"name"})
    links = {reference["url"] for reference in citation["references"]}
    assert set(re.findall(r"https://arxiv\.org/abs/[\d.]+", readme())) <= links


def test_changelog_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert version in headings


def test_workflow_runs_the_ci_script() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


def test_pre_commit_hooks_run_ruff_and_mypy() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    entries = " ".join(hook["entry"] for hook in repository["hooks"])
    for tool in ("ruff check", "ruff format", "mypy"):
        assert tool in entries


def test_ci_script_builds_the_documentation() -> None:
    script = (ROOT / ".ci/run").read_text()
    for target in ("test", "check", "docs"):
        assert f"make {target}\n" in script
    command = subprocess.run(
        ["make", "-n", "PYTHON=python", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "sphinx" in command
    assert " -W " in command
