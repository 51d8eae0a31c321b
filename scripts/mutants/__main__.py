"""Proves that the tests find the defects of ``tests/mutants``: ``python -m scripts.mutants``.

A mutant is a patch of the product. Above the diff are a sentence that says what the defect is, and ``Tier: 1``,
``Tier: 2`` or ``Tier: 3``: the tier of tests that must find it. ``Tests: PATH...`` names tests that run early, such as
those that reach a change of C++; of tier 3 no others are searched. Those run on the fake GPU (``make fake-gpu``).

1. Each patch must apply to the working tree. A change of the product ports the patches of the lines that it changes.
2. One run of each tier's tests, in a copy of the last commit with a probe at each changed place (``probes.py``), tells
   which tests reach which mutants, if there are some that step 3's first runs do not find. ``build/mutants`` keeps it.
3. In other copies, each mutant runs the test that found it the last time and the tests that it names, those of its tier
   first, then those of tier 1 that reach it, until one fails that passes without the mutant; then those of tier 2, and
   then all of tiers 1 and 2.
4. ``tests/mutants/results.json`` gets each result as soon as it is known. A mutant that has a result is not run again,
   unless its patch, the files that it changes or the test that found it have changed, or ``--again`` is given.

The run fails if a patch does not apply, if a mutant survives, or if one of tier 1 is found by tier 2 alone. Those of
tier 3 are left out where there is no fake GPU.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from scripts.mutants import outcomes
from scripts.mutants.coverage import (
    BY_NAME,
    LEFT_OUT,
    LEFT_OUT_NAMES,
    TIERS,
    Coverage,
    collected,
    coverage_of,
    run_tests,
    stop_tests,
)
from scripts.mutants.patches import FOLDER, Mutant, checkout, git, head, read_mutants, refused
from tests.fake_gpu.environment import missing

RESULTS = FOLDER / "results.json"
IN_ONE_PROCESS = 60  # tests, of those that reach a mutant
TESTS_FAILED, NO_TESTS = 1, 5
"""What pytest exits with."""

Runs = Iterator[Sequence[str]]
"""The arguments of the runs of pytest that may find a mutant, in this order."""


@dataclass(frozen=True)
class Result:
    """What became of a mutant: ``found_by`` is a test of ``tier``. Both are None if it survived."""

    patch: str
    commit: str
    seconds: float
    tier: int | None = None
    found_by: str | None = None


class Search:
    """Runs tests on mutants, several at a time, each in a copy of the last commit."""

    def __init__(self, trees: Sequence[Path], found: Callable[[Mutant, Result], None]) -> None:
        self._trees: SimpleQueue[Path] = SimpleQueue()
        for tree in trees:
            self._trees.put(tree)
        self._count = len(trees)
        self._found = found

    def survivors(self, mutants: Sequence[Mutant], runs: Callable[[Mutant], Runs]) -> list[Mutant]:
        """The mutants that none of their ``runs`` finds; ``found`` gets the others' results.

        All first runs come before all second ones: what is found easily is known soon.
        """
        survived: list[Mutant] = []
        waiting = {each: runs(each) for each in mutants}
        seconds = dict.fromkeys(mutants, 0.0)
        with ThreadPoolExecutor(self._count) as threads:
            try:
                while waiting:
                    jobs = {threads.submit(self._run, each, waiting[each]): each for each in waiting}
                    for job in as_completed(jobs):
                        mutant, (ran, test, took) = jobs[job], job.result()
                        seconds[mutant] += took
                        if test is not None:
                            self._found(mutant, Result(mutant.digest, head(), round(seconds[mutant], 1), None, test))
                        if not ran:
                            survived.append(mutant)
                        if test is not None or not ran:
                            del waiting[mutant]
            except BaseException:
                stop_tests()  # else the executor would wait for them
                threads.shutdown(cancel_futures=True)
                raise
        return survived

    def _run(self, mutant: Mutant, runs: Runs) -> tuple[bool, str | None, float]:
        """Whether there was a next run, the test that finds the mutant in it, and the seconds that it took."""
        if (arguments := next(runs, None)) is None:
            return False, None, 0.0
        tree, begin = self._trees.get(), time.monotonic()
        try:
            return True, _finds(tree, mutant, arguments), time.monotonic() - begin
        finally:
            self._trees.put(tree)


def reaching(mutant: Mutant, coverage: Coverage, left_out: Coverage | None = None) -> Runs:
    """The tests that reach a mutant, but those that another tier has run.

    Those of the changed folders come first, and the cheapest ones of each.
    """
    ran = set(left_out.reached[mutant.name]) if left_out else set()
    folders = {part for name in mutant.places for part in Path(name).parts}

    def order(test: str) -> tuple[bool, float]:
        return Path(test).parts[1] not in folders, coverage.seconds[test]

    tests = sorted(set(coverage.reached[mutant.name]) - ran, key=order)
    for at in range(0, len(tests), IN_ONE_PROCESS):
        yield [*BY_NAME, *tests[at : at + IN_ONE_PROCESS]]


def tests_of(tier: int, *arguments: str) -> list[str]:
    """All tests of a tier and those below, except those that fail whatever a mutant does."""
    left_out = (f"--ignore={each}" for each in LEFT_OUT)
    return [*TIERS[tier], *left_out, "-k", f"not ({' or '.join(LEFT_OUT_NAMES)})", *arguments]


def _finds(tree: Path, mutant: Mutant, arguments: Sequence[str]) -> str | None:
    """The first test of a run that fails with the mutant and passes without it."""
    deselected: list[str] = []
    while True:
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            path = Path(folder) / "outcomes"
            git("apply", str(mutant.path), tree=tree)
            try:
                code, output = run_tests(tree, ["-x", "-q", *arguments, *deselected], outcomes=path)
            finally:
                git("checkout", "--", "zenflow_compile", tree=tree)
            if code in (0, NO_TESTS):
                return None
            test = outcomes.first_failure(path)
        if test is None:
            raise RuntimeError(f"{mutant.name}: pytest ended with {code}\n{output[-4000:]}")
        code, output = run_tests(tree, [*BY_NAME, "-q", test])
        if code == 0:
            return test
        if code != TESTS_FAILED:
            raise RuntimeError(f"{mutant.name}: pytest ended with {code} for {test!r} without it\n{output[-4000:]}")
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
    return f"only tier {result.tier} finds it" if result.tier is not None and result.tier > mutant.tier else None


def print_table(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> None:
    known = [(each, results[each.name]) for each in mutants if each.name in results]
    for mutant, result in known:
        problem = problem_of(mutant, result)
        where = f"tier {result.tier}" if result.tier else "-"
        print(f"{mutant.name:60} {where:7} {result.seconds:7.1f} s  {problem or result.found_by}")
    for tier, title in ((1, "found by tier 1"), (2, "found by tier 2"), (3, "found by tier 3"), (None, "not found")):
        count = sum(result.tier == tier for _, result in known)
        print(f"{title}: {count} of {len(known)} ({count / max(1, len(known)):.0%})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these mutants only")
    parser.add_argument("--again", action="store_true", help="run what has a result, as if nothing were known of it")
    parser.add_argument("--processes", type=int, default=2, help="that run tests (default: %(default)s)")
    options = parser.parse_args()
    mutants = read_mutants()
    chosen = [each for each in mutants if not options.only or each.name in options.only]
    left_out = [each for each in chosen if each.tier == 3] if missing() else []
    chosen = [each for each in chosen if each not in left_out]
    for name, reason in (unusable := refused(mutants)).items():
        print(f"{name} does not apply: port the patch to the changed lines, or remove it\n{reason}")
    if unusable or not chosen:
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the worktrees are removed
    results = {name: each for name, each in read_results().items() if name in {mutant.name for mutant in mutants}}
    if left := [each for each in chosen if options.again or _is_old(results.get(each.name), each)]:
        _judge(left, mutants, results, options)
    print_table(chosen, results)
    if left_out:
        print(f"left out: {len(left_out)} of tier 3; {missing()}")
    return int(any(problem_of(each, results[each.name]) for each in chosen))


def _judge(
    left: Sequence[Mutant], mutants: Sequence[Mutant], results: dict[str, Result], options: argparse.Namespace
) -> None:
    """Put the results of ``left`` into ``results``."""
    others = [each for each in mutants if each.tier < 3]
    of_tier: dict[int, set[str]] = {}

    def note(mutant: Mutant, result: Result) -> None:
        if result.found_by is not None:
            result = replace(result, tier=3 if mutant.tier == 3 else 1 if result.found_by in of_tier[1] else 2)
        results[mutant.name] = result
        write_results(results)
        print(f"{mutant.name}: {problem_of(mutant, result) or 'found'} ({result.found_by})", flush=True)

    def known(mutant: Mutant) -> Runs:
        before = None if options.again else results.get(mutant.name)
        if before and before.found_by in of_tier[mutant.tier]:
            yield [*TIERS[3], before.found_by]
        for tier in range(mutant.tier, max(2, mutant.tier) + 1) if mutant.tests else ():
            yield [*tests_of(tier), *mutant.tests]

    with ExitStack() as stack:
        trees = [stack.enter_context(checkout()) for _ in range(options.processes)]
        of_tier |= {tier: collected(trees[0], tier) for tier in {1, *(each.tier for each in left)}}
        for name, result in results.items():  # later seconds, or marks, may have moved a test to another tier
            if result.tier is not None and result.tier < 3:
                results[name] = replace(result, tier=1 if result.found_by in of_tier[1] else 2)
        search = Search(trees, note)
        survived = search.survivors(left, known)
        left = [each for each in survived if each.tier < 3]
        if left:
            first = coverage_of(1, others, options.processes, again=options.again)
            left = search.survivors(left, lambda each: reaching(each, first))
        if left:
            second = coverage_of(2, others, options.processes, again=options.again)
            left = search.survivors(left, lambda each: reaching(each, second, first))
        left = search.survivors(left, lambda _: iter([tests_of(2)]))
        for mutant in [*left, *(each for each in survived if each.tier == 3)]:
            note(mutant, Result(mutant.digest, head(), 0.0))


def _is_old(result: Result | None, mutant: Mutant) -> bool:
    """Whether something has changed that the result depends on: of a survivor, any source and any test."""
    if result is None or result.patch != mutant.digest:
        return True
    paths = ["zenflow_compile", "tests/"]
    if result.found_by is not None:
        paths = [*mutant.places, result.found_by.partition("::")[0]]
    return git("diff", "--quiet", result.commit, "HEAD", "--", *paths, check=False).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
