"""Claims of the papers against the simulator: published number, prediction, and why they differ.

The simulator's inputs come from data sheets, the papers' own tables of rates, and this project's host kernel. Nothing
is fitted to a claim, so a deviation is a finding about the model or about the measured system. Each published time has
two predictions: with the rates and schedule of the published system, and with this project's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, option_parser, write_results
from benchmarks.published import deep_optimizer_states, weight_streaming, zenflow
from benchmarks.published.claim import Claim

PAGE = ROOT / "docs" / "reproduction.md"
_TABLES = re.compile(r"(?<=<!-- tables -->\n).*(?=<!-- end of tables -->)", re.DOTALL)
_COLUMNS = ("claim", "where", "published", "their rates", "ours", "deviation", "why")


def claims() -> list[Claim]:
    """All claims, paper by paper."""
    return [*deep_optimizer_states.claims(), *zenflow.claims(), *weight_streaming.claims()]


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the results as text, in the order of the page's columns."""
    published = " to ".join(f"{each:g}" for each in (row["published"], row["published_to"]) if each is not None)
    ours = "" if row["ours"] is None else f"{row['ours']:.3g}"
    numbers = (f"{published} {row['unit']}", f"{row['predicted']:.3g}", ours, f"{row['deviation']:+.0%}")
    where = row["where"].replace(f"{deep_optimizer_states.LOGS}, ", "")  # the page names the repository once
    return (row["claim"], where, *numbers, row["sentence"])


def tables(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows in Markdown, one table for each basis of prediction."""
    grouped: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        grouped.setdefault(row["basis"], []).append(cells(row))
    parts = []
    for basis, found in grouped.items():
        lines = ["| " + " | ".join(each) + " |" for each in (_COLUMNS, ("---",) * len(_COLUMNS), *found)]
        parts.append(f"Basis: {basis}.\n\n" + "\n".join(lines) + "\n")
    return "\n" + "\n".join(parts) + "\n"


def write_page(rows: Iterable[Mapping[str, Any]]) -> None:
    """Put the rows' tables into the page of the documentation."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLES.sub(lambda _: tables(rows), text), encoding="utf-8")


def page_tables() -> str:
    """What the page has between its markers."""
    found = _TABLES.search(PAGE.read_text(encoding="utf-8"))
    return found.group() if found else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks reproduce_papers``."""
    parser = option_parser("reproduce_papers", __doc__)
    parser.add_argument("--page", action="store_true", help="also write the tables into docs/reproduction.md")
    options = parser.parse_args(arguments)
    rows = [each.row() for each in claims()]
    table = Table(*_COLUMNS, title="published and predicted")
    for row in rows:
        claim, where, *rest = cells(row)
        table.add_row(claim, where.partition(";")[0], *rest)
    Console().print(table)
    print(f"wrote {write_results('reproduce_papers', rows, out=options.out)}")
    if options.page:
        write_page(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
