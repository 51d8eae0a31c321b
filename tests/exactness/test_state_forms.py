"""Training with state in fewer bytes: split masters change nothing, and rounded moments resume to the bit."""

from __future__ import annotations

import copy
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zenflow_compile as zf
from tests.support.aten_updates import aten_updates
from tests.support.training import EAGER_BACKEND
from tests.support.trajectories import ADAM
from tests.support.zoo import generator
from zenflow_compile import ZenFlowAdamW

STEPS = 14
POLICIES: dict[str, dict[str, Any]] = {
    "zero_offload": {"policy": "zero_offload"},
    "twinflow": {"policy": "twinflow", "ratio": 0.6},
    "zero_infinity": {"policy": "zero_infinity", "host_window_bytes": 12 * 320 * 256},
    "every step": {"update_interval": 1, "topk_ratio": 0.25, "select_interval": 1},
    "windows": {"topk_ratio": 0.25, "select_interval": 4},
    "a step late": {
        "update_interval": 2, "staleness": 1, "topk_ratio": 0.25, "select_interval": 2,
    },
    "summed": {"gradient_transfer": "mean"},
    "int8 gradients": {"gradient_transfer": "int8", "update_interval": 2},
    "files": {"offload_device": "nvme", "update_interval": 2, "select_interval": 2},
}  # fmt: skip
ON_DEVICE: dict[str, dict[str, Any]] = {
    "resident": {"policy": "resident"},
    "residents": {"device_share": 0.6, "topk_ratio": 0.25, "select_interval": 4},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 2, "ratio": 0.8},
}
FORMS: dict[str, dict[str, Any]] = {
    "split": {"split_master": True},
    "bf16": {"state_dtype": "bf16"},
    "fp8 split": {"state_dtype": "fp8", "split_master": True},
    "fp8": {"state_dtype": "fp8"},
}
HOST_FORMS = ("split", "bf16", "fp8 split")


def model() -> nn.Module:
    """bf16, with slices of 144 and 256 elements: whole quantization blocks, and partial ones. They are rows."""
    torch.manual_seed(0)
    layers = [nn.Linear(144, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 320)]
    return nn.Sequential(*layers).to(torch.bfloat16)


class Training:
    """A loop without or with compiled graphs."""

    def __init__(self, options: dict[str, Any], *, compiled: bool = False) -> None:
        torch._dynamo.reset()
        self.model = model()
        share = {} if options.get("policy", "zenflow") != "zenflow" else {"device_share": 0.0}
        self.optimizer = ZenFlowAdamW(
            self.model.named_parameters(),
            **{**ADAM, "min_offload_size": 100, **share, **options},
        )
        self.call = torch.compile(self.model, **EAGER_BACKEND) if compiled else self.model

    def run(self, first: int, last: int) -> Training:
        for step in range(first, last):
            source = generator(step)
            inputs, targets = torch.randn(8, 144, generator=source), torch.randint(0, 160, (8,), generator=source)
            functional.cross_entropy(self.call(inputs.bfloat16()).float(), targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())

    def load(self, saved: tuple[dict[str, Any], dict[str, Any]]) -> Training:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        return self

    def result(self) -> dict[str, Tensor]:
        """Weights, and the state of all slices."""
        self.optimizer.synchronize()
        found = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        for index, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"{index} {name}": entry[name] for name in ("master", "exp_avg", "exp_avg_sq")}
        self.optimizer.close()
        return found


@pytest.fixture
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    policy = {**POLICIES, **ON_DEVICE}[request.param]
    in_files = policy.get("policy") == "zero_infinity" or "offload_device" in policy
    return {**policy, **({"nvme_path": tmp_path} if in_files else {})}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


@pytest.mark.parametrize("options", POLICIES, indirect=True)
def test_split_masters_change_no_weight(options: dict[str, Any]) -> None:
    """Masters differ by one fp32 ulp where they were halfway between two bf16 numbers."""
    split = Training({**options, **FORMS["split"]}).run(0, STEPS)
    assert all(each.host.form.split for each in split.optimizer.engine.offloaded.values())
    assert split.optimizer.engine.uploads.selections > 0 or "select_interval" not in options
    found, expected = split.result(), Training(options).run(0, STEPS).result()
    for name, value in expected.items():
        if name.endswith("master"):
            apart = (found[name].view(torch.int32) - value.view(torch.int32)).abs()
            assert apart.max() <= STEPS
            assert (apart > 0).float().mean() < 1e-3
        elif name.endswith(("exp_avg", "exp_avg_sq")):
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-12)
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("moments", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "place",
    [ON_DEVICE["resident"], ON_DEVICE["streamed"], POLICIES["twinflow"], POLICIES["every step"]],
    ids=["resident", "streamed", "twinflow", "every step"],
)
def test_place_of_rounded_moments_changes_nothing(place: dict[str, Any], moments: str) -> None:
    """Each element is rounded alike on the host and on the device, and slices change sides without an error."""
    form = {"state_dtype": moments}
    with aten_updates():  # the arithmetic of the device's reference
        training = Training({**place, **form}).run(0, STEPS)
        engine = training.optimizer.engine
        updated = engine.registry.device_updated
        of_selected = [each.device.form for each in engine.offloaded.values() if each.plan.k]
        of_whole = [
            state.form for index in range(6) if index not in engine.offloaded and (state := updated.state(index))
        ]
        assert {form.moments for form in (*of_selected, *of_whole)} >= {moments}
        assert engine.uploads.selections > 0 or "select_interval" not in place
        expected = Training({**POLICIES["zero_offload"], **form}).run(0, STEPS).result()
        assert differing(training.result(), expected) == []


def _resumes() -> list[Any]:
    """In each form under each policy, in CI a third of them; masters of state on the device are not split."""
    pairs = [*product(POLICIES, HOST_FORMS), *product(ON_DEVICE, ["bf16", "fp8"])]
    return [
        pytest.param(name, form, marks=[] if number % 3 == 0 else pytest.mark.long)
        for number, (name, form) in enumerate(pairs)
    ]


@pytest.mark.parametrize(("options", "form"), _resumes(), indirect=["options"])
def test_resumed_run_equals_the_uninterrupted_one(options: dict[str, Any], form: str) -> None:
    """At each place in an update window, in a fresh optimizer and in the same one."""
    given = {**options, **FORMS[form]}
    expected = Training(given).run(0, STEPS).result()
    for position in (5, 6, 7):
        training = Training(given).run(0, position)
        saved = training.saved()
        assert differing(training.run(position, STEPS).load(saved).run(position, STEPS).result(), expected) == []
        assert differing(Training(given).load(saved).run(position, STEPS).result(), expected) == []


@pytest.mark.usefixtures("small_weights")
@pytest.mark.parametrize("form", HOST_FORMS)
def test_weights_in_host_memory_change_nothing(form: str) -> None:
    """They are in the upload buffers that complete split masters."""
    given = {**POLICIES["windows"], **FORMS[form]}
    expected = Training(given, compiled=True).run(0, STEPS).result()
    offloaded = Training({**given, "offload_weights": 1.0}, compiled=True).run(0, STEPS)
    assert offloaded.optimizer.engine.uploads.selections > 0
    assert differing(offloaded.result(), expected) == []


@pytest.mark.parametrize("form", HOST_FORMS)
def test_graphs_equal_hooks(form: str) -> None:
    given = {**POLICIES["a step late"], **FORMS[form]}
    assert (
        differing(Training(given, compiled=True).run(0, STEPS).result(), Training(given).run(0, STEPS).result()) == []
    )


@pytest.mark.parametrize("form", HOST_FORMS)
def test_external_write_reaches_the_masters(form: str) -> None:
    training = Training({**POLICIES["windows"], **FORMS[form]}).run(0, 6)
    training.optimizer.synchronize()
    with torch.no_grad():
        for param in training.model.parameters():
            param.mul_(0.5)
    written = {name: param.detach().clone() for name, param in training.model.named_parameters()}
    offloaded = list(training.optimizer.engine.offloaded)
    found = training.result()
    for index in offloaded:
        name = list(written)[index]
        assert torch.equal(found[name], written[name])
        assert torch.equal(found[f"{index} master"].bfloat16(), written[name])


@pytest.mark.parametrize("form", ["bf16", "fp8 split"])
def test_fp32_state_is_rounded_when_it_is_loaded(form: str) -> None:
    """And rounded state loads exactly as fp32."""
    policy = POLICIES["zero_offload"]
    saved = Training(policy).run(0, 6).saved()
    rounded = Training({**policy, **FORMS[form]}).load(saved).saved()
    for index in saved[1]["state"]:
        one, other = (each[1]["state"][index] for each in (saved, rounded))
        torch.testing.assert_close(one["exp_avg"], other["exp_avg"], rtol=0.5, atol=1e-5)
    back = Training(policy).load(rounded)
    for index, entry in back.saved()[1]["state"].items():
        assert torch.equal(entry["exp_avg"], rounded[1]["state"][index]["exp_avg"])


def test_short_slices_are_refused() -> None:
    with pytest.raises(ValueError, match=r'state_dtype="fp8" needs slices of 32 elements.* 0.weight have 16.*"bf16"'):
        ZenFlowAdamW({"0.weight": nn.Parameter(torch.zeros(512, 16))}.items(), policy="zero_offload", state_dtype="fp8")


def test_split_masters_need_bf16_weights() -> None:
    with pytest.raises(ValueError, match=r"split_master=True needs bf16 weights, and those .* are torch.float16"):
        ZenFlowAdamW([nn.Parameter(torch.zeros(512, 64).half())], policy="zero_offload", split_master=True)


def test_split_masters_need_weights_in_memory(tmp_path: Path) -> None:
    files: dict[str, Any] = {
        "policy": "zero_infinity",
        "nvme_path": tmp_path,
        "offload_weights": 1.0,
        "offload_device": "nvme_all",
    }
    with pytest.raises(ValueError, match=r'split_master=True with offload_device="nvme_all" is not supported'):
        ZenFlowAdamW([nn.Parameter(torch.zeros(512, 64).bfloat16())], **files, split_master=True)


def test_other_dtypes_keep_fp32_masters() -> None:
    params = [nn.Parameter(torch.zeros(256, 256, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    with ZenFlowAdamW(params, policy="zero_offload", split_master=True) as optimizer:
        assert [each.host.form.split for each in optimizer.engine.offloaded.values()] == [True, False]


def test_resident_policy_reads_the_dtype_alone() -> None:
    with pytest.warns(UserWarning, match=r"does not read split_master \(read by zero_offload, twinflow"):
        ZenFlowAdamW([nn.Parameter(torch.zeros(256, 256))], policy="resident", split_master=True).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in ("resident", "zero_offload"):
            ZenFlowAdamW([nn.Parameter(torch.zeros(256, 256))], policy=policy, state_dtype="bf16").close()


def test_small_resident_parameters_keep_fp32_moments() -> None:
    """1-D ones, those below ``min_offload_size``, and those whose rows are shorter than a quantization block."""
    shapes = [(4096,), (8, 8), (4096, 16), (128, 64)]
    with ZenFlowAdamW(
        [nn.Parameter(torch.ones(shape)) for shape in shapes], policy="resident", state_dtype="fp8"
    ) as it:
        for param in it.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        it.step()
        states = [it.engine.registry.device_updated.state(index) for index in range(4)]
        assert [each.arrays[0].dtype for each in states if each is not None] == [torch.float32] * 3 + [torch.int8]
        assert it.device_bytes == 2 * 4 * (4096 + 64 + 4096 * 16) + 2 * 128 * (64 + 2)


@pytest.mark.parametrize("place", ON_DEVICE)
@pytest.mark.parametrize("moments", ["bf16", "fp8"])
def test_offload_all_keeps_rounded_moments(place: str, moments: str) -> None:
    options = {**ON_DEVICE[place], "state_dtype": moments}
    expected = Training(options).run(0, STEPS).result()
    training = Training(options).run(0, 5)
    training.optimizer.offload_all()
    training.saved()
    assert differing(training.run(5, STEPS).result(), expected) == []


def test_explain_and_report_name_the_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training({**POLICIES["windows"], **FORMS["fp8 split"]}, compiled=True)
    with zf.profile(training.optimizer) as profile:
        training.run(0, 3)
    explained = str(zf.explain(training.call))
    profile.report()
    printed = " ".join(capsys.readouterr().out.split())
    for text in (" ".join(explained.split()), printed):
        assert 'fp8 moments of 3 parameters: rounded, exact with state_dtype="fp32"' in text
        assert "split masters of 3 parameters: one fp32 ulp lower if halfway between bf16" in text
    training.optimizer.close()
