"""Causal language models with their tokenizers, from a GGUF file or from a folder of Hugging Face Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


class ModelError(ValueError):
    """A file or a folder is not a model that can be trained; the message has the reason."""


def load(path: str | Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a model and its tokenizer. Weights of a quantized GGUF are those that it stands for.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ModelError: it is damaged or of an unknown architecture, or its tokenizer has more tokens than the model.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a GGUF file, or a folder of Hugging Face Transformers")
    folder, keywords = path, dict[str, Any]()
    if path.is_file():
        folder, keywords = path.parent, {"gguf_file": path.name}
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **keywords)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype, **keywords)
    except Exception as error:  # of any kind: readers of formats raise what their parts raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"{path} cannot be read as a causal language model with a tokenizer: {reason}") from error
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(f"the tokenizer of {path} has {len(tokenizer)} tokens and the model embeddings of {rows}")
    model.config.use_cache = False
    return model, tokenizer
