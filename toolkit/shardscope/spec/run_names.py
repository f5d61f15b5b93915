"""Names and styles that tell the runs in one plot or table apart, based on the differences between their jobs.

The functions are pure: the same list of jobs always gives the same names, in the legend, the table and the hover text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from shardscope.spec import registry
from shardscope.spec.job import Job
from shardscope.spec.look import DASHES
from shardscope.spec.settings import Settings, differing, is_off, settings_of, words_of
from shardscope.spec.strategy import Strategy

COLOURS = ("#2a78b8", "#e0861a", "#159a72", "#c667a3", "#8a6fd6", "#d1542b", "#4aa8d8", "#93902a")
"""Colours of runs whose strategies do not tell them apart, after Okabe and Ito (2008), for light and dark pages."""
SPARE_COLOURS = ("#11997a", "#b866a6", "#c49a0c", "#5f6fd6", "#4fb3bf", "#a35a3a")
"""Colours of strategies that are not registered."""
_MOST_OF_A_STRATEGY = 2
"""Maximum number of runs per strategy that one colour per strategy, with two dashes, can distinguish."""
MOST_PARTS = 3
"""Maximum number of differing settings that a name lists in full; with more, only those that distinguish the runs are
listed."""


class RunLook(NamedTuple):
    """Colour of a run, and the index of its dash and pattern in their lists, so that colour is never the only cue."""

    colour: str
    place: int


def run_names(jobs: Sequence[Job]) -> list[str]:
    """Return a short name for each of the jobs shown together, made of the settings in which they differ.

    A job keeps the name that its user gave it if no other job has it. A job shown alone has its own label. Equal jobs
    are numbered.

    Example:
        >>> jobs = [Job(model="mlp", data="digits", optimizer={"name": "adamw", "lr": lr}) for lr in (0.1, 0.01)]
        >>> run_names(jobs)
        ['lr 0.1', 'lr 0.01']
    """
    given = [job.name for job in jobs]
    names = [name or "" for name in given]
    for shared in dict.fromkeys(given):
        alike = [index for index, name in enumerate(given) if name == shared]
        if shared is None or len(alike) > 1:
            for index, name in zip(alike, _by_difference([jobs[index] for index in alike]), strict=True):
                names[index] = f"{shared}, {name}" if shared and name != shared else name
    return _numbered(names)


def _by_difference(jobs: Sequence[Job]) -> list[str]:
    tables = [settings_of(job) for job in jobs]
    names = differing(tables)
    if not names:
        return [job.label for job in jobs]
    parts = _needed(tables, names) if len(names) > MOST_PARTS else [names] * len(jobs)
    return [_joined(table, own) or job.label for table, own, job in zip(tables, parts, jobs, strict=True)]


def _needed(tables: Sequence[Settings], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return for each job the settings that identify it; a setting is added only where it splits a group of jobs.

    Compression is always named if it differs: a name that says nothing of it reads as that of an uncompressed run.
    """
    parts: list[tuple[str, ...]] = [()] * len(tables)
    groups = [list(range(len(tables)))]
    for name in names:
        finer: list[list[int]] = []
        for group in groups:
            split: dict[str, list[int]] = {}
            for index in group:
                split.setdefault(repr(tables[index].get(name)), []).append(index)
            if len(split) > 1 or name == "compression":
                for index in group:
                    parts[index] = (*parts[index], name)
            finer += split.values()
        groups = finer
    return parts


def _joined(table: Settings, names: Sequence[str]) -> str:
    """Join the texts of these settings, without settings that are switched off, unless all are."""
    known = [(name, table[name]) for name in names if name in table]
    alone = "strategy" in names and table.get("world_size") == 1
    words = [
        words_of(*each) for each in known if not is_off(*each) and not (alone and each[0] == "world_size")
    ]
    return " · ".join(words or [words_of(*each) for each in known])


def _numbered(names: Sequence[str]) -> list[str]:
    """Number repeated names: ``ring-mlp``, ``ring-mlp (2)``."""
    numbered: list[str] = []
    for place, name in enumerate(names):
        choices = (f"{name} ({number})" for number in count(2))
        taken = {*numbered, *names[place + 1 :]}
        numbered.append(name if name not in numbered else next(each for each in choices if each not in taken))
    return numbered


def shared_words(jobs: Sequence[Job]) -> str:
    """Return the settings that all jobs share, for the title of a plot: ``gpt-nano on python-source, ring, 2 ranks``.

    Model and data that differ are left out.
    """
    tables = [settings_of(job) for job in jobs]
    apart, first = {*differing(tables)}, tables[0]
    words = [
        words_of(name, first[name]) for name in ("strategy", "world_size", "optimizer") if name not in apart
    ]
    task = [] if apart & {"model", "data"} else [f"{first['model']} on {first['data']}"]
    return ", ".join([*task, *words])


def strategy_colour(strategy: str) -> str:
    """Return the colour of a strategy; an unknown strategy gets a spare colour that depends only on its name."""
    method = registry.find(Strategy, strategy)
    return method.look.colour if method else SPARE_COLOURS[sum(map(ord, strategy)) % len(SPARE_COLOURS)]


def run_looks(strategies: Sequence[str], kept: Sequence[RunLook | None] = ()) -> list[RunLook]:
    """Return a colour and a dash for each run of a plot, given the strategy of each.

    A run that is already shown keeps its look, and a new run gets a look that is not in use. If the strategy tells the
    runs apart (at most two runs per strategy), a run has the colour of its strategy, and the second run of a strategy
    has another dash. Otherwise, each run has its own colour and dash.

    Args:
        strategies: Strategy of each run.
        kept: Look of each run that is already shown, None for a new run; empty if all runs are new.

    Example:
        >>> [look.place for look in run_looks(["ring", "ring", "ring"])]
        [0, 1, 2]
    """
    if any(kept):
        return _beside(strategies, kept)
    most = max(map(strategies.count, strategies), default=0)
    if len(strategies) == 1 or (most <= _MOST_OF_A_STRATEGY and len({*strategies}) > 1):
        return _by_strategy(strategies)
    return [RunLook(COLOURS[place % len(COLOURS)], place % len(DASHES)) for place in range(len(strategies))]


def _beside(strategies: Sequence[str], kept: Sequence[RunLook | None]) -> list[RunLook]:
    looks = list(kept)
    own = [RunLook(colour, place % len(DASHES)) for place, colour in enumerate(COLOURS)]
    for index, wanted in enumerate(run_looks(strategies)):
        if looks[index] is None:
            others = [look for look in looks if look is not None]
            colours, places = {look.colour for look in others}, {look.place for look in others}
            free = [look for look in (wanted, *own) if look.colour not in colours]
            looks[index] = next((look for look in free if look.place not in places), (*free, wanted)[0])
    return [look for look in looks if look is not None]


def _by_strategy(strategies: Sequence[str]) -> list[RunLook]:
    looks, seen = [], dict[str, int]()
    for strategy in strategies:
        method = registry.find(Strategy, strategy)
        first = DASHES.index(method.look.dash) if method else 3
        seen[strategy] = place = seen.get(strategy, first - 1) + 1
        looks.append(RunLook(strategy_colour(strategy), place % len(DASHES)))
    return looks
