"""A process that has not loaded the package's native code, and a machine of which a test decides what compiles it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch._inductor.config

from zenflow_compile.native import build
from zenflow_compile.native.library import library, rule_address
from zenflow_compile.runtime.host.host_kernel import check_native_code

_KEPT = (check_native_code, library, rule_address, build.load_library, build.load_rule, build.warn_once)


class NativeCode:
    """What a process finds that uses native code for the first time.

    Attributes:
        folder: of compiled libraries; it does not exist at first.
    """

    def __init__(self, patch: pytest.MonkeyPatch, stack: ExitStack, cache: Path) -> None:
        self._patch = patch
        self._stack = stack
        self.folder = cache / "zenflow_compile"
        patch.setenv("XDG_CACHE_HOME", str(cache))
        # Unoptimized, which takes half the time.
        patch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))

    def compile_with(self, command: str, *, by_user: bool = True) -> None:
        """Let the machine have no other compiler, as the user's CXX says it."""
        if by_user:
            self._patch.setenv("CXX", command)
        # PyTorch reads CXX when it is imported.
        self._stack.enter_context(torch._inductor.config.patch({"cpp.cxx": (None, command)}))

    def compile_from(self, sources: Path) -> None:
        """Let the package have other sources."""
        self._patch.setattr(build, "SOURCES", sources)

    def forget(self) -> None:
        """Let this be a new process: nothing is loaded or checked."""
        for each in _KEPT:
            each.cache_clear()


@contextmanager
def not_loaded(cache: Path) -> Iterator[NativeCode]:
    """Let the process begin with an empty cache folder."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        code = NativeCode(patch, stack, cache)
        code.forget()
        yield code
    code.forget()
