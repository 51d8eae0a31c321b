"""Dtypes as planning knows them: by name and size, so that planning a run needs no torch, whose import takes seconds.

A torch dtype passes wherever one of these does; the runtime's plans have torch's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class _Named:
    """Equal to torch's dtype of this name. ``itemsize`` in bytes."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self.name)


FLOAT32 = cast("torch.dtype", _Named("float32", 4))
BFLOAT16 = cast("torch.dtype", _Named("bfloat16", 2))
FLOAT16 = cast("torch.dtype", _Named("float16", 2))
