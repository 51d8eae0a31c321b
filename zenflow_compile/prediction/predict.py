"""``plan`` and ``simulate``: predict a run on hardware that need not be there. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zenflow_compile.checks.validate import check_choice, check_flag, check_integer, check_positive
from zenflow_compile.options.options import ADAM_KEYWORDS, POLICIES, Options
from zenflow_compile.performance import hardware as machines
from zenflow_compile.performance import models
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.model_shape import ModelShape
from zenflow_compile.performance.traffic import RankTraffic, Sharing, rank_traffic
from zenflow_compile.planning.dtypes import BFLOAT16
from zenflow_compile.planning.planners import ParamSpec
from zenflow_compile.prediction.answers import compare, divide
from zenflow_compile.prediction.forecast import (
    DTYPES,
    ROUNDED,
    SOME_DISK,
    Forecast,
    Scenario,
    node_plan,
)
from zenflow_compile.prediction.simulate import simulate as simulate_plan
from zenflow_compile.prediction.strides import fastest_stride
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.rules import KINDS, Muon, Rule
from zenflow_compile.rules.adamw import ADAMW

if TYPE_CHECKING:
    import torch


LONGEST_SEQUENCE = 2048
"""Most tokens of a sequence where their number is not given. Contexts of models reach 131072 tokens, and a micro-batch
has a sequence at least."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A forecast per policy, and the recommended one; None if none fits."""

    scenario: Scenario
    forecasts: tuple[Forecast, ...]
    recommended: Forecast | None

    @property
    def shown(self) -> Forecast:
        """The forecast to break down, explain and trace: the recommended one, or the nearest to fitting."""
        return self.recommended or min(self.forecasts, key=lambda each: each.needs.lack(self.scenario.hardware))

    @property
    def exchanges(self) -> dict[Sharing, RankTraffic]:
        """What the devices send with the options of ``shown``, by way of sharing the work; empty for one device.

        Sharded models are left out where matrices are updated whole.
        """
        hardware = self.scenario.hardware
        if hardware.all_devices == 1:
            return {}
        scenario = replace(self.scenario, recompute=self.shown.recompute)
        plan = node_plan(Options.from_keywords(**self.shown.options), scenario)
        refused = (Sharing.SHARDED, Sharing.HYBRID) if scenario.rule.of_matrix else ()
        ways = [way for way in Sharing if way not in refused]
        return {way: rank_traffic(plan, hardware.devices, way, nodes=hardware.nodes) for way in ways}

    @property
    def exactness(self) -> str | None:
        """How the recommended run differs from the rule in every step, as a sentence; None if it does not."""
        found = {} if self.recommended is None else self.recommended.departures
        if not found:
            return None
        ways, remedies = ", ".join(found), " and ".join(found.values())
        what = "weights" if [*found] == [ROUNDED] else "deferred columns"
        of_windows = (spec.rule for spec in self.scenario.model.params if not spec.rule.of_matrix)
        rule = type(next(of_windows, self.scenario.rule)).__name__
        return f"Not exactly {rule}: {what} are updated {ways}. Exact with {remedies}."

    @property
    def not_in_files(self) -> str | None:
        """Which state the shown run keeps in memory and not in files, as a sentence; None if it uses no files."""
        if not (self.scenario.rule.of_matrix and sum(self.shown.needs.disk.values())):
            return None
        rule = type(self.scenario.rule).__name__
        return f"{rule} keeps its state in host memory, also where that of others is in files."

    def as_dict(self) -> dict[str, Any]:
        """Plain data: bytes, seconds, tokens per second. Options have no ``nvme_path`` that the user did not give."""
        asked = self.scenario
        best = self.recommended
        weights = self.shown.weights
        notes = [asked.note, self.exactness, self.not_in_files, None if weights is None else weights.sentence]
        if best is not None and best.options.get("nvme_path") == SOME_DISK:
            notes.append("Add nvme_path to the recommended options: a directory on a local disk.")
        return {
            "model": asked.model.name,
            "parameters": asked.model.numel,
            "dtype": asked.dtype,
            "rule": type(asked.rule).__name__,
            "hardware": asked.hardware.name,
            "nodes": asked.hardware.nodes,
            "devices": asked.hardware.all_devices,
            "tokens": asked.tokens,
            "sequence": asked.model.context,
            "implicit": asked.in_backward,
            "micro_batches": self.shown.micro_batches,
            "recompute": self.shown.recompute,
            "policies": [each.as_dict() | {"options": _given(each.options)} for each in self.forecasts],
            "exchanges": {
                str(exchange): {
                    "sent": each.sent,
                    "leaving": each.leaving,
                    "to_host": each.to_host,
                    "to_device": each.to_device,
                    "host_bytes": each.host_bytes,
                }
                for exchange, each in self.exchanges.items()
            },
            "recommended": None if best is None else _given(best.options),
            "notes": [note for note in notes if note is not None],
        }


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` without the ``nvme_path`` of predictions."""
    return {name: value for name, value in options.items() if (name, value) != ("nvme_path", SOME_DISK)}


def plan(
    model: str | Path | float | ModelShape,
    hardware: str | Hardware,
    *,
    tokens: int = 8192,
    sequence: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    nodes: int = 1,
    policy: str = "auto",
    implicit: bool = False,
    recompute: bool | None = None,
    epoch_tokens: float | None = None,
    device_bytes: float | None = None,
    host_bytes: float | None = None,
    rule: str | Rule = "AdamW",
    **options: Any,
) -> dict[str, Any]:
    """Predict memory, time and traffic of every policy, and which is the fastest that fits.

    For each it searches in how many micro-batches the tokens of a step come, and whether activations are recomputed,
    where these are not given.

    Args:
        model: a name, the path of a Hugging Face ``config.json``, a number of parameters, or a shape.
        hardware: a name, or numbers.
        tokens: per device and optimizer step.
        sequence: tokens of a sequence, which attention runs over; a micro-batch has one at least. None takes
            ``LONGEST_SEQUENCE``, or the model's context or all tokens of a micro-batch if these are fewer;
            a sample of a diffusion model is one sequence.
        dtype: of the weights, ``"bf16"``, ``"fp16"`` or ``"fp32"``; None takes the model's own, bf16 where it has none.
        devices: of a node, in use; None takes all. Each owns an equal share of the node's optimizer state.
        nodes: equal ones, connected by the hardware's ``network_bandwidth``, each with a copy of the optimizer state.
        policy: one, or ``"auto"`` for all.
        implicit: updates run in the backward, without an optimizer object; else gradients are final at ``step()``,
            which leaves the host the next forward. With ``max_grad_norm`` they always are.
        recompute: activations are computed again in the backward; None: where that makes the fastest step.
        epoch_tokens: of an epoch, over all devices, for its hours.
        device_bytes, host_bytes: memory of a device, of a node; None takes the hardware's.
        rule: the update rule, or its name, such as ``"Lion"``.
        options: of ``ZenFlowAdamW``. With ``gradient_accumulation_steps`` the tokens come in as many micro-batches.

    Returns:
        ``model``, ``parameters``, ``dtype``, ``rule``, ``hardware``, ``nodes``, ``devices`` of all nodes, ``tokens``,
        ``sequence``, ``implicit``; ``micro_batches`` and ``recompute`` of the recommended run; ``policies``, a dict per
        policy with the fields of ``prediction.forecast.Forecast``; ``exchanges``, by way of sharing the work (see
        ``performance.traffic.Sharing``): bytes per step that a device sends and that leave a node, and bytes of a
        node's host memory; ``recommended``, options to pass on, or None if no policy fits; and ``notes``, sentences on
        the recommended run, and on the weights that cross the link.

    Raises:
        TypeError: a value is of the wrong type, or an option is unknown.
        ValueError: a value is out of range, a name is unknown, or the hardware lacks a number.
    """
    scenario = scenario_of(
        model,
        hardware,
        tokens=tokens,
        sequence=sequence,
        dtype=dtype,
        devices=devices,
        nodes=nodes,
        policy=policy,
        implicit=implicit,
        recompute=recompute,
        epoch_tokens=epoch_tokens,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        rule=rule,
        **options,
    )
    return predict(scenario).as_dict()


def simulate(
    model: str | Path | float | ModelShape, hardware: str | Hardware, *, steps: int | None = None, **given: Any
) -> Recording:
    """Predict the timeline of a run, in the form of a profiler's recording.

    Args:
        steps: to record; None takes three update windows, at least four steps.
        given: other arguments of ``plan``, with the same errors; ``policy`` is ``"zenflow"`` by default, and one.
            Nothing is searched: ``recompute`` is False by default, and a step has one micro-batch.
    """
    scenario = scenario_of(model, hardware, **given)
    if scenario.policy == "auto":
        raise ValueError('policy="auto" is not one policy to simulate; pass one, or the options that plan() recommends')
    if scenario.recompute is None:
        raise ValueError("recompute=None is not one run to simulate; pass True or False, as plan() finds it")
    return timeline(scenario, _resolved(scenario), steps=steps)


def predict(scenario: Scenario) -> Prediction:
    """Forecast the policies of a scenario; raises ValueError as ``plan`` if the hardware lacks a number."""
    if scenario.policy == "auto":
        forecasts, best = compare(scenario)
        return Prediction(scenario, tuple(forecasts), best)
    only = divide(replace(scenario, options=_resolved(scenario)))
    return Prediction(scenario, (only,), only if only.fits else None)


def _resolved(scenario: Scenario) -> Options:
    return fastest_stride(scenario.options, scenario)


def timeline(scenario: Scenario, options: Options, *, steps: int | None = None) -> Recording:
    """The recording of a run with ``options``, whose stride is resolved."""
    return simulate_plan(
        node_plan(options, scenario),
        scenario.hardware,
        scenario.model,
        tokens=scenario.tokens,
        steps=steps,
        final_at_step=scenario.final_at_step(options),
        recompute=scenario.recomputes,
        workers=options.threads(scenario.hardware.cores // scenario.hardware.devices),
    )


def scenario_of(
    model: str | Path | float | ModelShape,
    hardware: str | Hardware,
    *,
    tokens: int = 8192,
    sequence: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    nodes: int = 1,
    policy: str = "zenflow",
    implicit: bool = False,
    recompute: bool | None = False,
    epoch_tokens: float | None = None,
    device_bytes: float | None = None,
    host_bytes: float | None = None,
    rule: str | Rule = "AdamW",
    **options: Any,
) -> Scenario:
    """Check the arguments of ``plan`` and ``simulate``; errors as there."""
    check_choice("policy", policy, POLICIES)
    if epoch_tokens is not None:
        check_positive("epoch_tokens", epoch_tokens)
    count = check_integer("tokens", tokens, 1)
    shape = _model(model, None if dtype is None else DTYPES[check_choice("dtype", dtype, tuple(DTYPES))])
    machine = _machine(hardware)
    chosen = _options(policy, machine, options)
    in_use = _in_use(machine, devices, device_bytes, host_bytes).across(nodes)
    _check_offloaded_weights(chosen, in_use)
    return Scenario(
        model=replace(
            shape,
            params=_updated_by(_rule(rule), shape),
            context=_sequence(sequence, _of_micro_batch(count, chosen), shape),
        ),
        hardware=in_use,
        policy=policy,
        options=chosen,
        tokens=count,
        in_backward=check_flag("implicit", implicit),
        recompute=None if recompute is None else check_flag("recompute", recompute),
        divided=chosen.gradient_accumulation_steps is None,
        epoch_tokens=epoch_tokens,
    )


def _rule(rule: object) -> Rule:
    if isinstance(rule, Rule):
        return rule
    return (KINDS | {"Muon": Muon})[check_choice("rule", rule, (*KINDS, "Muon"))]()


def _updated_by(rule: Rule, shape: ModelShape) -> tuple[ParamSpec, ...]:
    """The parameters by ``rule``; those that a rule of matrices does not have, as by ``muon_groups``, by AdamW."""
    outer = {*shape.embeddings, "lm_head.weight"}
    return tuple(
        replace(spec, rule=ADAMW if rule.of_matrix and (len(spec.shape) != 2 or spec.name in outer) else rule)
        for spec in shape.params
    )


def _model(model: object, dtype: torch.dtype | None) -> ModelShape:
    """A named model, even if a file has its name; else a model in a file if the argument looks like a path."""
    if isinstance(model, ModelShape):
        if dtype is None:
            return model
        return replace(model, params=tuple(replace(spec, dtype=dtype) for spec in model.params))
    if isinstance(model, Path):
        return models.from_config(model, dtype=dtype)
    if isinstance(model, str):
        is_path = model not in models.MODELS and (Path(model).suffix == ".json" or Path(model).exists())
        if is_path:
            return models.from_config(model, dtype=dtype)
        return models.model(model, dtype=dtype or BFLOAT16)
    if isinstance(model, Real):
        return models.of_size(int(check_positive("model", model)), dtype=dtype or BFLOAT16)
    raise TypeError(
        f"model={model!r} must be a name, the path of a config.json, a number of parameters, or a ModelShape; it is of "
        f"type {type(model).__name__}"
    )


def _check_offloaded_weights(options: Options, hardware: Hardware) -> None:
    if options.offload_weights == "auto":
        raise ValueError(
            'offload_weights="auto" depends on the memory that a run measures, and cannot be predicted; pass the bytes '
            "that loaded weights may take, or the share of them that leaves the device, such as 0.5"
        )
    if options.weights_in_files:
        raise ValueError(
            'offload_device="nvme_all" cannot be predicted in this version: simulations do not read weights from '
            'files. A prediction with "nvme" has the device memory of both; weights in files take the bytes of their '
            "upload buffers from the host's memory to the disk, and host_window_bytes bounds what caches them"
        )
    options.check_weights_of_ranks(several=hardware.all_devices > 1, remedy="; devices=1 plans a single one")


def _of_micro_batch(tokens: int, options: Options) -> int:
    """Tokens of one of the step's micro-batches."""
    count = options.gradient_accumulation_steps
    if count is None:
        return tokens
    remedy = f": each of gradient_accumulation_steps={count} backwards has one token at least"
    return check_integer("tokens", tokens, count, remedy=remedy) // count


def _sequence(sequence: int | None, tokens: int, model: ModelShape) -> int:
    usual = min(model.context, tokens, model.context if model.whole else LONGEST_SEQUENCE)
    if sequence is None:
        return usual
    remedy = f": a forward has {tokens} tokens of a device; None takes {usual}"
    return check_integer("sequence", sequence, 1, tokens, remedy=remedy)


def _machine(hardware: object) -> Hardware:
    if isinstance(hardware, Hardware):
        return hardware
    if hardware == "measured":
        raise ValueError(
            'hardware="measured" must be a Hardware here, where nothing is measured; pass '
            "zenflow_compile.performance.hardware.hardware_of(findings) with what "
            "zenflow-compile doctor --json printed, or ask zenflow-compile plan --hardware measured, which measures"
        )
    if isinstance(hardware, str):
        return machines.hardware(hardware)
    raise TypeError(f"hardware={hardware!r} must be a name or a Hardware; it is of type {type(hardware).__name__}")


def _in_use(machine: Hardware, devices: int | None, device_bytes: float | None, host_bytes: float | None) -> Hardware:
    remedy = f": {machine.name!r} has no more; leave it at None to use all" if devices else ""
    count = machine.devices if devices is None else check_integer("devices", devices, 1, machine.devices, remedy=remedy)
    return replace(
        machine,
        devices=count,
        device_bytes=machine.device_bytes if device_bytes is None else check_positive("device_bytes", device_bytes),
        host_bytes=machine.host_bytes if host_bytes is None else check_positive("host_bytes", host_bytes),
    )


def _options(policy: str, machine: Hardware, options: dict[str, Any]) -> Options:
    for name in ADAM_KEYWORDS:
        if name in options:
            raise TypeError(f"{name}={options[name]!r} is the optimizer's and changes no prediction; leave it out")
    named = dict(options)
    if policy != "auto":
        named["policy"] = policy
    elif named.get("device_share") == "fill":
        named["policy"] = "resident"  # it reads no device_share; the search replaces both
    in_files = policy in ("auto", "zero_infinity") or named.get("offload_device", "cpu") != "cpu"
    if in_files and machine.disk_read is not None:
        named.setdefault("nvme_path", SOME_DISK)
    elif in_files and policy != "auto" and "nvme_path" not in named:
        what = f"policy={policy!r}" if policy == "zero_infinity" else f"offload_device={named['offload_device']!r}"
        raise ValueError(
            f"hardware={machine.name!r} has no disk_read and disk_write, and {what} keeps state in files; choose "
            "hardware with a disk, or keep state in memory"
        )
    return Options.from_keywords(**named)
