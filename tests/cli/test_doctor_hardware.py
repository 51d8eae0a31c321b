"""The measurements of ``doctor`` become a ``Hardware`` that plans can use."""

from __future__ import annotations

from dataclasses import replace

from tests.cli.test_plan import FINDINGS
from tests.support.machines import llama, scenario
from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import hardware_of
from zenflow_compile.prediction.auto_policy import choose


def test_every_number_comes_from_its_measurement() -> None:
    one = {"threads": 1, "copy": 9e9, "add": 1e10, "adam": 2.8e9, "parameters": 1e8}
    all_of_them = {"threads": 4, "copy": 3e10, "add": 2e10, "adam": 2.1e10, "parameters": 8e8}
    found = hardware_of(FINDINGS | {"host": [all_of_them, one]})
    assert found.device_bandwidth == 2.8e10  # of whole parameters, not of scattered columns
    assert found.host_bandwidth == 2.1e10  # in place, as updates are, and with all threads
    assert found.adam_per_core == 1e8
    assert (found.device_flops, found.link_to_host, found.link_to_device) == (1e11, 5e9, 4e9)
    assert hardware_of(FINDINGS, flops=2e9).device_flops == 2e9


def test_resident_rate_of_the_device_decides() -> None:
    hardware = hardware_of(FINDINGS)
    model, filled = llama(width=1024), Options(policy="auto", tokens_per_step=1, device_share="fill")
    assert choose(scenario(filled, hardware, model, tokens=8)).policy == "resident"
    as_slow_as_columns = replace(hardware, device_bandwidth=FINDINGS["device"]["bytes"] / 10)
    assert choose(scenario(filled, as_slow_as_columns, model, tokens=8)).policy != "resident"
