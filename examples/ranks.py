"""The ranks that torchrun has started; one process without it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_T = TypeVar("_T")


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the other ranks, as torchrun names them in the environment: through NCCL on CUDA, gloo on the CPU.

    Raises:
        ValueError: ``device`` is one GPU, which all ranks of the machine would share.
    """
    if not dist.is_torchelastic_launched():
        yield
        return
    if device.index is not None and device.type == "cuda":
        raise ValueError(
            f"--device {device} is one GPU, and under torchrun each rank has its own; use --device cuda, and "
            "CUDA_VISIBLE_DEVICES to choose among them"
        )
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def ranks() -> tuple[int, int]:
    """The number of this rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_first_rank(call: Callable[[], _T]) -> _T:
    """What ``call`` returns on the first rank, the only one that runs it.

    All ranks raise what it raises there: a ``RuntimeError`` with its type and text, if it cannot be pickled.
    """
    if ranks()[1] == 1:
        return call()
    sent, cause = [b""], None
    if ranks()[0] == 0:
        try:
            # A result that cannot be pickled raises here, on all ranks, and not in the broadcast that others wait for.
            sent = [pickle.dumps((call(), None))]
        except Exception as error:
            sent, cause = [pickle.dumps((None, _portable(error)))], error
    dist.broadcast_object_list(sent)
    result: tuple[_T, None] | tuple[None, Exception] = pickle.loads(sent[0])
    if result[1] is not None:
        raise result[1] from cause
    return result[0]


def _portable(error: Exception) -> Exception:
    """``error``, or another one with its type and text, if the other ranks could not unpickle it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def own_part(batch: Tensor) -> Tensor:
    """This rank's part of a batch that all ranks have drawn.

    Raises:
        ValueError: the ranks cannot divide it evenly, so that the mean over them would not be that of the batch.
    """
    rank, size = ranks()
    if len(batch) % size:
        raise ValueError(f"--batch {len(batch)} cannot be divided among {size} ranks; choose a multiple of {size}")
    return batch.chunk(size)[rank]
