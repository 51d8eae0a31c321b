"""No control character of a name or a file reaches a terminal."""

from __future__ import annotations

import pytest

from zenflow_compile.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("größe/重み", "größe/重み"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b31mred\x90", r"\x9b31mred\x90"),
        ("a\u202eb\u2066c\u200bd", r"a\u202eb\u2066c\u200bd"),
        ("one\r\ntwo\u2028", r"one\r\ntwo\u2028"),
        ("\a\b\0\x7f", r"\x07\x08\x00\x7f"),
        ("file-\udcff", r"file-\udcff"),
        ("\U000e0001", r"\U000e0001"),
        (12, "12"),
    ],
)
def test_shown_text(text: object, shown: str) -> None:
    assert printable(text) == shown


def test_every_result_is_printable() -> None:
    assert all(printable(chr(code)).isprintable() for code in range(0x110000))
