"""A text that even a tiny model learns within seconds."""

from __future__ import annotations

import pytest
import torch

from examples.stdlib_text import Text


@pytest.fixture(scope="session")
def repeating_text() -> Text:
    words = torch.frombuffer(bytearray(b"def forward(self, x): return self.norm(x)\n" * 200), dtype=torch.uint8)
    return Text(train=words, validation=words[7:].clone())
