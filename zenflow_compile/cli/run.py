"""``zenflow-compile run``: trains a program that knows nothing of this package, without a change of it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from torch.optim.optimizer import register_optimizer_step_pre_hook

import zenflow_compile as zf
from zenflow_compile.checks.validate import printable
from zenflow_compile.integrations.programs import Program, served
from zenflow_compile.lazy_engine import note_unapplied
from zenflow_compile.options.deepspeed import read_deepspeed_config
from zenflow_compile.options.options import ADAM_KEYWORDS, OPTION_NAMES, Options
from zenflow_compile.profiling.profiler import Profile


class _FirstStep(BaseException):
    """Ends a dry run; not an ``Exception``, which programs catch."""


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the program. Its exit code and its errors are its own.

    Raises:
        SystemExit: 2 for a bad option, or for a program that does not exist, before anything has run.
    """
    say = _say if os.environ.get("RANK", "0") == "0" else _say_nothing
    try:
        keywords = _keywords(options)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    program = Program(keywords, say, options.compile, options.no_compile, options.keep_others)
    with ExitStack() as stack:
        stack.enter_context(_recorded(options, first=say is _say))
        stack.enter_context(_as_the_interpreter(options))
        stack.enter_context(served(program))
        if options.dry_run:
            hook = register_optimizer_step_pre_hook(_end_at_first_step)  # runs after that of ``served``
            stack.callback(hook.remove)
        code, spec, file = _find(options.program, parser, is_module=options.is_module)
        try:
            _execute(code, spec, file)
        except _FirstStep:
            say("dry run: ended at the first step of an optimizer")
        except SystemExit as end:
            if end.code:
                raise
        program.end()
        for optimizer in program.optimizers:
            note_unapplied(optimizer.engine)
            optimizer.flush()
    return 0


@contextmanager
def _recorded(options: argparse.Namespace, *, first: bool) -> Iterator[None]:
    """Record the program and print the report, for the options that ask for it; of several ranks, the first is live.

    A program that ends by an error keeps it.
    """
    live = options.live and first
    if options.dry_run or not (live or options.report):
        yield
        return
    profile: Profile | None = None
    try:
        with zf.live() if live else zf.profile() as profile:
            yield
    except BaseException:
        if options.report and profile is not None and profile.recordings():
            try:
                profile.report()
            except Exception as error:  # of an output that is closed, or of a device that has failed
                _say(f"no report: {type(error).__name__}: {error}")
        raise
    if options.report:
        profile.report()


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
def _as_the_interpreter(options: argparse.Namespace) -> Iterator[None]:
    """Have ``sys.argv`` and ``sys.path`` in the block as the interpreter sets them for the program."""
    argv, path = sys.argv, sys.path
    folder = os.getcwd() if options.is_module else str(Path(options.program).resolve().parent)
    sys.argv, sys.path = [options.program, *options.arguments], [folder, *path[1:]]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def _find(program: str, parser: argparse.ArgumentParser, *, is_module: bool) -> tuple[CodeType, ModuleSpec | None, str]:
    """The code of the program, and as a module its spec, and its file. Ends with 2 if there is none."""
    if not is_module:
        if not (file := Path(program).absolute()).is_file():
            parser.error(f"{printable(program)} is not a file; give the path of a script, or -m and a module")
        return compile(file.read_bytes(), str(file), "exec"), None, str(file)
    spec = _spec_of(program)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _spec_of(f"{program}.__main__")
    code = None if spec is None else getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if spec is None or code is None:
        parser.error(f"there is no module {printable(program)} to run; leave out -m to run a file")
    sys.argv[0] = str(spec.origin)
    return code, spec, str(spec.origin)


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)  # imports the packages around it
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _execute(code: CodeType, spec: ModuleSpec | None, file: str) -> None:
    """Run the program as ``__main__``, which it stays: pickles and handlers at exit refer to that."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    parts = {"__file__": file, "__spec__": spec, "__package__": None if spec is None else spec.parent}
    vars(main).update(parts, __loader__=None if spec is None else spec.loader, __annotations__={})
    exec(code, vars(main))
