"""Small models and machines in round numbers, for simulations that can be done by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any
from unittest import mock

from zenflow_compile import lazy_engine
from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.model_shape import ModelShape
from zenflow_compile.planning.dtypes import BFLOAT16
from zenflow_compile.planning.planners import ParamSpec
from zenflow_compile.prediction.forecast import Scenario

ELEMENTS = 1_000_000  # of a layer


@contextmanager
def measured_as(hardware: Hardware) -> Iterator[list[Hardware]]:
    """Let measurements of this machine find ``hardware``, or what takes its place in the list."""
    found = [hardware]
    with mock.patch.object(lazy_engine, "measured_hardware", side_effect=lambda *_: found[0]):
        yield found


def layers(count: int) -> ModelShape:
    """Layers of one bf16 matrix each."""
    params = tuple(ParamSpec(f"layer{index}", (1000, 1000), BFLOAT16) for index in range(count))
    return ModelShape(name="layers", params=params, layers=count, hidden=1000, context=0, source="made up")


def llama(blocks: int = 4, width: int = 512, vocabulary: int = 4000) -> ModelShape:
    """A small Llama with an untied head."""
    shapes = {"q": (width, width), "k": (width // 4, width), "v": (width // 4, width), "o": (width, width)}
    shapes |= {"up": (3 * width, width), "gate": (3 * width, width), "down": (width, 3 * width)}
    params = [ParamSpec("embed.weight", (vocabulary, width), BFLOAT16)]
    for block in range(blocks):
        params += [ParamSpec(f"layers.{block}.{name}.weight", shape, BFLOAT16) for name, shape in shapes.items()]
        params += [ParamSpec(f"layers.{block}.norm{number}.weight", (width,), BFLOAT16) for number in (1, 2)]
    params += [ParamSpec("norm.weight", (width,), BFLOAT16), ParamSpec("head.weight", (vocabulary, width), BFLOAT16)]
    return ModelShape(
        name="small-llama", params=tuple(params), layers=blocks, hidden=width, context=128, source="made up"
    )


def machine(**changes: Any) -> Hardware:
    """A layer's forward takes 1 s with one token; its weights or gradients cross in 1 s, its state in 6 s.

    One core updates it in 1 s where the host pass is 28 bytes per element, so in windows of one step. Device memory and
    host memory never limit, and neither does what is not named here.
    """
    made = Hardware(
        name="round",
        device_flops=4e6,
        utilization=0.5,
        device_bytes=1e12,
        device_bandwidth=inf,
        link_to_host=2e6,
        link_to_device=2e6,
        peer_bandwidth=None,
        host_bytes=1e12,
        host_bandwidth=inf,
        cores=3,
        adam_per_core=1e6,
        disk_read=12e6,
        disk_write=12e6,
        disk_bytes=1e12,
        sources={},
    )
    return replace(made, **changes)


SLOW_HOST = machine(
    device_flops=1e10,
    device_bandwidth=1e10,
    link_to_host=1e9,
    link_to_device=1e9,
    host_bandwidth=1e9,
    adam_per_core=1e6,
)
"""Forward and backward take next to nothing, and the host's update most of a step."""


def scenario(options: Options, hardware: Hardware, model: ModelShape, *, tokens: int = 1, **changes: Any) -> Scenario:
    """A run of ``model`` with ``options``."""
    return Scenario(options=options, hardware=hardware, model=model, tokens=tokens, **changes)
