"""Programs that know nothing of this package, under ``zenflow-compile run``: what they save is what AdamW makes."""

from __future__ import annotations

import functools
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zenflow_compile as zf
from tests.integrations.vision import import_timm
from zenflow_compile.cli import main
from zenflow_compile.integrations.transformers import register_optimizer as register_for_transformers
from zenflow_compile.runtime import ops

pytestmark = pytest.mark.timeout(120)

PROGRAMS = Path(__file__).parent / "programs"
EXACT = ["--update-interval", "1", "--device-share", "0", "--min-offload-size", "100"]
WINDOWED = ["--device-share", "0", "--min-offload-size", "100"]


def plainly(program: str, *arguments: object) -> None:
    """Run a program as the interpreter does."""
    before = sys.argv
    sys.argv = [str(PROGRAMS / program), *map(str, arguments)]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = before


def under_run(options: list[str], program: str, *arguments: object) -> int:
    return main.main(["run", *options, str(PROGRAMS / program), *map(str, arguments)])


def saved(path: Path) -> dict[str, Tensor]:
    """What a program has saved, by module and name."""
    if path.is_dir():
        return load_file(path / "model.safetensors")
    found = torch.load(path, weights_only=True)
    return {f"{module}.{name}": value for module, state in found.items() for name, value in state.items()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The sentences about the program, without the one about a package that other tests of this process imported."""
    lines = capsys.readouterr().err.splitlines()
    sentences = (line.partition(": ")[2] for line in lines if line.startswith("zenflow-compile run: "))
    return [each for each in sentences if not each.startswith("left alone: trainers of pytorch_lightning")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Afterwards, all is as before."""
    import_module("lightning.pytorch")  # it has a torch.compile of its own
    import_module("setuptools")  # Inductor imports it, which adds a folder to sys.path

    def replaced() -> list[object]:
        classes = [torch.optim.AdamW, torch.optim.Adam, vars(sys.modules["torch.optim.adamw"])["AdamW"]]
        return [*classes, torch.compile, list(sys.path), sys.argv, nn.Module.compile]

    found, hooks, program = replaced(), len(sys.meta_path), sys.modules["__main__"]
    yield
    sys.modules["__main__"] = program
    assert replaced() == found
    assert len(sys.meta_path) <= hooks + 1  # that of known readers, at the first optimizer
    assert type(torch.optim.AdamW) is type


@pytest.mark.parametrize("compiled", [[], ["compile", "aot_eager"], ["compile", "zenflow"]], ids=" ".join)
def test_loop_equals_adamw(compiled: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plainly("loop.py", tmp_path / "adamw.pt")
    assert under_run(EXACT, "loop.py", tmp_path / "ours.pt", *compiled) == 0
    assert difference(saved(tmp_path / "ours.pt"), saved(tmp_path / "adamw.pt")) < 1e-6
    lines = said(capsys)
    options = "update_interval=1, min_offload_size=100, device_share=0"
    for line in (
        "replaced: AdamW over 4 parameters of 4,192 elements by ZenFlowAdamW",
        "replaced: Adam over 2 parameters of 264 elements by ZenFlowAdamW",
        "replaced: Adam over 2 parameters of 264 elements by ZenFlow(Adam, ",
        "replaced: SGD over 2 parameters of 264 elements by ZenFlow(SGD, ",
        "left alone: OwnAdamW over 2 parameters of 264 elements",
        *(["left alone: torch.compile(backend='aot_eager')"] if "aot_eager" in compiled else []),
    ):
        assert sum(each.startswith(line) for each in lines) == 1, (line, lines)
    assert all(option in lines[0] for option in options.split(", "))


def test_inductor_becomes_the_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plainly("loop.py", tmp_path / "adamw.pt", "compile", "inductor")
    under_run(EXACT, "loop.py", tmp_path / "ours.pt", "compile", "inductor")
    assert difference(saved(tmp_path / "ours.pt"), saved(tmp_path / "adamw.pt")) < 1e-6
    assert "replaced: torch.compile with Inductor by backend='zenflow'" in said(capsys)


def test_compiler_is_left_alone_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    under_run([*EXACT, "--no-compile"], "loop.py", tmp_path / "ours.pt", "compile", "eager")
    assert not any("compile" in line for line in said(capsys))


def test_model_is_compiled_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plainly("accelerate_loop.py", tmp_path / "adamw.pt")
    under_run([*EXACT, "--compile"], "accelerate_loop.py", tmp_path / "ours.pt")
    assert difference(saved(tmp_path / "ours.pt"), saved(tmp_path / "adamw.pt")) < 1e-6
    assert "compiled: Sequential, by backend='zenflow', from its second step on" in said(capsys)


@pytest.mark.parametrize("program", ["accelerate_loop.py", "lightning_fit.py"])
def test_framework_equals_adamw(program: str, tmp_path: Path) -> None:
    pytest.importorskip(program.partition("_")[0])
    plainly(program, tmp_path / "adamw.pt")
    under_run(EXACT, program, tmp_path / "ours.pt")
    assert difference(saved(tmp_path / "ours.pt"), saved(tmp_path / "adamw.pt")) < 1e-6


TRAINER = [
    "--max_steps",
    "10",
    "--per_device_train_batch_size",
    "4",
    "--learning_rate",
    "1e-3",
    "--weight_decay",
    "0.1",
]


def test_trainer_equals_adamw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plainly("hf_trainer.py", tmp_path / "adamw", *TRAINER)
    expected = capsys.readouterr().out.splitlines()[-1]
    under_run(EXACT, "hf_trainer.py", tmp_path / "ours", *TRAINER)
    assert difference(saved(tmp_path / "ours"), saved(tmp_path / "adamw")) < 1e-5
    assert float(capsys.readouterr().out.splitlines()[-1]) == pytest.approx(float(expected), rel=1e-5)


def test_trainer_with_another_optimizer_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*TRAINER, "--optim", "adafactor"]
    plainly("hf_trainer.py", tmp_path / "adafactor", *flags)
    under_run(EXACT, "hf_trainer.py", tmp_path / "ours", *flags)
    assert difference(saved(tmp_path / "ours"), saved(tmp_path / "adafactor")) == 0
    lines = said(capsys)
    assert lines[0].startswith("left alone: Adafactor over ")
    assert lines[-1].startswith("nothing was replaced")


def test_trainers_flush_at_the_end(tmp_path: Path) -> None:
    """The model that is saved has all updates: a run of windows ends as one that flushes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        under_run(WINDOWED, "lightning_fit.py", tmp_path / "callback.pt")
        under_run([*WINDOWED, "--total-steps", "16"], "lightning_fit.py", tmp_path / "steps.pt")
    assert difference(saved(tmp_path / "callback.pt"), saved(tmp_path / "steps.pt")) == 0
    under_run(WINDOWED, "hf_trainer.py", tmp_path / "callback", *TRAINER)
    under_run([*WINDOWED, "--total-steps", "10"], "hf_trainer.py", tmp_path / "steps", *TRAINER)
    assert difference(saved(tmp_path / "callback"), saved(tmp_path / "steps")) == 0


def test_trainer_resumes(tmp_path: Path) -> None:
    flags = [*TRAINER, "--save_steps", "5", "--save_strategy", "steps"]
    under_run(WINDOWED, "hf_trainer.py", tmp_path / "whole", *flags)
    checkpoint = tmp_path / "whole" / "checkpoint-5"
    under_run(WINDOWED, "hf_trainer.py", tmp_path / "resumed", *flags, "--resume_from_checkpoint", checkpoint)
    assert difference(saved(tmp_path / "resumed"), saved(tmp_path / "whole")) == 0


# In processes of their own.


def process(*arguments: object, cwd: Path = PROGRAMS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zenflow_compile", "run", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_saves_before_the_last_flush_warn(tmp_path: Path) -> None:
    """As without ``run``, though the windows are flushed at exit."""
    done = process(*WINDOWED, "-m", "loop", tmp_path / "ours.pt")
    assert done.returncode == 0, done.stderr
    assert re.search(r"update windows of \d parameters were never applied", done.stderr)
    assert saved(tmp_path / "ours.pt")


def test_ranks_equal_adamw(tmp_path: Path) -> None:
    """Two processes that average gradients by themselves; the first one says what is replaced."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    ours = ["-m", "zenflow_compile", "run", *EXACT]
    for name, before in (("adamw.pt", []), ("ours.pt", ours)):
        command = [*launch, *before, "ddp_loop.py", tmp_path / name]
        done = subprocess.run(command, cwd=PROGRAMS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("replaced: AdamW over 4 parameters") == (name == "ours.pt")
    assert difference(saved(tmp_path / "ours.pt"), saved(tmp_path / "adamw.pt")) < 1e-6


def test_programs_import_frameworks_themselves(tmp_path: Path) -> None:
    """Which finds adapters that import what is half imported."""
    plainly("lightning_fit.py", tmp_path / "adamw.pt")
    done = process(*EXACT, "lightning_fit.py", tmp_path / "ours.pt")
    assert done.returncode == 0, done.stderr
    assert difference(saved(tmp_path / "ours.pt"), saved(tmp_path / "adamw.pt")) < 1e-6


@pytest.mark.parametrize(("method", "name"), [("fork", "ZenFlowAdamW"), ("spawn", "AdamW")])
def test_processes_of_a_program_are_named(method: str, name: str) -> None:
    done = process("children.py", method)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == name
    assert ("replaced: AdamW over 2 parameters" in done.stderr) == (method == "fork")
    assert 'by "spawn" import it anew' in done.stderr


def test_report_is_printed_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    under_run([*EXACT, "--report"], "accelerate_loop.py", tmp_path / "ours.pt")
    assert "host update" in capsys.readouterr().out


def test_report_is_printed_for_a_program_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "fails.py"
    program.write_text(
        "import sys, torch\nlinear = torch.nn.Linear(4, 4)\noptimizer = torch.optim.AdamW(linear.parameters())\n"
        "for _ in range(2):\n    linear(torch.ones(4)).sum().backward()\n    optimizer.step()\nraise SystemExit(7)"
    )
    with pytest.raises(SystemExit) as ended:
        main.main(["run", *EXACT, "--report", str(program)])
    assert ended.value.code == 7
    assert "step time" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main.main(["run", *EXACT, "--report", str(tmp_path / "nowhere.py")])
    assert capsys.readouterr().out == ""


def test_live_view_ends_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    under_run([*EXACT, "--live"], "accelerate_loop.py", tmp_path / "ours.pt")
    shown = capsys.readouterr()
    assert "\nzenflow: step " in shown.err
    assert "host update" not in shown.out


def test_dry_run_ends_at_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert under_run([*EXACT, "--dry-run"], "hf_trainer.py", tmp_path / "ours", *TRAINER) == 0
    assert not (tmp_path / "ours" / "model.safetensors").exists()
    lines = said(capsys)
    assert lines[0].startswith("replaced: AdamW over ")
    assert lines[-1] == "dry run: ended at the first step of an optimizer"


def test_program_keeps_its_errors_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import sys\nassert sys.argv == ['fails.py', '--policy', 'own']\nraise KeyError(7)"
    )
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    done = process("fails.py", "--policy", "own", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 7")
    assert process("exits.py", cwd=tmp_path).returncode == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], r"nowhere\.py is not a file; give the path of a script, or -m and a module"),
        (["-m", "no.such.module"], r"there is no module no\.such\.module to run; leave out -m"),
        (["--topk-ratio", "7", "loop.py"], r"topk_ratio=7 .*\[0, 1\]"),
        (["--policy", "fast", "loop.py"], r"policy='fast'"),
        (["--config", "nowhere.json", "loop.py"], r"nowhere\.json"),
    ],
)
def test_bad_input_is_named_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = len(list(ops.live_engines()))
    with pytest.raises(SystemExit) as ended:
        main.main(["run", *arguments])
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert len(list(ops.live_engines())) == engines


# Details of programs, each a few lines.

PROGRAM = """
import abc, functools, os, sys, threading
import torch
from torch import nn
from torch.optim import Adam, AdamW
torch.manual_seed(0)
model = nn.Linear(8, 8)
def train(optimizer, steps=4):
    for _ in range(steps):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def outputs(tmp_path: Path, code: str, *options: str, arguments: tuple[str, ...] = ()) -> tuple[str, str, str]:
    """What a program prints plainly and under ``run``, and the errors of the second."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "program.py").write_text(PROGRAM + code)
    name = ["folder/program.py", *arguments]
    plain = subprocess.run([sys.executable, *name], cwd=tmp_path, capture_output=True, text=True, check=False)
    ours = process(*EXACT, *options, *name, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    return plain.stdout, ours.stdout, ours.stderr


def test_programs_are_started_as_by_the_interpreter(tmp_path: Path) -> None:
    """Names, arguments, the path of imports, the file after a change of folder, and ``__main__`` at exit."""
    (tmp_path / "beside.py").touch()
    code = """
import atexit, pickle
class Own: pass
print(os.path.isabs(__file__), sys.argv, sys.path[0].endswith("folder"), __name__, __spec__)
try: import beside
except ImportError as error: print(error)
os.chdir("/")
print(len(open(__file__).read()))
atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Own())))))
"""
    plain, ours, errors = outputs(tmp_path, code, arguments=("--", "--policy", "--", "x"))
    assert ours == plain, errors


DETAILS = [
    "group = {'params': model.parameters(), 'lr': 1e-2}; optimizer = AdamW([group]); train(optimizer)\n"
    "group['lr'] = 0.1; train(optimizer)",
    "train(functools.partial(AdamW, lr=1e-2)(model.parameters()))",
    "class Own(AdamW, abc.ABC): pass\ntrain(Own(model.parameters(), lr=1e-2))",
    "model = nn.LazyLinear(8); optimizer = AdamW(model.parameters(), lr=1e-2); model(torch.ones(2, 8))\n"
    "train(optimizer)",
    "print(isinstance(Adam(model.parameters()), AdamW), isinstance(AdamW(model.parameters()), Adam))",
    "train(Adam(model.parameters(), lr=1e-2, weight_decay=0.3, decoupled_weight_decay=True))",
    "try: AdamW(torch.ones(3))\nexcept TypeError as error: print(error)",
]


def test_details_are_those_of_adamw(tmp_path: Path) -> None:
    """Groups of the program, partial calls, abstract subclasses, lazy modules, classes, and a tensor."""
    shown = "print([round(value, 5) for value in model.weight.detach().flatten().tolist()])"
    code = "\n".join(f"model = nn.Linear(8, 8)\n{each}\n{shown}" for each in DETAILS)
    plain, ours, errors = outputs(tmp_path, code)
    assert ours == plain, errors
    assert len(plain.splitlines()) == len(DETAILS) + 2


@pytest.mark.parametrize(
    "change",
    [
        "optimizer.param_groups[0]['weight_decay'] = 0.5",
        "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(4))], 'weight_decay': 0.5})",
    ],
)
def test_adam_that_gets_a_weight_decay_is_refused(change: str, tmp_path: Path) -> None:
    """Which would be another rule, silently."""
    code = "optimizer = Adam(model.parameters(), lr=1e-2); train(optimizer)\n"
    code += f"{change}\ntrain(optimizer)\nprint(model.weight.sum())"
    plain, ours, errors = outputs(tmp_path, code)
    assert not ours
    assert "the program has given a weight decay to a torch.optim.Adam" in errors
    again = process(*EXACT, "--keep-others", "folder/program.py", cwd=tmp_path)
    assert again.stdout == plain
    assert "left alone: Adam over" in again.stderr


def test_packages_around_a_module_are_imported_with_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from torch.optim import AdamW\nMAKE = {'adamw': AdamW}\n")
    train = "optimizer = MAKE['adamw']([nn.Parameter(torch.ones(4))])\nprint(type(optimizer).__name__)"
    imports = "import torch\nfrom torch import nn\nfrom package import MAKE\n"
    (package / "train.py").write_text(imports + train)
    (package / "__main__.py").write_text("print(__name__, __package__)")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("import nosuchthing")
    assert process(*EXACT, "-m", "package.train", cwd=tmp_path).stdout == "ZenFlowAdamW\n"
    assert process(*EXACT, "-m", "package", cwd=tmp_path).stdout == "__main__ package\n"
    done = process(*EXACT, "-m", "broken.train", cwd=tmp_path)
    assert (done.returncode, done.stderr.rstrip().splitlines()[-1]) == (
        1, "ModuleNotFoundError: No module named 'nosuchthing'"
    )  # fmt: skip


def test_trainer_with_an_optimizer_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its numbers are its own, whatever the arguments of the Trainer say."""
    for name, run in (("adamw", plainly), ("ours", functools.partial(under_run, EXACT))):
        run("hf_trainer.py", tmp_path / name, *TRAINER, "own")
    assert difference(saved(tmp_path / "ours"), saved(tmp_path / "adamw")) < 1e-5
    assert "replaced: AdamW over" in " ".join(said(capsys))


# Names where programs choose an optimizer by name.


def test_trainer_takes_the_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hyperparameters of the arguments, options of ``optim_args``, the last windows flushed."""
    register_for_transformers()
    register_for_transformers()
    flags = [*TRAINER, "--adam_beta2", "0.95", "--adam_epsilon", "1e-7", "--lr_scheduler_type", "cosine"]
    plainly("hf_trainer.py", tmp_path / "adamw", *flags)
    name = ["--optim", "zenflow", "--optim_args"]
    plainly("hf_trainer.py", tmp_path / "ours", *flags, *name, "update_interval=1,device_share=0,min_offload_size=100")
    assert difference(saved(tmp_path / "ours"), saved(tmp_path / "adamw")) < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plainly("hf_trainer.py", tmp_path / "windows", *flags, *name, "device_share=0,min_offload_size=100")
    windows = "device_share=0,min_offload_size=100,total_steps=10"
    plainly("hf_trainer.py", tmp_path / "steps", *flags, *name, windows)
    assert difference(saved(tmp_path / "windows"), saved(tmp_path / "steps")) == 0
    with pytest.raises(TypeError, match=r"unknown option 'update_intervall'.*update_interval"):
        plainly("hf_trainer.py", tmp_path / "wrong", *flags, *name, "update_intervall=1")


def test_timm_takes_the_name() -> None:
    import_timm()
    import_module("zenflow_compile.integrations.timm").register_optimizer()
    create = import_module("timm.optim").create_optimizer_v2
    trained = []
    for options in ({"opt": "adamw"}, {"opt": "zenflow", "update_interval": 1, "device_share": 0.0}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        optimizer = create(model, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-7, **options)
        for _ in range(5):
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append({name: value.detach().clone() for name, value in model.named_parameters()})
    assert type(optimizer) is zf.ZenFlowAdamW
    assert difference(*trained) < 1e-6
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)
