"""``zenflow-compile plan``: predicts a run and prints tables or JSON, or writes a trace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from zenflow_compile.checks.printable import printable
from zenflow_compile.checks.validate import check_positive
from zenflow_compile.cli.doctor_hardware import hardware_of
from zenflow_compile.cli.plan_report import print_prediction
from zenflow_compile.options.options import Options
from zenflow_compile.performance import hardware_catalog
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.model_shapes import flops_per_token
from zenflow_compile.prediction.forecast import node_plan
from zenflow_compile.prediction.predict import Prediction, predict, timeline
from zenflow_compile.prediction.scenario import scenario_of
from zenflow_compile.profiling.chrome_trace import write_chrome_trace

_OPTIONS = (
    "topk_ratio", "update_interval", "staleness", "ratio", "update_stride", "sub_group_size", "max_grad_norm",
    "nvme_path", "device_share", "shared_buffers", "offload_weights",
    "gradient_accumulation_steps",
)  # fmt: skip

_SCENARIO = (
    "tokens", "sequence", "dtype", "devices", "nodes", "policy", "implicit", "recompute", "epoch_tokens",
    "device_bytes", "host_bytes",
)  # fmt: skip


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Predict and print; ``parser`` reports errors, with exit code 2, before anything is computed."""
    try:
        prediction = _predict(options)
    except (TypeError, ValueError, OSError) as error:
        parser.error(str(error))
    if options.trace is not None:
        _write_trace(prediction, options.trace, parser)
    if options.json:
        json.dump(prediction.as_dict() | _explained(options, prediction), sys.stdout, indent=2)
        print()
        return 0
    console = Console()
    print_prediction(prediction, console)
    _print_explained(_explained(options, prediction), console)
    return 0


def _predict(options: argparse.Namespace) -> Prediction:
    """The prediction for the parsed arguments.

    Raises:
        TypeError, ValueError, OSError: an argument, or a file that it names, is invalid.
    """
    given = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    Options.from_keywords(**given)  # checked before a machine is measured
    scenario = scenario_of(
        _model(options),
        _hardware(options),
        **{name: getattr(options, name) for name in _SCENARIO},
        **given,
    )
    return predict(scenario)


def _model(options: argparse.Namespace) -> str | Path | float:
    if options.params is not None:
        return check_positive("--params", options.params)
    return str(options.model) if options.config is None else Path(options.config)


def _hardware(options: argparse.Namespace) -> Hardware:
    if options.doctor_json is None and options.hardware != "measured":
        if options.flops is not None:
            raise ValueError(
                f"--flops={options.flops} goes with --hardware measured or --doctor-json; "
                f"--hardware {options.hardware} has its own speed: leave --flops out"
            )
        return hardware_catalog.hardware(options.hardware)
    flops = None if options.flops is None else check_positive("--flops", options.flops)
    findings = _measure(options.nvme_path) if options.doctor_json is None else _findings(options.doctor_json)
    return hardware_of(findings, flops=flops, device_bytes=options.device_bytes)


def _measure(nvme_path: str | None) -> Mapping[str, Any]:
    from zenflow_compile.cli import doctor  # imports torch

    return doctor.quick_findings(nvme_path)


def _findings(path: str) -> Mapping[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--doctor-json {printable(path)} is not valid JSON ({error}); save the output of doctor --json"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"--doctor-json {printable(path)} is not the output of doctor --json; save that")
    return found


def _write_trace(prediction: Prediction, path: str, parser: argparse.ArgumentParser) -> None:
    chosen = Options.from_keywords(**prediction.shown.options)
    try:
        write_chrome_trace([timeline(prediction.scenario, chosen)], path)
    except OSError as error:
        parser.error(f"--trace {printable(path)} cannot be written: {error.strerror}; choose another place")


def _explained(options: argparse.Namespace, prediction: Prediction) -> dict[str, Any]:
    """The output of ``--explain``: equations and, if host updates overlap, the smallest interval without a stall."""
    if not options.explain:
        return {}
    from zenflow_compile.performance import performance_model  # imports sympy
    from zenflow_compile.performance.step_settings import StepSettings

    scenario = prediction.scenario
    chosen = Options.from_keywords(**prediction.shown.options)
    settings = StepSettings.of(
        chosen,
        node_plan(chosen, scenario),
        final_at_step=scenario.final_at_step(chosen),
        recompute=scenario.recompute,
    )
    flops = flops_per_token(scenario.model) * scenario.tokens
    explanation = performance_model.explain(settings, scenario.hardware, flops=flops)
    explained = {"explained": explanation}
    if not settings.overlapped:
        return explained
    smallest = performance_model.smallest_interval(settings, scenario.hardware, flops=flops)
    return explained | {"smallest_interval": smallest}


def _print_explained(explained: Mapping[str, Any], console: Console) -> None:
    for line in explained.get("explained", ()):
        console.print(Text(line))
    if "smallest_interval" in explained:
        none = "none: no update window is long enough; raise topk_ratio, or the tokens of a step"
        console.print(Text(f"smallest stall-free update_interval: {explained['smallest_interval'] or none}"))
