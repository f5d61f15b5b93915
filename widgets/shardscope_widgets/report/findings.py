"""The findings of a report in sentences: what was tried, agreement with one process, speed and memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from shardscope.machine import usable_cores
from shardscope.measure.accuracy import accuracy_of
from shardscope.runlog.figures import figure_text
from shardscope.runtime import Run
from shardscope.runtime.record.status import Cause
from shardscope_widgets.figures._memory_kinds import KIND_NAMES
from shardscope_widgets.report.entries import Entry, Group
from shardscope_widgets.trace import Source
from shardscope_widgets.words import bytes_text, duration_text, listed, plural, rate_text, three_digits

_LEVEL = 0.05
"""Relative difference in speed below which two runs count as equally fast."""
_NUMBERS = (
    "none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip


def tried_text(groups: Sequence[Group]) -> str:
    """Summarise what was tried: how many runs, of which workloads, on how many ranks."""
    entries = [entry for group in groups for entry in group.entries]
    ranks = sorted({entry.trace.world_size for entry in entries})
    sizes = ["1 process" if size == 1 else f"{size} ranks" for size in ranks]
    cut = [
        f" {each.label} is not complete: {each.run.reason}."
        for each in entries
        if isinstance(each.run, Run) and each.run.cause is Cause.RECORDING_STOPPED
    ]
    return (
        f"{plural(len(entries), 'run')} of {listed(group.name for group in groups)}, on {listed(sizes)}; each rank is "
        "a separate process."
    ) + "".join(cut)


def headline(groups: Sequence[Group]) -> list[str]:
    """Return at most four sentences: on predictions, on what was learned, on speed and on memory."""
    if not groups:
        return []
    main = groups[0]
    found = (
        accuracy_text([entry.run for group in groups for entry in group.entries]),
        agreement_text([entry for group in groups for entry in group.entries]) or lowest_loss_text(main),
        speed_text(main),
        memory_text(main),
    )  # the sections of the page give the details
    return [text for text in found if text]


def accuracy_text(runs: Sequence[Source]) -> str:
    """Return how many step times lie inside the prediction intervals made at launch; empty if there are none."""
    found = accuracy_of([run for run in runs if isinstance(run, Run)])
    return found.headline if found.coverage is not None else ""


def agreement_text(entries: Sequence[Entry]) -> str:
    """Return how many strategies match the losses of one process, and which do not; empty without a single process."""
    judged = [entry for entry in entries if entry.agrees is not None]
    if not judged:
        return ""
    labels = list(dict.fromkeys(entry.label for entry in judged))
    apart = [label for label in labels if any(not e.agrees for e in judged if e.label == label)]
    largest = max((e.difference or 0.0 for e in judged if e.label not in apart), default=0.0)
    equal = len(labels) - len(apart)
    rounding = f": their losses agree to within rounding ({largest:.0e})" if largest else ""
    text = f"{_who(labels, equal, _kind(judged))} learned the same as one process{rounding if equal else ''}."
    return " ".join([text, *_exceptions([e for e in judged if e.label in apart])])


def differences_text(entries: Sequence[Entry]) -> str:
    """Return how far the losses are from those of one process, in numbers; empty without a single process."""
    judged = [entry for entry in entries if entry.difference is not None]
    apart = [f"those of {entry.label} {_widest_text(entry)}" for entry in judged if not entry.agrees]
    same = max((entry.difference or 0.0 for entry in judged if entry.agrees), default=None)
    if same == 0:
        if not apart:
            return "All losses are equal to those of one process."
        apart.append("all others are equal")
    elif same is not None:
        apart.append(f"{'those of all others' if apart else 'all'} by at most {same:.0e}")
    return f"Losses differ from those of one process: {'; '.join(apart)}." if apart else ""


def _widest_text(entry: Entry) -> str:
    step, loss, theirs = entry.widest or (0, math.nan, math.nan)
    return f"most in step {step}, {figure_text('loss', loss)} instead of {figure_text('loss', theirs)}"


def _who(labels: Sequence[str], equal: int, kind: str) -> str:
    """Return the subject of the sentence, such as ``Nine of ten strategies``."""
    if len(labels) == 1:
        return labels[0] if equal else f"{labels[0]} has not"
    if equal == len(labels) == 2:
        return f"Both {_plural(kind)}"
    if equal == len(labels):
        return f"All {_number(equal)} {_plural(kind)}"
    return f"{_number(equal).capitalize()} of {_number(len(labels))} {_plural(kind)}"


def _kind(entries: Sequence[Entry]) -> str:
    """Return ``strategy`` if each label is the name of a strategy, else ``run``."""
    return "strategy" if all(entry.label == entry.run.job.strategy.label for entry in entries) else "run"


def _plural(kind: str) -> str:
    return "strategies" if kind == "strategy" else f"{kind}s"


def _number(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def _exceptions(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a sentence for each run whose losses differ by design, and one sentence for all other runs."""
    for label in dict.fromkeys(entry.label for entry in entries if entry.differs_because):
        reason = next(entry.differs_because for entry in entries if entry.label == label)
        yield f"By design, {label} differs: {reason}."
    others = dict.fromkeys(entry.label for entry in entries if not entry.differs_because)
    if others:
        yield f"{listed(others)} should agree but {_does(others)} not: ss.check(job) finds out where."


def _does(labels: Collection[str]) -> str:
    return "does" if len(labels) == 1 else "do"


def lowest_loss_text(group: Group) -> str:
    """Return which of the longest runs of a group ended at the lowest loss; empty if only one of them has a loss."""
    longest = max((entry.row.last_step for entry in group.entries), default=0)
    known = [
        entry for entry in group.entries if entry.row.loss is not None and entry.row.last_step == longest
    ]
    if len(known) < 2:
        return ""
    first, *_, last = sorted(known, key=lambda entry: entry.row.loss or 0.0)
    lowest, highest = (figure_text("loss", entry.row.loss) for entry in (first, last))
    return (
        f"On {group.name}, {first.label} ends at the lowest loss, {lowest} (step {first.row.last_step}); "
        f"the highest is {highest}, {last.label}."
    )


def speed_text(group: Group) -> str:
    """Return which run of a group is fastest, compared with one process, and why; empty if there is nothing to compare.

    Runs whose losses disagree with one process count only if all of them disagree. The reason is computed from the
    recorded spans of the fastest run on several ranks.
    """
    timed = [entry for entry in group.parallel if entry.row.per_second]
    known = [entry for entry in timed if entry.agrees is not False] or timed
    if not known:
        return ""
    best = max(known, key=lambda entry: entry.row.per_second or 0.0)
    ranks, training = plural(best.trace.world_size, "rank"), f"Training {group.name}"
    if group.alone is None or not best.row.speed:
        rate = rate_text(best.row.per_second or 0.0, best.row.counted)
        if len(known) < 2:
            return ""
        return f"{training} on several ranks, {best.label} is the fastest, with {rate} on {ranks}."
    if best.row.speed > 1 + _LEVEL:
        return (
            f"{training}, {best.label} is the fastest: {ranks} are {three_digits(best.row.speed)} times as fast as one "
            f"process."
        )
    who = f"no {_kind(known)} beats" if len(known) > 1 else f"{best.label} does not beat"
    fastest = f"the fastest, {best.label}," if len(known) > 1 else "it"
    share = f"{best.row.speed * 100:.0f} %"
    return f"{training}, {who} one process here{_because(best)}: {fastest} reaches {share} of its speed."


def _because(best: Entry) -> str:
    """Return why a run on several ranks is not faster than one process; empty if the run's data do not show it."""
    cores, ranks = max(1, int(_cores(best))), best.trace.world_size
    if ranks > cores:
        return f", because {ranks} ranks share {plural(cores, 'core')}"
    if (best.waiting_s or 0.0) > (best.computing_s or 0.0):
        return ", because its ranks send and wait for longer than they compute"
    return ""


def step_text(group: Group) -> str:
    """Return how long a rank of the fastest run on several ranks computes and waits in a step; empty if unknown."""
    known = [entry for entry in group.parallel if entry.row.per_second and entry.computing_s is not None]
    if not known:
        return ""
    best = max(known, key=lambda entry: entry.row.per_second or 0.0)
    text = (
        f"In a step of {best.label}, a rank computes for {duration_text(best.computing_s or 0.0)} and sends or waits "
        f"for {duration_text(best.waiting_s or 0.0)}"
    )
    alone = group.alone.computing_s if group.alone is not None else None
    return f"{text}; one process computes for {duration_text(alone)}." if alone else f"{text}."


def _cores(entry: Entry) -> float:
    """Return the cores that the run could use, as recorded at its launch; this machine's cores if unknown."""
    provenance = getattr(entry.run, "provenance", None)
    cores = provenance.machine.get("cores") if provenance is not None else None
    return float(cores) if isinstance(cores, int | float) else usable_cores()


def memory_text(group: Group) -> str:
    """Return which run of a group has the lowest peak memory per rank; empty without a single process."""
    least, alone = _least(group), group.alone
    if least is None or alone is None:
        return ""
    return (
        f"{least.label} needs the least memory for {group.name}: its peak memory per rank is "
        f"{bytes_text(least.row.held_bytes or 0)}, instead of {bytes_text(alone.row.held_bytes or 0)} on one process."
    )


def saving_text(group: Group) -> str:
    """Return which type of memory shrinks most in the run that needs least memory; empty without a single process."""
    least, alone = _least(group), group.alone
    if least is None or alone is None:
        return ""
    saved = {kind: count - least.held.get(kind, 0) for kind, count in alone.held.items()}
    most = max(saved, key=lambda kind: saved[kind])
    return (
        f"Most of the memory that {least.label} saves is {KIND_NAMES.get(most, most)}: "
        f"{bytes_text(least.held.get(most, 0))} instead of {bytes_text(alone.held[most])}."
    )


def _least(group: Group) -> Entry | None:
    """Return the run on several ranks with the lowest peak memory per rank; None if one process needs no more."""
    known = [entry for entry in group.parallel if entry.row.held_bytes]
    most = None if group.alone is None else group.alone.row.held_bytes
    if not known or not most:
        return None
    least = min(known, key=lambda entry: entry.row.held_bytes or 0)
    return least if (least.row.held_bytes or 0) < most else None
