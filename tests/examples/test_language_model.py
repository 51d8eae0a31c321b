"""Models are read from folders and GGUF files, and what cannot be read is named in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from examples.language_model import ModelError, load


def test_folder_is_read(tiny_model: Path) -> None:
    model, tokenizer = load(tiny_model, torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert not model.config.use_cache
    assert tokenizer.decode(tokenizer(" superb")["input_ids"]) == " superb"


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none.gguf does not exist; give a GGUF file, or a folder"):
        load(tmp_path / "none.gguf", torch.float32)


def test_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read as a causal language model with a tokenizer: "):
        load(tmp_path, torch.float32)


def test_damaged_weights_are_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="damaged cannot be read as a causal language model"):
        load(folder, torch.float32)


def test_damaged_gguf_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the hf extra")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"damaged\.gguf cannot be read as a causal language model"):
        load(path, torch.float32)


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the hf extra")
    path = tmp_path / "unknown.gguf"
    writer = gguf.GGUFWriter(path, "retina")
    writer.add_tensor("a.weight", torch.zeros(2, 2).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(ModelError, match=r"unknown\.gguf cannot be read as a causal language model.*retina"):
        load(path, torch.float32)


def test_tokenizer_of_another_model_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny_model, folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    more = [{"id": 1000 + number, "content": f"<more{number}>", "special": False} for number in range(5)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens["added_tokens"] += [each | flags for each in more]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(ModelError, match=r"the tokenizer of .*other has \d+ tokens and the model embeddings of \d+"):
        load(folder, torch.float32)
