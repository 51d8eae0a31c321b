"""``zenflow-compile plan``: predicts a run, a frontier or all models, and prints tables or JSON."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.text import Text

from zenflow_compile.checks.validate import check_positive, printable
from zenflow_compile.cli.plan_report import (
    bytes_table,
    check_plots,
    more_options,
    print_frontier,
    print_models,
    print_prediction,
    write_svg,
)
from zenflow_compile.options.options import FLAGS, Options
from zenflow_compile.performance import hardware, models
from zenflow_compile.performance.hardware import Hardware, hardware_of
from zenflow_compile.prediction.answers import Fit, fit, frontier
from zenflow_compile.prediction.forecast import SOME_DISK, Combination, Scenario, bytes_per_parameter, explain
from zenflow_compile.prediction.predict import Prediction, predict, scenario_of, timeline
from zenflow_compile.profiling.chrome_trace import write_chrome_trace

_SCENARIO = (
    *("tokens", "sequence", "dtype", "rule", "devices", "nodes"),
    *("policy", "implicit", "recompute", "epoch_tokens"),
)


_MODELS_OF_A_PROCESS = 8  # a process starts in about the time of two models


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Predict and print; ``parser`` reports errors, with exit code 2, before anything is computed."""
    try:
        _check(options)
        # Before a machine is measured; this policy goes with most options.
        Options.from_keywords(**{"policy": "zero_infinity", "nvme_path": SOME_DISK} | _given(options))
        if options.models:
            return _models(options)
        scenario = _scenario(options, _model(options), _hardware(options))
        if options.frontier:
            return _frontier(scenario, options)
        with _status(options):
            prediction = predict(scenario)
            others = fit(scenario, _given(options)) if scenario.policy == "auto" and not options.json else None
    except (TypeError, ValueError, OSError) as error:
        parser.error(str(error))
    if options.trace is not None:
        _write_trace(prediction, options.trace, parser)
    if options.json:
        _print_json(prediction.as_dict() | _bytes(options, prediction) | _explained(options, prediction))
        return 0
    console = Console()
    print_prediction(prediction, console)
    if others is not None and (said := more_options(prediction, others)) is not None:
        console.print(said, soft_wrap=others.best is not None)
    if options.policy != "auto" and (unread := scenario.options.unread_note) is not None:
        print(f"{parser.prog}: warning: {unread}", file=sys.stderr)
    if options.bytes:
        console.print(bytes_table(prediction.shown.title, _combinations(prediction)))
    _print_explained(_explained(options, prediction), console)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse flags that do not go together, before anything is measured.

    Raises:
        ValueError: they do not.
    """
    searches = options.frontier or options.models
    for flag, goes in (("svg", options.frontier and not options.models), ("exact", searches)):
        if getattr(options, flag) and not goes:
            raise ValueError(f"--{flag} goes with --frontier{' or --models' if flag == 'exact' else ''}; leave it out")
    if options.models and options.frontier:
        raise ValueError("--frontier applies to a single model; leave it out, or pass --model instead of --models")
    for flag in ("trace", "explain", "bytes"):
        if searches and getattr(options, flag):
            raise ValueError(f"--{flag} applies to a single plan; leave it out, or leave the search out")
    for flag in ("device_memory", "host_memory"):
        if (size := getattr(options, flag)) is not None:
            check_positive(f"--{flag.replace('_', '-')}", size)
    if options.svg is not None:
        check_plots()


def _combinations(prediction: Prediction) -> list[Combination]:
    scenario = replace(prediction.scenario, recompute=prediction.shown.recompute)
    return bytes_per_parameter(Options.from_keywords(**prediction.shown.options), scenario)


def _bytes(options: argparse.Namespace, prediction: Prediction) -> dict[str, Any]:
    """The bytes per parameter, if they are asked for."""
    return {"bytes_per_parameter": [asdict(each) for each in _combinations(prediction)]} if options.bytes else {}


def _frontier(scenario: Scenario, options: argparse.Namespace) -> int:
    with _status(options):
        found = frontier(scenario, _given(options), exact=options.exact)
    if options.svg is not None and found.fastest is not None:
        try:
            write_svg(found, options.svg)
        except OSError as error:
            raise ValueError(
                f"--svg {printable(options.svg)} cannot be written: {error.strerror}; choose another place"
            ) from None
    if options.json:
        _print_json(found.as_dict())
    else:
        print_frontier(found, Console())
    return 0


def _models(options: argparse.Namespace) -> int:
    """Every named model on one machine, the smallest first."""
    hardware = _hardware(options)
    scenarios = [_scenario(options, name, hardware) for name in models.MODELS]
    scenarios.sort(key=lambda each: each.model.numel)
    search = partial(fit, given=tuple(_given(options)), exact=options.exact)
    processes = min(os.cpu_count() or 1, len(scenarios) // _MODELS_OF_A_PROCESS)
    with ExitStack() as stack:
        found: Iterable[Fit] = map(search, scenarios)
        if processes > 1:
            # Not forked from this process: threads may just have measured the machine.
            server = multiprocessing.get_context("forkserver")
            server.set_forkserver_preload([fit.__module__])
            found = stack.enter_context(ProcessPoolExecutor(processes, server)).map(search, scenarios)
        watched = track(
            found,
            "Searching plans",
            total=len(scenarios),
            console=Console(stderr=True),
            transient=True,
            disable=not _watched(options),
        )
        fits = list(watched)
    if options.json:
        _print_json({"hardware": hardware.name, "models": [each.as_dict() for each in fits]})
    else:
        print_models(fits, Console())
    return 0


def _watched(options: argparse.Namespace) -> bool:
    """Return whether a person waits for the answer, at a terminal that shows nothing else."""
    return not options.json and sys.stdout.isatty() and sys.stderr.isatty()


def _status(options: argparse.Namespace) -> AbstractContextManager[object]:
    """Show on standard error that the search goes on."""
    return Console(stderr=True).status("Searching plans") if _watched(options) else nullcontext()


def _print_json(found: Mapping[str, Any]) -> None:
    json.dump(found, sys.stdout, indent=2)
    print()


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The options of ``ZenFlowAdamW`` that were given."""
    return {name: value for name, value in vars(options).items() if name in FLAGS and value is not None}


def _scenario(options: argparse.Namespace, model: str | Path | float, hardware: Hardware) -> Scenario:
    """The scenario for the parsed arguments.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    return scenario_of(
        model,
        hardware,
        device_bytes=options.device_memory,
        host_bytes=options.host_memory,
        **{name: getattr(options, name) for name in _SCENARIO},
        **_given(options),
    )


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
        return hardware.hardware(options.hardware)
    flops = None if options.flops is None else check_positive("--flops", options.flops)
    findings = _measure(options.nvme_path) if options.doctor_json is None else _findings(options.doctor_json)
    return hardware_of(findings, flops=flops, device_bytes=options.device_memory)


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
        scenario = replace(prediction.scenario, recompute=prediction.shown.recompute)
        write_chrome_trace([timeline(scenario, chosen)], path)
    except OSError as error:
        parser.error(f"--trace {printable(path)} cannot be written: {error.strerror}; choose another place")


def _explained(options: argparse.Namespace, prediction: Prediction) -> dict[str, Any]:
    """The output of ``--explain``: equations and, if host updates overlap, the smallest interval that hides them."""
    if not options.explain:
        return {}
    return explain(prediction.shown, prediction.scenario)


def _print_explained(explained: Mapping[str, Any], console: Console) -> None:
    for line in explained.get("explained", ()):
        console.print(Text(line))
    if "stride" in explained:
        console.print(Text(explained["stride"]))
    if "smallest_interval" in explained:
        none = "none is found; raise topk_ratio, device_share or the tokens of a step"
        found = explained["smallest_interval"] or none
        console.print(Text(f"smallest update_interval with a stall of at most 1%, by simulation: {found}"))
