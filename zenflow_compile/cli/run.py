"""``zenflow-compile run``: trains a program that knows nothing of this package, without a change of it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from torch.optim.optimizer import register_optimizer_step_pre_hook

import zenflow_compile as zf
from zenflow_compile.checks.validate import printable
from zenflow_compile.integrations.programs import Program, served
from zenflow_compile.lazy_engine import note_unapplied
from zenflow_compile.options.deepspeed import read_deepspeed_config
from zenflow_compile.options.options import ADAM_KEYWORDS, OPTION_NAMES, Options

_NOTHING = (
    "nothing was replaced: in this process, no torch.optim.AdamW was made, and no torch.optim.Adam without weight "
    'decay. Processes that a program starts by "spawn" import it anew, without what `run` replaces: start several '
    "processes with torchrun -m zenflow_compile run"
)


class _FirstStep(BaseException):
    """Ends a dry run; not an ``Exception``, which programs catch."""


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the program. Its exit code and its errors are its own.

    Raises:
        SystemExit: 2 for a bad option, or for a program that does not exist, before anything has run.
    """
    say = _say if os.environ.get("RANK", "0") == "0" else _say_nothing
    with ExitStack() as stack:
        stack.enter_context(_as_main(options))
        try:
            keywords = _keywords(options)
            start = _starting(options.program, is_module=options.is_module)
        except (ValueError, TypeError, OSError) as error:
            parser.error(str(error))
        program = Program(keywords, say, compiles=options.compile, keeps_compiler=options.no_compile)
        profile = stack.enter_context(zf.profile()) if options.report and not options.dry_run else None
        stack.enter_context(served(program))
        if options.dry_run:
            hook = register_optimizer_step_pre_hook(_end_at_first_step)  # runs after that of ``served``
            stack.callback(hook.remove)
        try:
            start()
        except _FirstStep:
            say("dry run: ended at the first step of an optimizer")
        except SystemExit as end:
            if end.code:
                raise
        finally:
            if not program.replaced_any:
                say(_NOTHING)
        for optimizer in program.optimizers:
            note_unapplied(optimizer.engine)
            optimizer.flush()
        if profile is not None:
            profile.report()
    return 0


def _say(line: str) -> None:
    print(f"zenflow-compile run: {line}", file=sys.stderr, flush=True)


def _say_nothing(line: str) -> None:
    """Of several ranks, the first one speaks."""


def _end_at_first_step(*_: Any) -> NoReturn:
    raise _FirstStep


def _keywords(options: argparse.Namespace) -> dict[str, Any]:
    """The options of ``ZenFlowAdamW`` that were given, also by a file.

    Raises:
        ValueError, TypeError: one is invalid.
    """
    keywords = {name: value for name in OPTION_NAMES if (value := getattr(options, name)) is not None}
    if options.config is not None:
        of_program = dict.fromkeys(ADAM_KEYWORDS)  # the program says these
        keywords = read_deepspeed_config(options.config, **of_program, **keywords)
        keywords = {name: value for name, value in keywords.items() if name not in ADAM_KEYWORDS}
    Options.from_keywords(**keywords)
    return keywords


@contextmanager
def _as_main(options: argparse.Namespace) -> Iterator[None]:
    """Have ``sys.argv`` and ``sys.path`` in the block as the interpreter sets them for the program."""
    argv, path = sys.argv, sys.path
    folder = os.getcwd() if options.is_module else str(Path(options.program).resolve().parent)
    sys.argv, sys.path = [options.program, *options.arguments], [folder, *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def _starting(program: str, *, is_module: bool) -> Callable[[], object]:
    """What runs the program.

    Raises:
        ValueError: there is no such program.
    """
    if not is_module:
        if not Path(program).is_file():
            raise ValueError(f"{printable(program)} is not a file; give the path of a script, or -m and a module")
        return lambda: runpy.run_path(program, run_name="__main__")
    try:
        found = importlib.util.find_spec(program)
    except ImportError:
        found = None
    if found is None:
        raise ValueError(f"there is no module {printable(program)}; leave out -m to run a file")
    return lambda: runpy.run_module(program, run_name="__main__", alter_sys=True)
