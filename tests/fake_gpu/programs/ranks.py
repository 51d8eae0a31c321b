"""Trains on several ranks, each on its device, and prints how far apart the weights of the ranks and of one CPU end.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.fake_gpu.programs.ranks '{"options": {...}}'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import models
from tests.ranks.sharded import across_slices, crosswise, train_sharded
from tests.support.stream_collectives import StreamGroup
from zenflow_compile.runtime.device.devices import device_of

BACKEND = "fake_gpu"


def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> StreamGroup:
    """Of the current device; what ``torch.distributed`` calls for the backend."""
    device = device_of(torch.device("cuda", torch.cuda.current_device()))
    return StreamGroup(BACKEND, device, store, rank, size, timeout)


def keywords_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run. A model that is ``across`` has matrices of which each rank has a part of every slice."""
    found = {name: given[name] for name in ("clip", "steps") if name in given}
    return found | ({"build": crosswise} if given.get("across") else {})


def train(rank: int, given: Mapping[str, Any]) -> list[Tensor]:
    """The weights at the end of one of the ranks, on the host; of all of them together, if the model is sharded."""
    keywords = keywords_of(given) | {"compiled": given.get("compiled", False)}
    if given.get("sharded"):
        keywords["mesh"] = init_device_mesh("cuda", (dist.get_world_size(),))
        if given.get("across"):
            keywords["shard_placement_fn"] = across_slices
        weights = train_sharded(rank, dist.get_world_size(), given["options"], **keywords)
        return [each.cpu() for each in weights]
    return models.train(given["options"], rank, dist.get_world_size(), device=f"cuda:{rank}", **keywords)


def main() -> None:
    given = json.loads(sys.argv[1])
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    alone = models.train(given.get("reference"), **keywords_of(given))
    dist.Backend.register_backend(BACKEND, make_group, devices=["cpu", "cuda"])
    models.BACKEND_OF_DEVICES = BACKEND
    dist.init_process_group(BACKEND)
    weights = train(rank, given)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, weights, group=dist.new_group(backend="gloo"))
    if rank == 0:
        apart = models.difference(weights, alone)
        print(json.dumps({"ranks": max(models.difference(weights, each) for each in every), "one": apart}), flush=True)
    dist.barrier()
    os._exit(0)  # threads of the fake device may hold streams that wait for a rank which has ended


if __name__ == "__main__":
    main()
