"""A whole training program: a small Llama learns a few source files. Two lines differ from one without offloading.

python -m examples.minimal
"""

import argparse
import inspect
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zenflow_compile as zf

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
).to(device)
files = [Path(inspect.getfile(module)) for module in (argparse, inspect, json)]
text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))

optimizer = zf.ZenFlowAdamW(model.named_parameters(), lr=3e-3)  # torch.optim.AdamW(model.parameters(), lr=3e-3)
compiled = torch.compile(model, backend="zenflow")  # torch.compile(model)

with optimizer, zf.profile(optimizer) as profile:
    for step in range(200):
        starts = torch.randint(len(text) - 128, (8,)).tolist()
        tokens = torch.stack([text[start : start + 128] for start in starts]).to(device)
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}")
profile.report()
