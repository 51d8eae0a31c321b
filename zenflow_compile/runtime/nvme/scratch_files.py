"""The files of one optimizer and the threads that read and write them, which its caches share."""

from __future__ import annotations

import os

from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.nvme.state_file import ScratchDirectory
from zenflow_compile.runtime.recorder import Recorder

FILE_THREADS = 4
"""Threads that read and write: while some move chunks, others compute checksums. One core does so at 4.9 GB/s (EPYC),
which is the rate of a fast disk."""

_POLL_NS = 500_000
"""How often one idle thread looks whether jobs that others wait for have ended. Moving a large chunk takes longer."""


class ScratchFiles:
    """A directory, ``nvme_path``, and the threads that read and write its files. Raises: see ``ScratchDirectory``."""

    def __init__(self, path: str | os.PathLike[str], recorder: Recorder) -> None:
        self.threads = Workers(FILE_THREADS, recorder, name="zenflow-file", poll_ns=_POLL_NS)
        self.directory = ScratchDirectory(path)  # last: nothing after it can fail and leave the directory locked

    def close(self) -> None:
        """Stop the threads and remove the files, behind ``close`` of the caches. Idempotent."""
        self.threads.close()
        self.directory.close()

    def close_in_child(self) -> None:
        """In a forked child: let go of the parent's lock and files without removing them."""
        self.directory.close_in_child()
