"""One published number and its prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXPLAINED_ABOVE = 0.25
"""Larger deviations need an explanation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A published number, and the prediction of this project's model.

    Attributes:
        where: it was published.
        claim: what it is a number of. unit: of all its numbers.
        published: the number; published_to: the other end where a range was published.
        predicted: at the rates that the source states for its own system, see ``basis``.
        ours: at the rates of this project's kernels and in its schedule; None where neither enters.
        basis: machine, model and where the rates of ``predicted`` come from.
        sentence: why the two differ.
    """

    where: str
    claim: str
    unit: str
    published: float
    published_to: float | None = None
    predicted: float
    ours: float | None = None
    basis: str
    sentence: str = ""

    @property
    def deviation(self) -> float:
        """The predicted number relative to the published one, less one; of a range, to the nearer end; 0 inside."""
        low, high = sorted((self.published, self.published if self.published_to is None else self.published_to))
        nearest = min(max(self.predicted, low), high)
        return self.predicted / nearest - 1.0

    @property
    def explained(self) -> bool:
        """Whether the deviation is small or has its sentence."""
        return abs(self.deviation) <= EXPLAINED_ABOVE or bool(self.sentence)

    @property
    def why(self) -> str:
        """The sentence, where the deviation needs one."""
        return self.sentence if abs(self.deviation) > EXPLAINED_ABOVE else ""

    def row(self) -> dict[str, Any]:
        """For a results file."""
        return {
            "where": self.where,
            "claim": self.claim,
            "unit": self.unit,
            "published": self.published,
            "published_to": self.published_to,
            "predicted": float(f"{self.predicted:.4g}"),
            "ours": None if self.ours is None else float(f"{self.ours:.4g}"),
            "deviation": round(self.deviation, 3),
            "basis": self.basis,
            "sentence": self.why,
        }
