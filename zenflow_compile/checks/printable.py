"""Makes untrusted text (parameter names, file names, keys, output of other processes) safe to print on a terminal."""

from __future__ import annotations


def printable(text: object) -> str:
    r"""Return ``str(text)`` on one line, with every character that is not printable as an escape.

    Escape sequences of a terminal, C0 and C1 control characters, line breaks, bidirectional overrides and other
    invisible characters become ``\x1b``, ``\n``, ``\u202e`` and so on. Letters of every script stay as they are.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
