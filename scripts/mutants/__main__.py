"""Proves that the tests find the defects of ``tests/mutants``: ``python -m scripts.mutants``.

A mutant is a patch of the product. Above the diff are a sentence that says what the defect is, and ``Tier: 1`` or
``Tier: 2``: the tier of tests that must find it. ``Tests: PATH...`` names the tests that reach a change of C++.

1. Each patch must apply to the working tree. A change of the product ports the patches of the lines that it changes.
2. One run of each tier's tests, in a copy of the last commit with a probe at each changed place (``probes.py``), tells
   which tests reach which mutants. ``build/mutants`` keeps the result.
3. In another copy, each mutant runs the tests that reach it, those of tier 1 first, the cheapest ones first, until one
   fails that passes without the mutant. If none does, all tests of tier 2 run.
4. ``tests/mutants/results.json`` gets each result as soon as it is known. A mutant that has a result is not run again,
   unless its patch has changed or ``--again`` is given.

The run fails if a patch does not apply, if a mutant survives, or if one of tier 1 is found by tier 2 alone.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from scripts.mutants.coverage import BY_NAME, LEFT_OUT, LEFT_OUT_NAMES, TIERS, Coverage, coverage_of, run_tests, workers
from scripts.mutants.patches import FOLDER, Mutant, checkout, git, head, read_mutants, refused

RESULTS = FOLDER / "results.json"
IN_ONE_PROCESS = 60  # tests, of those that reach a mutant
_RESULT = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", re.MULTILINE)
_STARTED = re.compile(r"^(tests/\S+::\w+(?:\[.*?\])?)(?=\s|$)", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What became of a mutant: ``found_by`` is a test of ``tier``. Both are None if it survived."""

    patch: str
    commit: str
    seconds: float
    tier: int | None = None
    found_by: str | None = None


def judge(tree: Path, mutant: Mutant, covered: Callable[[int], Coverage], processes: int) -> Result:
    """Run the tests that reach ``mutant`` until one finds it."""
    begin = time.monotonic()
    tried: set[str] = set()
    for tier in TIERS:
        coverage = covered(tier)
        tests = sorted(set(coverage.reached.get(mutant.name, ())) - tried, key=coverage.seconds.__getitem__)
        tried.update(tests)
        for at in range(0, len(tests), IN_ONE_PROCESS):
            if found := _finds(tree, mutant, [*BY_NAME, *tests[at : at + IN_ONE_PROCESS]]):
                return _result(mutant, begin, tier, found)
    whole = [*TIERS[max(TIERS)], *(f"--ignore={each}" for each in LEFT_OUT), *workers(processes)]
    found = _finds(tree, mutant, [*whole, "-k", f"not ({' or '.join(LEFT_OUT_NAMES)})"])
    return _result(mutant, begin, max(TIERS) if found else None, found)


def _result(mutant: Mutant, begin: float, tier: int | None, found_by: str | None) -> Result:
    return Result(mutant.digest, head(), round(time.monotonic() - begin, 1), tier, found_by)


def _finds(tree: Path, mutant: Mutant, arguments: Sequence[str]) -> str | None:
    """The first test of a run that fails with the mutant and passes without it."""
    deselected: list[str] = []
    while True:
        git("apply", str(mutant.path), tree=tree)
        try:
            code, output = run_tests(tree, ["-x", "-v", *arguments, *deselected])
        finally:
            git("checkout", "--", "zenflow_compile", tree=tree)
        if code in (0, 5):  # 5: no test was left
            return None
        failures = _RESULT.findall(output)
        if code > 0 and not failures:
            raise RuntimeError(f"{mutant.name}: pytest ended with {code}\n{output[-4000:]}")
        test = str(failures[0] if failures else _STARTED.findall(output)[-1])  # no report: it ended the process
        if (code := run_tests(tree, [*BY_NAME, "-q", test])[0]) == 0:
            return test
        if code != 1:
            raise RuntimeError(f"{mutant.name}: pytest ended with {code} for {test!r} without the mutant")
        deselected.append(f"--deselect={test}")


# Results.


def read_results() -> dict[str, Result]:
    return {name: Result(**each) for name, each in json.loads(RESULTS.read_text()).items()} if RESULTS.exists() else {}


def write_results(results: Mapping[str, Result]) -> None:
    """Replace the file at once: an interrupt leaves the old one or the new one."""
    new = RESULTS.with_suffix(".new")
    new.write_text(json.dumps({name: asdict(results[name]) for name in sorted(results)}, indent=1) + "\n")
    new.replace(RESULTS)


def problem_of(mutant: Mutant, result: Result) -> str | None:
    """What the run fails for; None if the mutant was found where it should be."""
    if result.found_by is None:
        return "survives"
    return "only tier 2 finds it" if result.tier is not None and result.tier > mutant.tier else None


def print_table(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> None:
    known = [(each, results[each.name]) for each in mutants if each.name in results]
    for mutant, result in known:
        problem = problem_of(mutant, result)
        where = f"tier {result.tier}" if result.tier else "-"
        print(f"{mutant.name:60} {where:7} {result.seconds:7.1f} s  {problem or result.found_by}")
    for tier, title in ((1, "found by tier 1"), (2, "found by tier 2"), (None, "not found")):
        count = sum(result.tier == tier for _, result in known)
        print(f"{title}: {count} of {len(known)} ({count / max(1, len(known)):.0%})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these mutants only")
    parser.add_argument(
        "--again", action="store_true", help="run what has a result, and find out again what reaches it"
    )
    parser.add_argument("--processes", type=int, default=2, help="that run all tests of a tier (default: %(default)s)")
    options = parser.parse_args()
    mutants = read_mutants()
    chosen = [each for each in mutants if not options.only or each.name in options.only]
    for name, reason in (unusable := refused(mutants)).items():
        print(f"{name} does not apply: port the patch to the changed lines, or remove it\n{reason}")
    if unusable or not chosen:
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the worktree is removed
    results = {name: each for name, each in read_results().items() if name in {mutant.name for mutant in mutants}}
    left = [each for each in chosen if options.again or _is_old(results.get(each.name), each)]
    covered = cache(lambda tier: coverage_of(tier, mutants, options.processes, again=options.again))
    with checkout() as tree:
        for mutant in left:
            result = results[mutant.name] = judge(tree, mutant, covered, options.processes)
            write_results(results)
            print(f"{mutant.name}: {problem_of(mutant, result) or 'found'} ({result.found_by})", flush=True)
    print_table(chosen, results)
    return int(any(problem_of(each, results[each.name]) for each in chosen))


def _is_old(result: Result | None, mutant: Mutant) -> bool:
    return result is None or result.patch != mutant.digest


if __name__ == "__main__":
    sys.exit(main())
