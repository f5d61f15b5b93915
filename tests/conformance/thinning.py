"""Which tests run: three tiers, each a part of the next.

``make test`` is quick: it leaves out what is marked ``slow`` (notebooks, browsers, kills), and runs every other test;
one that runs on real ranks, or is marked ``sampled``, with one of its cases, and any other with at most two.
``pytest --full``, which every change must pass, adds what is slow; of the n cases of a test on real ranks, or marked
``sampled``, it runs about the cube root of n, and of any other test all. ``pytest --every-case`` runs all cases and
what is marked ``weekly``.

A test's cases are its world sizes (2, 3 and 4) times its other parameters. Those that run are evenly spaced among all
of them, from a start that depends on the test's name, so each tier always runs the same ones. A test that is
marked ``ranks`` runs at the world sizes that it names only; such a test, and one that skips some world sizes by itself,
runs each of its sampled cases at all that remain. Any other test that may skip a case runs all of them in each tier.

The matrix of strategies and compressors runs over the transport that a job gets by default, shared memory where the
machine has it. A third of all cases run over TCP as well; of these, the full tier runs the cases of 3 ranks that it
also runs by default, which need only one more pool of ranks, and the quick tier none.
"""

from __future__ import annotations

import inspect
import re
import zlib
from collections import defaultdict
from collections.abc import Callable
from itertools import filterfalse
from types import CodeType
from typing import TypeVar

import pytest

from conformance.compressor import CompressorConformance
from conformance.ranks import OVER, WORLD_SIZES
from conformance.strategy import StrategyConformance

_Case = TypeVar("_Case")
MATRIX = (CompressorConformance, StrategyConformance)
QUICK_CASES = 2
"""Of a test that neither runs on real ranks nor is marked ``sampled``, this many cases run in the quick tier."""


def thin(items: list[pytest.Item], *, quick: bool) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that run and those left out, in the quick tier or the full one."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    by_name = {item.nodeid: item for item in items}
    for item in filterfalse(_is_over_tcp, items):
        if not item.get_closest_marker("weekly") and not (quick and item.get_closest_marker("slow")):
            tests[item.nodeid.partition("[")[0]].append(item)
    chosen = {item for name, cases in tests.items() for item in _cases(name, cases, quick=quick)}
    if not quick:
        names = (item.nodeid.replace(OVER.format("auto"), OVER.format("tcp")) for item in chosen)
        twins = [by_name[name] for name in names if name in by_name and _is_over_tcp(by_name[name])]
        chosen |= {twin for twin in twins if _ranks_of(twin) == 3 and _is_of_the_third(twin)}
    return _parted(items, lambda item: item in chosen)


def at_their_ranks(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that run and those left out: numbers of ranks that a test marked ``ranks`` does not name."""
    return _parted(items, _is_at_its_ranks)


def _is_at_its_ranks(item: pytest.Item) -> bool:
    named = item.get_closest_marker("ranks")
    if named is None:
        return True
    assert named.args, item.nodeid
    assert {*named.args} <= {*WORLD_SIZES}, f"{item.nodeid}: ranks{named.args} must be among {WORLD_SIZES}"
    return _ranks_of(item) in (None, *named.args)


def without_most_of_tcp(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that run and those left out: two thirds of the matrix over TCP."""
    return _parted(items, lambda item: not _is_over_tcp(item) or _is_of_the_third(item))


def _parted(
    items: list[pytest.Item], runs: Callable[[pytest.Item], bool]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    return [*filter(runs, items)], [*filterfalse(runs, items)]


def _is_over_tcp(item: pytest.Item) -> bool:
    return (
        hasattr(item, "callspec")
        and item.callspec.params.get("transport") == "tcp"
        and _is_of_the_matrix(item)
    )


def _is_of_the_third(item: pytest.Item) -> bool:
    return zlib.crc32(item.nodeid.encode()) % 3 == 0


def _is_of_the_matrix(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and bool(item.cls) and issubclass(item.cls, MATRIX)


def _is_sampled(item: pytest.Item) -> bool:
    return bool(_is_of_the_matrix(item) or _ranks_of(item) or item.get_closest_marker("sampled"))


def _ranks_of(item: pytest.Item) -> int | None:
    """The number of ranks that a test runs on, where it runs on real ranks."""
    return item.callspec.params.get("pools") if hasattr(item, "callspec") else None


def _cases(name: str, cases: list[pytest.Item], *, quick: bool) -> list[pytest.Item]:
    """The cases of one test that run."""
    if _is_sampled(cases[0]):
        groups: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in cases:
            groups[_case_of(item)].append(item)
        count = 1 if quick else max(1, int(len(groups) ** (1 / 3) + 1e-9))
        return [item for group in _spaced(name, [*groups.values()], count) for item in group]
    if quick and len(cases) > QUICK_CASES and not _skips(cases[0]):
        return _spaced(name, cases, QUICK_CASES)
    return cases


def _spaced(name: str, cases: list[_Case], count: int) -> list[_Case]:
    """Return this many of a test's cases, evenly spaced, from a start that depends on its name."""
    start = zlib.crc32(name.encode()) % len(cases)
    drawn = {(start + index * len(cases) // count) % len(cases) for index in range(count)}
    return [case for index, case in enumerate(cases) if index in drawn]


def _skips(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and _may_skip(item.function)


def _case_of(item: pytest.Item) -> str:
    """The case of a test; one that leaves out world sizes has a case for each of its other parameters only."""
    assert isinstance(item, pytest.Function)
    leaves_out = item.get_closest_marker("ranks") or _may_skip(item.function)
    return re.sub(r"\d ranks", "", item.nodeid) if leaves_out else item.nodeid


def _may_skip(function: Callable[..., object]) -> bool:
    return _names_skip(inspect.unwrap(function).__code__)


def _names_skip(code: CodeType) -> bool:
    """Whether the code, or that of a function within it, calls ``pytest.skip``."""
    return "skip" in code.co_names or any(
        _names_skip(inner) for inner in code.co_consts if isinstance(inner, CodeType)
    )
