"""Trains a small Llama, or a member of the zoo, and writes what the steps after a warm-up called.

python -m tests.fake_gpu.programs.steady_steps PATH '{"options": {...}, "inner": "inductor", "clip": false}'
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from transformers import LlamaConfig, LlamaForCausalLM

import zenflow_compile as zf
from tests.support import zoo
from zenflow_compile.runtime import errors

DEVICE = torch.device("cuda", 0)
WARM_UP, STEPS = 64, 8  # page-locked cells for late numbers are made until about step 48, with gradient_transfer="mean"
COMPILER = "zenflow-compiler"


class LossOfLlama(nn.Module):
    """Two layers whose matrices are all offloaded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


class LossOfMember(nn.Module):
    """Of the zoo."""

    def __init__(self, member: zoo.Member) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = member.build().to(DEVICE)
        self._loss = member.loss

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._loss(self.model, inputs)


def main() -> None:
    path, given = sys.argv[1], json.loads(sys.argv[2])
    code: list[str] = []
    GraphLowering.save_output_code = staticmethod(code.append)  # type: ignore[method-assign]
    # Kernels compute nothing here, so the numbers that are compared to find unseen writes are of no use.
    errors.refuse_unseen_write = lambda name: None  # type: ignore[assignment,return-value]
    torch.backends.cudnn.enabled = False  # a stub, whose answers are zero
    fake = ctypes.PyDLL("libfakegpu.so")  # its calls keep Python's lock
    member = zoo.BY_NAME[given["model"]] if "model" in given else None

    compiled_by: list[str] = []  # names of threads

    def on_compilation(**_: Any) -> None:
        compiled_by.append(threading.current_thread().name)

    triton.knobs.runtime.jit_post_compile_hook = on_compilation

    def wait_for_compiler() -> None:
        for thread in threading.enumerate():
            if thread.name == COMPILER:
                thread.join()

    def make() -> nn.Module:
        return LossOfLlama() if member is None else LossOfMember(member)

    model = make()
    inputs = [torch.randint(0, 1024, (2, 128))] if member is None else member.inputs(0)
    inputs = [each.to(DEVICE) for each in inputs]
    options: dict[str, Any] = {"lr": 1e-3, "device_share": 0.0} | given.get("options", {})
    optimizer = zf.ZenFlowAdamW(model.named_parameters(), **options)

    def compile_it(model: nn.Module) -> Any:
        inner = given.get("inner", "inductor")
        return torch.compile(model, backend="zenflow", options={"inner": inner}, dynamic=False)

    if given.get("second"):  # Dynamo's graph of the first model serves both
        first = make()
        with zf.ZenFlowAdamW(first.named_parameters(), **options) as other:
            loss = compile_it(first)(*inputs)
            wait_for_compiler()
            loss.backward()
            other.step()
    compiled = compile_it(model)

    held: list[ctypes.c_uint32] = []

    def hold() -> None:
        """Keep the device from all that is queued from now on, until ``pause``."""
        held.append(ctypes.c_uint32(0))
        fake.fake_gpu_hold(None, ctypes.byref(held[-1]), ctypes.c_uint32(1))

    def pause() -> None:
        """Let the device do all that is queued while no Python runs; the fake GPU aborts the process if it cannot."""
        assert fake.fake_gpu_release_and_wait(ctypes.byref(held[-1]), ctypes.c_uint32(1)), "nothing was queued"

    for step in range(WARM_UP + STEPS):
        # Earlier steps read numbers of the device, and would wait for it.
        pausing = given.get("pause") and step >= WARM_UP
        if step == WARM_UP:
            fake.fake_gpu_wait_for_all()
            fake.fake_gpu_reset()
        for phase in ("forward", "backward", "step"):
            if pausing:
                hold()
            if phase == "forward":
                loss = compiled(*inputs)
                if step == 0:
                    wait_for_compiler()
            elif phase == "backward":
                loss.backward()
            else:
                if given.get("clip"):
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            if pausing:
                pause()
        optimizer.zero_grad()
    assert fake.fake_gpu_write_counts(path.encode()) == 0
    engine = optimizer.engine
    found = {
        "steps": STEPS,
        "offloaded": len(engine.offloaded),
        "parameters": len(list(model.parameters())),
        "flushed": engine.steps.windows_flushed,
        "code": code,
        "compiled ahead": compiled_by.count(COMPILER),
        "compiled at a launch": len(compiled_by) - compiled_by.count(COMPILER),
    }
    optimizer.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
