"""A task for a language model: is a sentence of a movie review positive or negative?

The model reads ``Review: SENTENCE\\nSentiment:``. The larger one of the logits of `` positive`` and `` negative`` is
its prediction. The sentences are those of ``examples.pretrained``, whose ratings of 0 are left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from examples.epochs import Epochs

_BEFORE, _AFTER = "Review: ", "\nSentiment:"
_WORDS = (" negative", " positive")


@dataclass(frozen=True)
class Batch:
    """Prompts of one length, with padding before them.

    Attributes:
        input_ids, attention_mask: (sentences, tokens).
        position_ids: of each token in its prompt, 0 in the padding; (sentences, tokens).
        labels: the tokens that should follow, (sentences).
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Batch:
        """On another device."""
        tensors = (self.input_ids, self.attention_mask, self.position_ids, self.labels)
        return Batch(*(each.to(device) for each in tensors))


def read_reviews(path: Path) -> list[tuple[str, float]]:
    """Sentences with their ratings, from lines ``number<TAB>rating<TAB>sentence``; each sentence once.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not of this form, or the file is not UTF-8.
    """
    found: dict[str, float] = {}
    try:
        lines = path.read_text(encoding="utf8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = line.split("\t")
        try:
            rating, text = float(fields[1]), fields[2].strip()
        except (IndexError, ValueError):
            rating, text = math.nan, ""
        if not text or not math.isfinite(rating) or len(fields) != 3:
            raise ValueError(
                f"{path}, line {number}: {line[:60]!r} must be a number, a rating and a sentence, with tabs"
            )
        found.setdefault(text, rating)
    return list(found.items())


class Reviews:
    """Sentences as prompts, in an order that ``seed`` decides: the held-out ones are the same for all seeds.

    Args:
        path: see ``read_reviews``.
        tokens: most tokens of a prompt; longer sentences are cut.
        held_out: sentences that are not trained on, at least 1.

    Attributes:
        label_tokens: the first tokens of `` negative`` and `` positive``, in this order.

    Raises:
        OSError, ValueError: the file cannot be read or has too few sentences, ``tokens`` has no room for one, or the
            tokenizer does not tell the two words apart.
    """

    def __init__(
        self, path: Path, tokenizer: PreTrainedTokenizerBase, *, tokens: int = 48, held_out: int = 256, seed: int = 0
    ) -> None:
        rated = [(text, rating) for text, rating in read_reviews(path) if rating != 0]
        if len(rated) <= held_out:
            raise ValueError(
                f"{path} has {len(rated)} rated sentences, and held_out={held_out} of them are not trained on"
            )
        random.Random(0).shuffle(rated)
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._held_out, self._trained = rated[:held_out], rated[held_out:]
        self._epochs = Epochs(len(self._trained), seed)
        if tokens <= (least := len(self._ids(_BEFORE)) + len(self._ids(_AFTER))):
            raise ValueError(f"tokens={tokens} must be more than {least}, which a prompt has without its sentence")
        self.label_tokens = [self._ids(word)[0] for word in _WORDS]
        if self.label_tokens[0] == self.label_tokens[1]:
            raise ValueError(f"the tokenizer begins {_WORDS[0]!r} and {_WORDS[1]!r} with the same token")

    def training_batch(self, step: int, size: int) -> Batch:
        """The batch of a step, see ``Epochs``."""
        return self._batch([self._trained[index] for index in self._epochs.of_step(step, size)], self._tokens)

    def held_out_batches(self, size: int) -> Iterator[Batch]:
        """The held-out sentences by length, so that little is padding."""
        ordered = sorted(self._held_out, key=lambda row: len(row[0]))
        for at in range(0, len(ordered), size):
            yield self._batch(ordered[at : at + size])

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _batch(self, rows: Sequence[tuple[str, float]], length: int | None = None) -> Batch:
        after = self._ids(_AFTER)
        prompts = [[*self._ids(_BEFORE + sentence)[: self._tokens - len(after)], *after] for sentence, _ in rows]
        length = max(map(len, prompts)) if length is None else length
        padding = [length - len(prompt) for prompt in prompts]
        pad = self._tokenizer.pad_token_id or self._tokenizer.eos_token_id or 0
        mask = torch.tensor([[0] * count + [1] * (length - count) for count in padding])
        return Batch(
            torch.tensor([[pad] * count + prompt for prompt, count in zip(prompts, padding, strict=True)]),
            mask,
            (mask.cumsum(-1) - 1).clamp(min=0),
            torch.tensor([self.label_tokens[rating > 0] for _, rating in rows]),
        )
