"""Makes the name ``backend="zenflow"`` known where the package is imported from a folder and is not installed.

Dynamo finds the backends of other packages by the entry points of installed distributions. It looks for them once, at
the first ``torch.compile`` with the name of a backend.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_NAME = "zenflow-compile"
_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n",
    "entry_points.txt": "[torch_dynamo_backends]\nzenflow = zenflow_compile.backend:zenflow\n",
}


class NotInstalled:
    """A finder of ``sys.meta_path`` that shows ``importlib.metadata`` the entry point. It finds no modules."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Find nothing."""

    @staticmethod
    def find_distributions(context: Any = None) -> Iterator[Distribution]:
        """Yield a distribution of the package where all are asked for, unless the package is installed."""
        from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder

        class Folder(Distribution):
            def read_text(self, filename: str) -> str | None:
                return _FILES.get(filename)

            def locate_file(self, path: Any) -> Any:
                raise FileNotFoundError(f"{_NAME} is not installed, and has no list of files")

        if context is not None and context.name is not None:
            return
        if not any(MetadataPathFinder.find_distributions(DistributionFinder.Context(name=_NAME))):
            yield Folder()


def announce() -> None:
    """Let Dynamo find the backend. Imports no torch."""
    sys.meta_path.append(NotInstalled)
    if "torch._dynamo.backends.registry" in sys.modules:  # it may have looked already
        from zenflow_compile.torch_internals.torch_private_compiler import announce_backend

        announce_backend("zenflow", "zenflow_compile.backend:zenflow")
