"""Texts and a language model that are small enough to be learned in a test."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from examples.stdlib_text import Text


def repeating() -> Text:
    """One line of source, again and again."""
    words = torch.frombuffer(bytearray(b"def forward(self, x): return self.norm(x)\n" * 200), dtype=torch.uint8)
    return Text(train=words, validation=words[7:].clone())


def _sentences() -> list[tuple[float, str]]:
    draw = random.Random(0)
    words = {1: ["superb", "moving", "witty"], -1: ["dull", "clumsy", "tedious"], 0: ["long", "loud", "French"]}
    found = []
    for number in range(120):
        sign = (1, -1, 1, -1, 0)[number % 5]
        found.append(
            (sign * draw.choice([0.5, 1.5, 3.0]), f"The film is {draw.choice(words[sign])} and {number} minutes")
        )
    return found


REVIEWS = _sentences()
"""Ratings and sentences: one word in each says the sign; a fifth has a rating of 0."""


def save_tiny_model(folder: Path) -> None:
    """Write a Llama with random weights and a byte-level tokenizer, as ``save_pretrained`` does."""
    folder.mkdir(parents=True, exist_ok=True)
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    texts = [f"Review: {text}\nSentiment: {word}" for _, text in REVIEWS for word in ("positive", "negative")]
    trained.train_from_iterator(texts, vocab_size=400, special_tokens=["<end>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
