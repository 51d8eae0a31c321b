"""Dtypes for planning, by name and size: planning imports no torch, which takes seconds.

Code that takes one of these takes torch's dtypes, too; the runtime's plans have torch's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class _Named:
    """A dtype that equals torch's dtype of this name. ``itemsize`` in bytes."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"

    def __eq__(self, other: object) -> bool:
        return self.name == other.name if isinstance(other, _Named) else str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self.name)


FLOAT32 = cast("torch.dtype", _Named("float32", 4))
BFLOAT16 = cast("torch.dtype", _Named("bfloat16", 2))
FLOAT16 = cast("torch.dtype", _Named("float16", 2))
FLOAT64 = cast("torch.dtype", _Named("float64", 8))

TRAINED = (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)
"""Dtypes of parameters that can be optimized. Those of others, such as quantized weights, stay as they are."""
