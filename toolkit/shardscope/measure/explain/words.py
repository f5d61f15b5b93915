"""Sentences of an explanation: the loss as measured, the predicted effect of a change, and its measured effect."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean

from shardscope.measure.compare.measured import COMMUNICATION
from shardscope.measure.explain.changes import Change, Remedy
from shardscope.measure.explain.losses import Cause, Loss, MeasuredStep, losses
from shardscope.measure.pipeline_waits import schedule_bubble
from shardscope.runlog.axes import axis_of
from shardscope.spec import Job
from shardscope.spec.settings import differing, settings_of, value_text, words_of
from shardscope.spec.units import duration_text, faster_text, figure, listed, plural

Spread = tuple[float, float]
_VISIBLE = 0.01
"""Smallest fraction of a step that is mentioned beside another."""

_LOSSES = {
    "communication": "Communication takes {share}{hidden}: {sent} per rank over {link}{axes}.",
    "server": "Communication takes {share}: rank {rank} ({role}) sends {sent}, {more} as much as each other rank.",
    "straggler": "Ranks wait {share} for rank {rank}, which computes {longer} as long as {others}.",
    "shared cores": "Ranks wait {share} for each other: {world_size} ranks take turns on {cores} cores.",
    "uneven steps": "Ranks wait {share} for each other: in each step, a different rank is the slowest.",
    "small operations": "Launching small operations, rather than computing them, takes {share}.",
    "data": "Reading data takes {share}.",
    "idle": "For {share}, no rank computes, communicates or reads data: other code or other programs are running.",
}
_IN_PIPELINE: dict[Cause, str] = {
    "pipeline bubble": "in the bubble of {stages} stages and {micro}",
    "uneven stages": "for stages of unequal cost",
    "shared cores": "for messages or one of {cores} cores",
    "uneven steps": "for messages or other programs",
}
"""Causes of waiting in a pipeline; their shares add up to all of it."""
_IN_VERDICT: dict[Cause, str] = {
    "pipeline bubble": "in the bubble",
    "uneven stages": "for stages of unequal cost",
    "shared cores": "for messages or a free core",
    "uneven steps": "for messages or other programs",
}
"""Causes of waiting in a pipeline, in a sentence on two runs."""
_SUBJECTS: dict[Cause, str] = {
    "communication": "Communication takes",
    "server": "Communication takes",
    "straggler": "Ranks wait for each other",
    "shared cores": "Ranks wait for each other",
    "uneven steps": "Ranks wait for each other",
    "small operations": "Launching small operations takes",
    "data": "Reading data takes",
}
_MOSTLY = 0.7
"""Fraction of a step spent computing above which there is little to gain."""
_NO_REMEDY = {
    "uneven stages": "Give the pipeline's split as numbers of layers.",
    "data": "Keep the data in memory, or prepare it before the run.",
    "straggler": "Free the processor of that rank.",
    "uneven steps": "Close other programs that use this machine's processor.",
    "shared cores": "Use a machine with one core for each rank.",
    "idle": "Look for code between the passes, such as logging, and close other programs.",
}
_NOTHING_PAYS = "No change to the job is predicted to make it faster."


def nothing(share: float) -> str:
    """Return the sentence for a run without a loss; `share` is the fraction of the step that ranks spend computing."""
    end = ": there is little to gain" if share >= _MOSTLY else ""
    return f"{share:.0%} of the step is computation. No other cost exceeds a tenth of it{end}."


def loss_text(found: Sequence[Loss], step: MeasuredStep, job: Job, *, cores: int) -> str:
    """Return the sentence that names the largest loss with its measured numbers.

    Args:
        found: All losses, largest first.
        step: The measured step.
        job: The run's job.
        cores: Number of CPU cores of this machine.
    """
    loss = found[0]
    sent = step.sent_bytes[loss.rank] if step.sent_bytes else 0.0
    if step.pipeline is not None and loss.cause in _IN_PIPELINE:
        return _pipeline_text(found, step, job, cores)
    return _LOSSES[loss.cause].format(
        share=f"{loss.share:.0%} of the step",
        hidden=_hidden(loss, step),
        rank=loss.rank,
        sent=figure(sent, "bytes"),
        link=_link(step, job),
        axes=_axes(step, loss.rank),
        role=step.roles[loss.rank] if step.roles else "",
        more=_relative(step.sent_bytes, loss.rank),
        longer=_longer(step, loss.rank),
        others=_others(step),
        world_size=job.world_size,
        cores=cores,
    )


def _hidden(loss: Loss, step: MeasuredStep) -> str:
    """Return a clause on the part of the communication during which ranks also compute; empty if there is none."""
    both = min(step.hidden, default=0.0) / step.seconds
    if both < _VISIBLE:
        return ""
    part = "all of it" if both > loss.share - _VISIBLE else f"{both:.0%}"
    return f", {part} while ranks also compute"


def _longer(step: MeasuredStep, rank: int) -> str:
    """Return how many times longer than the other ranks a rank computes: what its alarm says, if it has one."""
    named = step.straggler
    return _relative(step.computed, rank) if named is None else f"{named.value:.2g} times"


def _others(step: MeasuredStep) -> str:
    return "the other" if len(step.computed) == 2 else "the others"


def _link(step: MeasuredStep, job: Job) -> str:
    if job.link is not None:
        return f"a link of {job.link.label}"
    return f"the links of {step.cluster}" if step.cluster else "this machine's own link"


def _axes(step: MeasuredStep, rank: int) -> str:
    """Return a clause on the axis of a mesh on which a rank communicates longest; empty if its ranks have one axis."""
    found: dict[str, float] = {}
    for (lane, name), seconds in step.parts[rank].items():
        if lane == COMMUNICATION and (axis := axis_of(name)):
            found[axis] = found.get(axis, 0.0) + seconds
    if not sum(found.values()):
        return ""
    axis = max(found, key=lambda axis: found[axis])
    return f", {found[axis] / sum(found.values()):.0%} of the time along the {axis} axis"


def _pipeline_text(found: Sequence[Loss], step: MeasuredStep, job: Job, cores: int) -> str:
    """Return the sentence on the waiting in a pipeline, with its parts, which add up to it."""
    stages = job.world_size * getattr(job.strategy, "stages_per_rank", 1)
    names = {
        cause: name.format(cores=cores, stages=stages, micro=_micro(job.num_micro_batches))
        for cause, name in _IN_PIPELINE.items()
    }
    if step.straggler is not None:
        rank = step.straggler.rank
        names["uneven stages"] += f" (rank {rank} computes {_longer(step, rank)} as long as {_others(step)})"
    waits = _waits(found)
    parts = ", ".join(f"{percent}% {names[cause]}" for cause, percent in waits.items())
    return f"Ranks wait {sum(waits.values())}% of the time (mean over ranks): {parts}."


def _waits(found: Sequence[Loss]) -> dict[Cause, int]:
    """Return the waiting in a pipeline by cause, in percent that add up to the whole; without causes below 1%."""
    shares = {cause: loss.share for cause in _IN_PIPELINE for loss in found if loss.cause == cause}
    ends = [0, *(round(100 * end) for end in accumulate(shares.values()))]
    percents = zip(shares, (end - start for start, end in pairwise(ends)), strict=True)
    return {cause: percent for cause, percent in percents if percent}


def remedy_text(loss: Loss, remedy: Remedy | None, job: Job) -> str:
    """Return the sentence on the change, with its predicted effect; advice if there is no such change."""
    if remedy is None:
        return _NO_REMEDY.get(loss.cause, _NOTHING_PAYS)
    what = changed_text(remedy.job, job)
    faster = f"{remedy.speed_up:.2g} times the samples per second"
    now, then = schedule_bubble(job), schedule_bubble(remedy.job)
    if loss.cause == "pipeline bubble" and now is not None and then is not None:
        return f"{what} would take the bubble from {now:.0%} to {then:.0%}; predicted: {faster}."
    is_other_training = (
        remedy.job.batch.global_batch != job.batch.global_batch or remedy.job.compression != job.compression
    )
    caveat = "; the effect on the loss is not predicted" if is_other_training else ""
    return f"Predicted with {what[0].lower()}{what[1:]}: {faster}{caveat}."


def untried_text(loss: Loss, change: Change, job: Job) -> str:
    """Return the sentence on a change whose effect is not predicted, after what else can be done."""
    what = changed_text(job.replace(**change, name=None), job)
    first = f"{_NO_REMEDY[loss.cause]} " if loss.cause == "straggler" else ""
    return f"{first}{what} may help; how much is not predicted."


def second_text(found: Sequence[Loss], loss: Loss, change: Change, job: Job) -> str:
    """Return the sentence on a loss that is not the largest, with a change that may reduce it.

    Args:
        found: All losses; the share of one in a pipeline is that of the sentence on all waiting.
        loss: The loss.
        change: The change.
        job: The run's job.
    """
    is_rank = loss.cause == "straggler"
    what = f"Waiting for rank {loss.rank}" if is_rank else "Stages of unequal cost"
    share = f"{loss.share:.0%}" if is_rank else f"{_waits(found).get(loss.cause, 0)}%"
    return f"{what}: {share}. {untried_text(loss, change, job)}"


def speed_text(
    what: str,
    speed_up: float,
    predicted: float | None,
    spreads: tuple[Spread | None, Spread | None] = (None, None),
    more_samples: float = 1.0,
) -> str:
    """Return the sentence on how much faster or slower a change has made a run.

    Args:
        what: The change in words.
        speed_up: Measured samples per second after the change, relative to those before.
        predicted: Predicted value of `speed_up`; None if unknown.
        spreads: First and third quartile of the step times in seconds, before and after the change. If they overlap
            for equally many samples, the sentence calls the difference noise. None if unknown.
        more_samples: Samples of a step after the change, relative to those before.
    """
    found = f"Speed: {faster_text(speed_up)} with {what[0].lower()}{what[1:]}"
    told = [] if predicted is None else [f"predicted: {faster_text(predicted)}"]
    before, after = spreads
    is_noise = (
        before
        and after
        and max(before[0] * more_samples, after[0]) <= min(before[1] * more_samples, after[1])
    )
    if before and after and is_noise:
        then, now = (f"{duration_text(low)} to {duration_text(high)}" for low, high in (before, after))
        samples = "" if more_samples == 1 else f", with {more_samples:.2g} times the samples"
        noise = f"the middle half of the steps took {then} before and {now} now{samples}"
        return f"{found}, within the noise ({'; '.join([noise, *told])}); repeat both runs with nothing else running."
    return f"{found} (samples per second{''.join(f'; {each}' for each in told)})."


def split_text(now: Sequence[int], before: Sequence[int]) -> str:
    """Return the sentence on pipelines that split their layers differently; empty if they do not, or if unknown."""
    if not now or not before or now == before:
        return ""
    here, there = (", ".join(map(str, split)) for split in (now, before))
    return f" Its stages have {here} layers, and {there} before."


def loss_change_text(loss: Loss, before: MeasuredStep, after: MeasuredStep) -> str:
    """Return the sentence on how a change affected the largest loss; empty if the loss cannot be compared."""
    if before.pipeline is not None and after.pipeline is not None:
        old, new = (_waits(losses(step)) for step in (before, after))
        if not old and not new:
            return ""
        parts = ", ".join(
            f"{new.get(cause, 0)}% {what} ({old.get(cause, 0)}% before)"
            for cause, what in _IN_VERDICT.items()
            if cause in old or cause in new
        )
        return f"Ranks wait {sum(new.values())}% of the time, {sum(old.values())}% before: {parts}."
    subject = _SUBJECTS.get(loss.cause)
    now = next((each.share for each in losses(after) if _SUBJECTS.get(each.cause) == subject), None)
    return (
        "" if subject is None or now is None else f"{subject} {now:.0%} of the step, {loss.share:.0%} before."
    )


def changed_text(then: Job, job: Job) -> str:
    """Return the change from `job` to `then` as text, such as ``16 micro-batches instead of 4``."""
    batch = _batch_text(then, job)
    if batch:
        return batch
    if then.compression != job.compression:
        return f"Gradients compressed by {then.compression.label}"
    if then.strategy != job.strategy:
        return _strategy_text(then, job)
    if then.world_size != job.world_size:
        return f"{plural(then.world_size, 'rank')} instead of {job.world_size}"
    return "The change"


def _strategy_text(then: Job, job: Job) -> str:
    """Return the change of the strategy in words."""
    if then.strategy.label != job.strategy.label:
        return f"Strategy {then.strategy.label}"
    now, before = settings_of(then), settings_of(job)
    names = [name for name in differing([now, before]) if name.startswith("strategy.")]
    if names == ["strategy.split"]:
        here, there = (value_text("strategy.split", each["strategy.split"]) for each in (now, before))
        return f"Layers split by {here} instead of {there}"
    parts = listed(
        f"{words_of(name, now[name])} instead of {value_text(name, before[name])}" for name in names
    )
    return f"{parts[0].upper()}{parts[1:]}"


def _batch_text(then: Job, job: Job) -> str:
    """Return the change of the batch in words; empty if the batch is the same."""
    if then.batch.global_batch != job.batch.global_batch:
        return f"A global batch of {then.batch.global_batch} instead of {job.batch.global_batch}"
    if then.batch.shares != job.batch.shares:
        return "The batch divided by measured speed"
    if then.num_micro_batches != job.num_micro_batches:
        return f"{_micro(then.num_micro_batches).capitalize()} instead of {job.num_micro_batches}"
    return ""


def _micro(count: int) -> str:
    return f"{count} micro-batch{'es' * (count != 1)}"


def _relative(values: Sequence[float], rank: int) -> str:
    """Return how many times larger the value of one rank is than the mean of the other ranks."""
    others = [each for place, each in enumerate(values) if place != rank]
    return f"{values[rank] / fmean(others):.2g} times" if any(others) else "many times"
