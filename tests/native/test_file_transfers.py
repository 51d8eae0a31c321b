"""Native reads and writes of chunks: their bytes and checksums, with and without direct I/O."""

from __future__ import annotations

import ctypes
import zlib
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.runtime.test_nvme_cache import plan_of
from tests.support.host import no_direct_io
from zenflow_compile.native.library import library
from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.host.workers import Workers
from zenflow_compile.runtime.nvme import state_file
from zenflow_compile.runtime.nvme.chunk import STATE, Chunk, make_transfer
from zenflow_compile.runtime.nvme.state_file import PIECE_BYTES, ScratchDirectory, StateFileError
from zenflow_compile.runtime.recorder import Recorder


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 4095, 4096, 100_003])
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_checksums_are_those_of_zlib(size: int, offset: int) -> None:
    torch.manual_seed(size)
    content = bytes(torch.randint(256, (size + offset,), dtype=torch.uint8).tolist())
    memory = ctypes.create_string_buffer(content, len(content) + 1)
    found = library().zenflow_crc32(ctypes.addressof(memory) + offset, size)
    assert found == zlib.crc32(content[offset:])


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_chunks_are_moved_as_a_whole(direct: bool, tmp_path: Path) -> None:
    plan = plan_of(0, 20 * PIECE_BYTES // 9 // 768)  # a part of a piece at the end
    directory, pool, arena = ScratchDirectory(tmp_path), Workers(1, Recorder()), HostArena(100 << 20)
    pool.start()
    with nullcontext() if direct else no_direct_io():
        file = directory.create(60 << 20, {}, purpose="for a test", otherwise="none")
    chunk = Chunk(plan, file, 3 * state_file.PAGE_BYTES, STATE)
    assert chunk.size > 2 * PIECE_BYTES
    written, memory = (arena.take((chunk.size,), torch.uint8) for _ in range(2))
    written.random_(generator=torch.Generator().manual_seed(0))

    def move(kind: str, memory: torch.Tensor) -> None:
        job = make_transfer(chunk, kind, memory, pool.handle, after=(), behind=(), step=0, deadline=0)
        pool.submit(job)
        job.wait()

    move("write", written)
    begin = state_file.PAGE_BYTES + chunk.offset
    content = written.numpy().tobytes()
    assert chunk.description.checksum == zlib.crc32(content)
    assert chunk.file.path.read_bytes()[begin : begin + chunk.size] == content
    move("read", memory)
    assert torch.equal(memory, written)
    with chunk.file.path.open("r+b") as raw:
        raw.seek(begin + PIECE_BYTES + 3)
        raw.write(bytes([content[PIECE_BYTES + 3] ^ 1]))
    with pytest.raises(StateFileError, match=r"p0 could not be read.*checksum"):
        move("read", memory)
    pool.close()
    directory.close()
