"""Text from outside (parameter names, file names, keys, other processes) in a form that a terminal can show safely."""

from __future__ import annotations


def printable(text: object) -> str:
    r"""Return ``str(text)`` with every character that is not printable as an escape, on one line.

    Escape sequences of a terminal, C0 and C1 control characters, line breaks, bidirectional overrides and other
    invisible characters become ``\x1b``, ``\n``, ``\u202e`` and so on. Letters of every script stay as they are.

    Args:
        text: what an error, a warning or a report is about to show; anything with a ``str()``.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
