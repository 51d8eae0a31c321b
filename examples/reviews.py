"""A task for a language model: is a sentence of a movie review positive or negative?

The model reads ``Review: SENTENCE\\nSentiment:``; what it says is the larger one of the logits of `` positive`` and
`` negative``. The sentences are those of ``examples.pretrained``, whose ratings of 0 are left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

_BEFORE, _AFTER = "Review: ", "\nSentiment:"
_WORDS = (" negative", " positive")


@dataclass(frozen=True)
class Batch:
    """Prompts of one length, with padding before them.

    Attributes:
        input_ids, attention_mask: (sentences, tokens).
        labels: the tokens that should follow, (sentences).
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Batch:
        """On another device."""
        return Batch(*(each.to(device) for each in (self.input_ids, self.attention_mask, self.labels)))


class Reviews:
    """Sentences as prompts, in an order that ``seed`` decides: the held-out ones are the same for all seeds.

    Args:
        path: of lines ``number<TAB>rating<TAB>sentence``.
        tokens: most tokens of a prompt; longer sentences are cut.
        held_out: sentences that are not trained on.

    Attributes:
        answers: tokens of the two words, the negative one first.

    Raises:
        OSError, ValueError: the file cannot be read or has too few sentences, or the tokenizer does not tell the two
            words apart.
    """

    def __init__(
        self, path: Path, tokenizer: PreTrainedTokenizerBase, *, tokens: int = 48, held_out: int = 256, seed: int = 0
    ) -> None:
        rows = [line.split("\t") for line in path.read_text(encoding="utf8", errors="replace").split("\n")]
        rated = [(row[2].strip(), float(row[1])) for row in rows if len(row) == 3 and float(row[1]) != 0]
        if len(rated) <= held_out:
            raise ValueError(
                f"{path} has {len(rated)} rated sentences, and held_out={held_out} of them are not trained on"
            )
        random.Random(0).shuffle(rated)
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._held_out, self._trained = rated[:held_out], rated[held_out:]
        self._seed = seed
        self.answers = [self._ids(word)[0] for word in _WORDS]
        if self.answers[0] == self.answers[1]:
            raise ValueError(f"the tokenizer begins {_WORDS[0]!r} and {_WORDS[1]!r} with the same token")

    def training_batch(self, step: int, size: int) -> Batch:
        """The batch of a step: epochs follow each other, each in an order of its own."""
        count = len(self._trained)
        positions = range(step * size, (step + 1) * size)
        return self._batch([self._trained[self._order(at // count)[at % count]] for at in positions], self._tokens)

    def held_out_batches(self, size: int) -> Iterator[Batch]:
        """The held-out sentences by length, so that little is padding."""
        ordered = sorted(self._held_out, key=lambda row: len(row[0]))
        for at in range(0, len(ordered), size):
            yield self._batch(ordered[at : at + size])

    def _order(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self._trained)))
        random.Random(f"{self._seed} {epoch}").shuffle(order)
        return order

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _batch(self, rows: Sequence[tuple[str, float]], length: int | None = None) -> Batch:
        after = self._ids(_AFTER)
        prompts = [[*self._ids(_BEFORE + sentence)[: self._tokens - len(after)], *after] for sentence, _ in rows]
        length = length or max(map(len, prompts))
        padding = [length - len(prompt) for prompt in prompts]
        pad = self._tokenizer.pad_token_id or self._tokenizer.eos_token_id or 0
        return Batch(
            torch.tensor([[pad] * count + prompt for prompt, count in zip(prompts, padding, strict=True)]),
            torch.tensor([[0] * count + [1] * (length - count) for count in padding]),
            torch.tensor([self.answers[rating > 0] for _, rating in rows]),
        )
