"""Which ranks train together, and that they train the same model with the same options."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zenflow_compile.checks.validate import user_stacklevel
from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import GROUPS, dividing_ranks
from zenflow_compile.runtime.ranks.attendance import Member, meet
from zenflow_compile.runtime.ranks.rank_group import Call, Levels, RankGroup, first_difference
from zenflow_compile.runtime.sharding import repeated_parts, sharding_of
from zenflow_compile.torch_internals import torch_private

_OWN = {"nvme_path", "workers"}
"""Options that ranks may have of their own: where a rank keeps files, and what its threads run on."""


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes with the size of an element, in bytes."""


def rank_group(group: Any, params: Sequence[Tensor], device: torch.device) -> RankGroup | None:
    """The ranks of the option ``process_group``, or of a sharded model; None if this process trains alone.

    Args:
        params: of the optimizer. Sharded ones bring their group.
        group: a process group, a mesh of one or two dimensions, False or None; ``GroupMember.NON_GROUP_MEMBER`` is what
            ``torch.distributed.new_group`` returns on the other ranks.

    Raises:
        TypeError: it is none of what the option may be.
        ValueError: several ranks and no group, a group for a sharded model, a mesh that cannot divide a model, or a
            group without this rank.
        RankError: some ranks do not come.
    """
    running = dist.is_available() and dist.is_initialized()
    if (sharding := sharding_of(params)) is not None:
        if group is not None and group is not False:
            raise ValueError(
                "process_group is for models that are whole on each rank, and the parameters are sharded by "
                "fully_shard, which averages gradients over its mesh; leave process_group out"
            )
        if len(sharding.everyone) == 1:
            return None
        everyone, timeout = sharding.everyone, torch_private.group_timeout(sharding.groups[0], device)
        members = meet(everyone, Member.own(), timeout)
        return RankGroup(sharding.groups[0], device, Levels([everyone], everyone, sharding.groups), members, params)
    if group is None:
        if running and dist.get_world_size() > 1:
            raise ValueError(
                f"torch.distributed runs {dist.get_world_size()} ranks, and process_group=None does not say which of "
                "them train this model together. Pass process_group=torch.distributed.group.WORLD to average gradients "
                "over them and to divide state and updates among them (instead of DistributedDataParallel); or "
                "process_group=False if each rank trains alone, or the loop averages gradients by itself (under "
                "DistributedDataParallel without torch.compile, or with all_reduce(p.grad) between backward() and "
                "step()). Models that fully_shard has sharded need no process_group"
            )
        return None
    if group is False:
        return None
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        levels = levels_of_mesh(group.mesh.tolist())
        if dist.get_rank() not in levels.everyone:
            raise ValueError(
                f"process_group does not hold this rank ({dist.get_rank()}); create the optimizer on its ranks"
            )
        if group.size() == 1:
            return None
        members = meet(levels.everyone, Member.own(), torch_private.group_timeout(group.get_group(1), device))
        return RankGroup(group.get_group(1), device, levels, members)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"process_group is a mesh of {group.ndim} dimensions, {group}; give the one over which the model is "
                "replicated, as in mesh['dp'], or two, (replicas, ranks that divide a replica)"
            )
        group = group.get_group()
    if not (running and isinstance(group, dist.ProcessGroup)):
        if dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"process_group does not hold this rank ({dist.get_rank()}); create the optimizer on its ranks"
            )
        raise TypeError(
            f"process_group={group!r} must be a ProcessGroup of torch.distributed, which torchrun and "
            "init_process_group() provide, a DeviceMesh of one or two dimensions, False or None"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"process_group holds the ranks {dist.get_process_group_ranks(group)}, and not this one "
            f"({dist.get_rank()}); create the optimizer on its ranks only"
        )
    if dist.get_world_size(group) == 1:
        return None
    ranks = sorted(dist.get_process_group_ranks(group))
    members = meet(ranks, Member.own(), torch_private.group_timeout(group, device))
    hosts = [member.host for member in members]
    levels = levels_of_hosts(ranks, hosts)
    if dist.get_rank(group) == 0:
        _warn_of_copies(levels, hosts)
    return RankGroup(group, device, levels, members)


def _warn_of_copies(levels: Levels, hosts: Sequence[str]) -> None:
    """Warn if a machine has several copies of the state."""
    counts = sorted({hosts.count(host) for host in hosts})
    size = len(levels.copies[0])
    if size < counts[-1]:
        reason = (
            f"{counts[0]} does not divide the {GROUPS[0]} groups in which slices are selected"
            if len(counts) == 1
            else f"machines have {' and '.join(map(str, counts))} ranks, and all copies have one size"
        )
        warnings.warn(
            f"the {len(hosts)} ranks of process_group have {len(levels.copies)} copies of the optimizer's state, each "
            f"divided by {size}, so a machine has several: {reason}",
            UserWarning,
            stacklevel=user_stacklevel(),
        )


def levels_of_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> Levels:
    """Divide a model among the ranks of a machine, as many as evenly have a part; others, and other machines, copy it.

    All machines have copies of one size, which the links inside of a machine serve: between machines only the mean of
    each share travels.

    Args:
        hosts: of each of ``ranks``. They may have different numbers of ranks.
    """
    of_host: dict[str, list[int]] = {}
    for rank, host in zip(ranks, hosts, strict=True):
        of_host.setdefault(host, []).append(rank)
    size = dividing_ranks(math.gcd(*map(len, of_host.values())))
    copies = [each[first : first + size] for each in of_host.values() for first in range(0, len(each), size)]
    return Levels(copies, sorted(ranks))


def levels_of_mesh(mesh: Sequence[Sequence[int]]) -> Levels:
    """Divide a model among each row of a mesh of ranks; ValueError if one of so many ranks cannot divide it."""
    rows = [sorted(row) for row in mesh]  # as process groups have their ranks
    size = len(rows[0])
    if dividing_ranks(size) != size:
        possible = [each for each in range(1, GROUPS[0] + 1) if GROUPS[0] % each == 0]
        raise ValueError(
            f"process_group is a mesh of {len(rows)} times {size} ranks, and its second dimension, over which the "
            f"optimizer's state is divided, must have a size among {', '.join(map(str, possible))}"
        )
    return Levels(rows, sorted(rank for row in rows for rank in row))


def agreed(
    ranks: RankGroup, given: Options, resolved: Options, groups: Sequence[Mapping[str, Any]], params: Sequence[Tensor]
) -> Options:
    """Check that all ranks have the same model, options and versions. Returns rank 0's choice of measured options.

    Args:
        given: options as the user gave them; resolved: with measured ones decided on this rank.

    Raises:
        RankError: they differ, or another rank failed.
    """
    with ranks.announcing():
        description = _describe(given, groups, params)
        texts = ranks.gather_texts(Call.BUILD, json.dumps(description, default=str))
        if (rank := first_difference(texts)) is not None:
            first, other = json.loads(texts[0]), json.loads(texts[rank])
            what = next(name for name in first if first[name] != other.get(name))
            mine, theirs = _unlike(first[what], other.get(what))
            raise ranks.failure(
                f"rank 0 and rank {rank} have different {what}: {_short(mine)} and {_short(theirs)}; "
                "all ranks train the same model from the same weights, with the same options and versions (use one "
                "seed for the model, or broadcast rank 0's weights before the optimizer is created)"
            )
        _check_repeated(ranks, params)
        choices = {name: value for name, value in asdict(resolved).items() if name not in _OWN}
        chosen = json.loads(ranks.gather_texts(Call.BUILD, json.dumps(choices, default=str))[0])
    changes = {name: value for name, value in chosen.items() if value != json.loads(json.dumps(choices[name]))}
    return Options.from_keywords(**{**asdict(resolved), **changes}) if changes else resolved


def _check_repeated(ranks: RankGroup, params: Sequence[Tensor]) -> None:
    """Raise RankError if ranks of other meshes have other values of a parameter: experts that each has of its own."""
    parts = repeated_parts(params, ranks.message_size)
    sums = _checksums([part for _, _, part in parts])
    own = [[index, place, total] for (index, place, _), total in zip(parts, sums, strict=True)]
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, text in enumerate(ranks.gather_texts(Call.BUILD, json.dumps(own))):
        for index, place, total in json.loads(text):
            other, expected = first.setdefault((index, place), (rank, total))
            if total != expected:
                raise ranks.failure(
                    f"rank {other} and rank {rank} have different weights of parameter {index}, which is sharded over "
                    "fewer ranks than the model: if these are experts of their own, make them DTensors, as by "
                    "distribute_tensor(weight, mesh_of_experts, [Shard(0)]), or use one optimizer for them on each rank"
                )


def _describe(given: Options, groups: Sequence[Mapping[str, Any]], params: Sequence[Tensor]) -> dict[str, Any]:
    return {
        "versions of torch": torch.__version__,
        "options": {name: value for name, value in asdict(given).items() if name not in _OWN},
        "param groups": [{name: value for name, value in group.items() if name != "params"} for group in groups],
        "parameters": [(list(param.shape), str(param.dtype), param.requires_grad) for param in params],
        "weights": _checksums([param for param in params if not torch_private.is_dtensor(param)]),
    }


def _checksums(params: Sequence[Tensor]) -> list[int]:
    """Sum up the bits of each parameter's values, as integers: a pass over the device's memory, and one copy."""
    sums = []
    for param in params:
        flat = param.detach().reshape(-1).contiguous()
        sums.append(flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64))
    checksums: list[int] = torch.stack(sums).tolist() if sums else []
    return checksums


def _unlike(first: Any, other: Any) -> tuple[object, object]:
    """Return the entries in which two dicts or lists differ, the lengths of unequal lists, or other values as given."""
    if isinstance(first, list) and isinstance(other, list):
        if len(first) != len(other):
            return f"{len(first)} of them", f"{len(other)} of them"
        first, other = dict(enumerate(first)), dict(enumerate(other))
    if not (isinstance(first, dict) and isinstance(other, dict)):
        return first, other
    both = {name: (first.get(name, "absent"), other.get(name, "absent")) for name in {**first, **other}}
    unlike = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    inner = {name: _unlike(*pair) if isinstance(pair[0], dict) else pair for name, pair in unlike.items()}
    return {name: mine for name, (mine, _) in inner.items()}, {name: theirs for name, (_, theirs) in inner.items()}


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
