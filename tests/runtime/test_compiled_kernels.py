"""Machine code and grids of the Triton kernels, as they are launched for the matrices of real models.

Compiling needs no GPU: Triton brings the assembler. Registers bound how many programs run on a multiprocessor, spills
and narrow accesses cost bandwidth, and small grids leave multiprocessors without work.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, whose wheels are for Linux")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from tests.support.kernel_launches import Compiled, compile_for, record, update_of
from zenflow_compile.rules import KINDS

# Of each thread. A multiprocessor has 65536, and a program 128 threads: 4, 6, 6, 6, 4, 5, 16 and 9 programs.
REGISTERS = {
    "split": 128, "unsplit": 80, "merge": 80, "adam": 80, "adam bf16": 104, "adam fp8": 96, "sums": 32, "quantize": 56,
}  # fmt: skip

QWEN_Q, QWEN_K, QWEN_GATE, QWEN_DOWN = (2048, 2048), (256, 2048), (11008, 2048), (2048, 11008)
LLAMA_Q, LLAMA_K, LLAMA_GATE, LLAMA_DOWN = (3072, 3072), (1024, 3072), (8192, 3072), (3072, 8192)

# At least so many programs for bf16: an H200 has 132 multiprocessors. The two matrices with fewer somewhere have 1 MiB,
# and a tenth of it is selected.
PROGRAMS = {
    QWEN_Q: {"split": 512, "merge": 1024, "adam": 400, "quantize": 1800},
    QWEN_K: {"split": 128, "merge": 128, "adam": 52, "quantize": 460},
    QWEN_GATE: {"split": 1376, "merge": 5504, "adam": 2200, "quantize": 9900},
    QWEN_DOWN: {"split": 1376, "merge": 5504, "adam": 2200, "quantize": 9900},
    LLAMA_Q: {"split": 1152, "merge": 2304, "adam": 900, "quantize": 2700},
    LLAMA_K: {"split": 768, "merge": 768, "adam": 300, "quantize": 2700},
    LLAMA_GATE: {"split": 1536, "merge": 6144, "adam": 2400, "quantize": 7300},
    LLAMA_DOWN: {"split": 1536, "merge": 6144, "adam": 2400, "quantize": 7300},
}

capabilities = pytest.mark.parametrize("capability", [80, 90, 100, 120])  # A100, H100 and H200, B200, RTX 50


@pytest.fixture
def compiler_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


@pytest.mark.matrix(3)
@capabilities
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [QWEN_K, QWEN_GATE, LLAMA_DOWN])
def test_machine_code(shape: tuple[int, int], dtype: torch.dtype, capability: int, compiler_cache: Path) -> None:
    launches = record(shape, dtype, scale_on_device=shape == QWEN_GATE)
    found = {name: compile_for(launch, capability, compiler_cache) for name, launch in launches.items()}
    for name, code in found.items():
        assert code.stack_bytes == 0, name
        assert code.registers <= REGISTERS[name], name
        # Neither contracted nor approximate, so that references and other versions of Triton round alike.
        assert not re.search(r"fma\.rn\.f32|div\.(?:full|approx)|sqrt\.approx", code.ptx), name
    for name in ("split", "unsplit", "merge"):
        assert_wide(found[name], name)
    columns = shape[0] < shape[1]
    for name in ("adam", "adam bf16"):
        assert_wide(found[name], name, narrow_stores=8 if columns else 0)  # selected columns do not lie together
    # Each moment: a thread's 8 codes in one access, and scales byte by byte.
    of_moments = {access: count for access, count in found["adam fp8"].accesses.items() if re.search("v2|b8", access)}
    assert of_moments == {f"{kind}.global.{size}": 2 for kind in ("ld", "st") for size in ("v2.b32", "b8")}
    # Values follow scales in a block, so that their address is a multiple of 4 only.
    assert_wide(found["quantize"], "quantize", word_stores=2)


@pytest.mark.matrix(10)
@capabilities
@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "AdamW"])
def test_machine_code_of_rules(name: str, moments: str, capability: int, compiler_cache: Path) -> None:
    """A matrix of rows, whose weights lie together: as many programs fit on a multiprocessor as AdamW's in bf16."""
    for dtype in (torch.bfloat16, torch.float32):
        code = compile_for(update_of(KINDS[name](), QWEN_GATE, dtype, moments), capability, compiler_cache)
        assert code.stack_bytes <= 8, dtype
        assert code.registers <= 112, dtype
        assert not re.search(r"fma\.rn\.f32|div\.(?:full|approx)|sqrt\.approx", code.ptx), dtype
        if moments != "fp8":
            assert_wide(code, name)


def assert_wide(code: Compiled, name: str, *, narrow_stores: int = 0, word_stores: int = 0) -> None:
    """Tiles go in 16-byte accesses; only indices, norms and scales of single slices go in others."""
    loads = {access: count for access, count in code.accesses.items() if access.startswith("ld")}
    stores = {access: count for access, count in code.accesses.items() if access.startswith("st")}
    assert loads.keys() <= {"ld.global.v4.b32", "ld.global.b32", "ld.global.b64"}, (name, loads)
    assert loads["ld.global.v4.b32"] > 0, name
    assert stores.pop("st.global.v4.b32") > 0, name
    if narrow_stores:
        ((access, count),) = stores.items()
        assert access in ("st.global.b16", "st.global.b32"), name
        assert count <= narrow_stores, name
    else:
        assert sum(stores.values()) <= word_stores + 1, (name, stores)  # one more: a norm or a scale per slice
        assert stores.keys() <= {"st.global.b32"}, (name, stores)


@pytest.mark.parametrize("shape", PROGRAMS, ids=str)
def test_grids_fill_a_large_device(shape: tuple[int, int]) -> None:
    launches = record(shape, torch.bfloat16, scale_on_device=False)
    for name, least in PROGRAMS[shape].items():
        assert launches[name].programs >= least, name
    assert launches["unsplit"].programs == launches["merge"].programs


def test_short_slices_need_no_second_launch() -> None:
    assert "sums" not in record(QWEN_K, torch.bfloat16, scale_on_device=False)
    assert "sums" in record(LLAMA_K, torch.bfloat16, scale_on_device=False)
