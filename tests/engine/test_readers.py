"""Code that reads weights outside of our graphs gets the weights that AdamW would have at that moment, or an error.

Host updates are made slow, so that a read that does not wait for them sees old weights for certain.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from tests.support.gated_jobs import UPDATES, gated
from tests.support.training import EAGER_BACKEND, IN_FLIGHT, take_step
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.options.options import Options

pytestmark = pytest.mark.timeout(120)

WIDTH = 160
STEPS = 4
CLOSE = 1e-6  # of AdamW's weights; a step that is missing shows as 1e-3, the learning rate
ADAM: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
EXACT: dict[str, Any] = {**ADAM, "update_interval": 1, "device_share": 0.0}


class Net(nn.Module):
    """Two layers, and a weight of the root's own: it is copied before anything that the root contains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(torch.tanh(x @ self.own))))


def batch(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


@pytest.fixture(autouse=True)
def slow_updates() -> Iterator[None]:
    with gated(lambda: 0.02, UPDATES):
        yield


class Pair:
    """A model that is trained here, and one that AdamW trains.

    Args:
        compiled: arguments of ``torch.compile``; None to train uncompiled.
        in_backward: the update runs in the backward.
    """

    def __init__(
        self,
        options: dict[str, Any],
        compiled: dict[str, Any] | None = EAGER_BACKEND,
        *,
        in_backward: bool = False,
        build: Callable[[], nn.Module] = Net,
    ) -> None:
        torch._dynamo.reset()
        self.model, self.expected = build(), build()
        options = {**EXACT, **options}
        self.optimizer = None if in_backward else ZenFlowAdamW(self.model.named_parameters(), **options)
        if in_backward:
            assert compiled is not None
            compiled = {**compiled, "options": {**compiled["options"], **options}}
        self.call = torch.compile(self.model, **compiled) if compiled else self.model
        self.adamw = torch.optim.AdamW(self.expected.parameters(), **ADAM)

    def step(self, step: int) -> None:
        self.loss(self.call, step).backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        take_step(self.loss(self.expected, step), self.adamw)

    def loss(self, model: Any, step: int) -> Tensor:
        loss: Tensor = model(batch(step)).square().mean()
        return loss

    def difference(self, model: nn.Module | None = None) -> float:
        """Return the largest difference between the weights of ``model``, as they are, and AdamW's."""
        pairs = zip((model or self.model).parameters(), self.expected.parameters(), strict=True)
        return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)


def evaluated(pair: Pair, read: Callable[..., Tensor]) -> float:
    inputs = batch(99)
    with torch.no_grad():
        return (read(inputs) - pair.expected(inputs)).abs().max().item()


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch_save": saved_and_loaded,
}


@pytest.mark.parametrize("made", COPIES)
def test_copies_hold_current_weights(made: str) -> None:
    """A frozen teacher that is copied in the middle of training has current weights."""
    pair = Pair({})
    for step in range(STEPS):
        pair.step(step)
        with pytest.raises(RuntimeError, match=IN_FLIGHT):  # the control: without a reader, weights are behind
            pair.difference()
        teacher = COPIES[made](pair.model)
        assert pair.difference(teacher) < CLOSE
        assert evaluated(pair, teacher) < 1e-5


def test_copies_are_independent_of_the_engine() -> None:
    pair = Pair({})
    pair.step(0)
    teacher = copy.deepcopy(pair.model)
    before = parameters_to_vector(teacher.parameters()).clone()
    pair.step(1)
    with torch.no_grad():
        teacher(batch(99))
    with pytest.raises(RuntimeError, match=IN_FLIGHT):  # calling a copy applies nothing to the original
        pair.difference()
    assert torch.equal(parameters_to_vector(teacher.parameters()), before)
    optimizer = ZenFlowAdamW(teacher.parameters(), **EXACT)
    call = torch.compile(teacher, **EAGER_BACKEND)
    call(batch(0)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        seen = teacher(batch(99))
        optimizer.synchronize()
        assert torch.equal(seen, teacher(batch(99)))


def test_evaluation_of_the_uncompiled_module() -> None:
    pair = Pair({})
    for step in range(STEPS):
        pair.step(step)
        with pytest.raises(RuntimeError, match=IN_FLIGHT):
            pair.difference()
        assert evaluated(pair, pair.model) < 1e-5
        assert pair.difference() < CLOSE


@pytest.mark.parametrize("mode", ["inference", "vmap", "jit_trace", "export", "make_fx", "functional_call"])
def test_transformed_and_traced_calls(mode: str) -> None:
    """The hook's own writes do not run under the caller's transforms, nor get into its traces."""
    pair = Pair({})
    for step in range(2):
        pair.step(step)
    model, inputs = pair.model, batch(99)
    expected = pair.expected(inputs)
    if mode == "inference":
        with torch.inference_mode():
            seen = model(inputs)
    elif mode == "vmap":
        seen = torch.func.vmap(model)(inputs)
    elif mode == "jit_trace":
        with torch.no_grad():
            traced = torch.jit.trace(model, (inputs,), check_trace=False)
            assert "copy_" not in str(traced.graph)
            seen = traced(inputs)
    elif mode == "export":
        exported = torch.export.export(model, (inputs,), strict=False)
        called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
        assert all(isinstance(target, torch._ops.OpOverload) for target in called)  # no change of the grad mode
        torch.export.save(exported, io.BytesIO())
        seen = exported.module()(inputs)
    elif mode == "make_fx":
        graph = torch.fx.experimental.proxy_tensor.make_fx(model)(inputs)
        assert all("copy_" not in str(node.target) for node in graph.graph.nodes)
        seen = graph(inputs)
    else:
        seen = torch.func.functional_call(model, dict(model.named_parameters()), (inputs,))
    torch.testing.assert_close(seen, expected, atol=1e-5, rtol=0)
    assert pair.difference() < CLOSE
    pair.step(2)  # nothing that the reader left is in the way of training
    assert evaluated(pair, model) < 1e-5


@pytest.mark.parametrize("before", [True, False], ids=["traced_before", "traced_after"])
@pytest.mark.parametrize("called", ["module", "function"])
def test_graphs_of_another_backend(called: str, before: bool) -> None:
    """Dynamo leaves hooks out of them, and has no guard on hooks that are added later."""
    pair = Pair({})
    model = pair.model
    target = model if called == "module" else (lambda x: model(x) + 0.0)
    other = torch.compile(target, backend="aot_eager", fullgraph=True)
    if before:
        assert evaluated(pair, other) < 1e-5
    for step in range(STEPS):
        pair.step(step)
        assert evaluated(pair, other) < 1e-5


def frames(model: nn.Module, compile_: Callable[[nn.Module, Any], Any], *, hooks: bool) -> list[int]:
    """Return the numbers of graphs after training, evaluation, and training again."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    optimizer = ZenFlowAdamW(model.parameters(), **EXACT)
    if hooks:
        torch.compile(model, **EAGER_BACKEND)(batch(0)).sum().backward()
        optimizer.zero_grad()
        torch._dynamo.reset()
    call = compile_(model, counter)
    counts = []
    for train in (True, False, True):
        model.train(train)
        for _ in range(2):
            with torch.set_grad_enabled(train):
                call(batch(0))
        counts.append(counter.frame_count)
    optimizer.close()
    return counts


class Broken(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.up(torch.tanh(x @ self.own))
        torch._dynamo.graph_break()
        return self.down(torch.relu(x))


def compiled_in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


WAYS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "torch_compile": lambda model, backend: torch.compile(model, backend=backend),
    "module_compile": compiled_in_place,
    "function": lambda model, backend: torch.compile(lambda x: model(x) + 1.0, backend=backend),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [Net, Broken])
def test_hooks_add_no_graphs(build: type[Net], way: str) -> None:
    assert frames(build(), WAYS[way], hooks=True) == frames(build(), WAYS[way], hooks=False)


def hooks_of(model: nn.Module) -> int:
    """Count the hooks of all modules that an engine may have added."""
    return sum(
        len(hooks)
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks)
    )


def test_close_removes_hooks() -> None:
    pair = Pair({})
    pair.step(0)
    assert pair.optimizer is not None
    assert hooks_of(pair.model) > 3
    pair.optimizer.close()
    assert not hooks_of(pair.model)
    assert evaluated(pair, pair.model) < 1e-5
    assert evaluated(pair, copy.deepcopy(pair.model)) < 1e-5


def test_generate_sees_current_weights() -> None:
    transformers = pytest.importorskip("transformers")

    def build() -> Any:
        torch.manual_seed(5)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=64,
                hidden_size=WIDTH,
                intermediate_size=WIDTH,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=4,
            )
        )

    class Tokens(Pair):
        def loss(self, model: Any, step: int) -> Tensor:
            ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            return loss

    pair = Tokens({}, build=build)
    prompt = torch.arange(8)[None]
    for step in range(2):
        pair.step(step)
        with pytest.raises(RuntimeError, match=IN_FLIGHT):
            pair.difference()
        settings = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        seen, expected = pair.model.generate(prompt, **settings), pair.expected.generate(prompt, **settings)
        assert pair.difference() < CLOSE
        torch.testing.assert_close(torch.cat(seen.logits), torch.cat(expected.logits), atol=1e-4, rtol=0)


POLICIES: dict[str, dict[str, Any]] = {
    "zenflow": {},
    "warm_up": {"update_interval": 4, "full_warm_up_rounds": STEPS},
    "streamed": {"update_stride": 2},
    "files": {"offload_device": "nvme"},
    "zero_offload": {"policy": "zero_offload"},
    "twinflow": {"policy": "twinflow", "ratio": 0.7},
    "deep_optimizer_states": {"policy": "deep_optimizer_states", "ratio": 1.0, "update_stride": 2},
    "zero_infinity": {"policy": "zero_infinity"},
    "resident": {"policy": "resident"},
}


def of_policy(name: str, folder: Path) -> dict[str, Any]:
    options = {**POLICIES[name], "overlap_step": False}
    if options.get("policy", "zenflow") != "zenflow":
        unread = Options()
        options.update(update_interval=unread.update_interval, device_share=unread.device_share)
    if options.get("offload_device") or options.get("policy") == "zero_infinity":
        options["nvme_path"] = folder
    return options


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("entry", ["uncompiled", "compiled", "in_backward"])
@pytest.mark.parametrize("policy", POLICIES)
def test_ema_equals_adamws(policy: str, entry: str, tmp_path: Path) -> None:
    compiled = None if entry == "uncompiled" else EAGER_BACKEND
    pair = Pair(of_policy(policy, tmp_path), compiled, in_backward=entry == "in_backward")
    averages = [AveragedModel(model, avg_fn=get_ema_avg_fn(0.5)) for model in (pair.model, pair.expected)]
    for step in range(STEPS):
        pair.step(step)
        by_hand = torch.cat([param.detach().reshape(-1) for _, param in pair.model.named_parameters()])
        assert (by_hand - parameters_to_vector(pair.expected.parameters())).abs().max() < CLOSE
        for average, model in zip(averages, (pair.model, pair.expected), strict=True):
            average.update_parameters(model)
        ours, expected = (parameters_to_vector(average.parameters()) for average in averages)
        assert (ours - expected).abs().max() < CLOSE


def test_manual_reads_raise_with_overlap() -> None:
    """This is the control of the test above."""
    pair = Pair({"overlap_step": True})
    for step in range(2):
        pair.step(step)
        with pytest.raises(RuntimeError, match=IN_FLIGHT):
            pair.difference()


@pytest.mark.parametrize(
    "options",
    [{"update_interval": 4}, {"update_interval": "auto"}, {"update_interval": 4, "staleness": 1}, {"staleness": 1}],
    ids=["windows", "auto", "stale_windows", "stale"],
)
@pytest.mark.parametrize("entry", ["uncompiled", "compiled", "in_backward"])
def test_steps_without_overlap_leave_no_update_due(options: dict[str, Any], entry: str) -> None:
    compiled = None if entry == "uncompiled" else EAGER_BACKEND
    pair = Pair({**options, "overlap_step": False}, compiled, in_backward=entry == "in_backward")
    for step in range(6):
        pair.step(step)
        before = parameters_to_vector(pair.model.parameters()).clone()
        with torch.no_grad():
            pair.call(batch(99))
            pair.model(batch(99))
        assert torch.equal(parameters_to_vector(pair.model.parameters()), before)


@pytest.mark.parametrize("passed", [False, True], ids=["closed_over", "argument"])
def test_state_dict_of_a_model_in_a_compiled_function(passed: bool) -> None:
    """The function is compiled, and the model is found where Dynamo found its parameters."""
    states = []
    for optimizer_class, options in ((torch.optim.AdamW, ADAM), (ZenFlowAdamW, EXACT)):
        model = Net()

        def loss(x: Tensor, given: nn.Module | None = None, model: nn.Module = model) -> Tensor:
            return (model if given is None else given)(x).square().mean()

        call = torch.compile(loss, **EAGER_BACKEND) if optimizer_class is ZenFlowAdamW else loss
        optimizer = optimizer_class(model.parameters(), **options)
        for step in range(STEPS):
            take_step(call(batch(step), *((model,) if passed else ())), optimizer)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    for name, expected in states[0].items():
        torch.testing.assert_close(states[1][name], expected, atol=CLOSE, rtol=0)


def test_cast_of_a_module_with_two_optimizers() -> None:
    """Each has a parameter of the module, and an update in flight."""
    models = []
    for options in ({"overlap_step": True}, {"overlap_step": False}):
        torch._dynamo.reset()
        torch.manual_seed(2)
        model = nn.Bilinear(WIDTH, WIDTH, 32)
        model.second = nn.Parameter(torch.randn(32, WIDTH))
        optimizers = [ZenFlowAdamW([param], **{**EXACT, **options}) for param in (model.weight, model.second)]
        call = torch.compile(lambda x, model=model: model(x, x) @ model.second, **EAGER_BACKEND)
        for step in range(2):
            take_step(call(batch(step)).square().mean(), *optimizers)
        models.append(model.double())
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
