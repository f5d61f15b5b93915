"""Summary of a run in about a dozen numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from shardscope.runlog.files import is_real, is_whole
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.resizes import sizes_text
from shardscope.runlog.schema import Event
from shardscope.runlog.steps import Step
from shardscope.spec import Job
from shardscope.spec.units import duration_text

_TOO_FAST_NOTE = (
    "a link above 5 Gbit/s cannot be emulated precisely: copying a message within this machine takes about as long as "
    "such a link needs to transfer it, so the run was slower than on a real link"
)

_NOTEWORTHY = 0.01
"""Maximum delay of emulated computation, as a fraction of a step, that the summary does not report."""
_LATE_NOTE = (
    "computation was late by {late} per step, because this machine is too slow or too busy to emulate "
    "such a fast processor; state fewer FLOP/s, or use fewer ranks"
)


@dataclass(frozen=True)
class Summary:
    """Summary of a run. A field is None if it does not apply or cannot be computed yet.

    Attributes:
        state: State of the run.
        strategy: Name of the strategy.
        world_size: Number of ranks that have started; after a resize, the new number. Averages per step and
            figures of memory are then those since the resize.
        world_sizes: All numbers of ranks in order, such as ``2 → 4 → 3``; None if the run was not resized.
        resize_s: Time in which no rank trained because the number of ranks was changed, in seconds, without restarts
            that continued with fewer ranks after a failure; None without a resize.
        steps: Number of optimizer steps that all ranks finished in this run.
        last_step: Number of the last finished step, which is larger than `steps` in a resumed run.
        loss: Training loss of the last finished step, averaged over ranks.
        loss_mean: Training loss, averaged over ranks and over the last `figures.LOSS_WINDOW` finished steps.
        diverged_at: Step at which the loss diverged (see `divergence`): the first from which it stayed far
            above its initial value, or the one at which it exploded without recovering. None if the loss has
            not diverged.
        samples_per_s: Samples processed by all ranks per second, computed from the last step and `step_time_s`.
        tokens_per_s: Tokens processed by all ranks per second; None if the model does not read tokens.
        test_loss: Loss on the test split, which is evaluated once, after the job's last step. Runs from earlier
            versions of Shardscope also evaluated the test split during training; for them, this is the last evaluation.
        test_accuracy: Fraction of correct predictions on the test split; None for regression.
        validation_loss: Loss in the last evaluation on the validation split, which studies use to compare trials.
        validation_accuracy: Fraction of correct predictions on the validation split; None for regression.
        step_time_s: Median duration of a step on the slowest rank, in seconds, without warm-up. If there are several
            kinds of steps (local SGD, an uncompressed start), their medians are weighted by frequency; None until each
            kind has occurred. With asynchronous workers, the mean time in which all together compute as many gradients
            as a step has.
        bytes_per_step: Mean number of bytes sent by all ranks together per step, without warm-up, weighted like
            `step_time_s`. Only training traffic is counted; see `observing_bytes` for the rest.
        held_bytes: Peak memory per rank: the most bytes that parameters, gradients, optimizer state, activations and
            buffers hold at one time on any rank, in the newest step that measured memory by type. The counterpart of
            `JobPrediction.held_bytes`.
        process_bytes: Peak memory of a rank's process, as counted by the operating system, less its memory before the
            model was built, on the rank with the highest peak; on a GPU, the peak of the memory that PyTorch has
            allocated.
        wall_s: Time from when the first rank was ready to train to the last event, in seconds.
        transport: Transport between the ranks: ``"shm"``, ``"cuda-ipc"`` or ``"tcp"``; None for a single rank, and for
            runs of earlier versions.
        transport_reason: Reason for the choice of that transport, as text.
        link: Emulated link between the ranks; None without emulation.
        link_note: Why measurements on this link are unreliable, or what is emulated in addition to the link, as a
            sentence; None if the link is emulated precisely, and nothing else is emulated.
        late_s_per_step: Mean time by which computation took longer than on the emulated processor, on the
            slowest rank, in seconds per step; None if no FLOP/s are emulated.
        compression: Compression of the gradients; this field and the next two are None without compression.
        uncompressed_bytes_per_step: Bytes that all ranks together would send per step without compression, by formula.
        codec_s_per_step: Mean time spent packing and unpacking on the slowest rank, in seconds per step. This time
            is part of the step time, unless it overlaps the backward pass.
        cache_hit_rate: Fraction of the opened shards that were already in the cache, from an earlier epoch or
            run or fetched by another rank; None without a cache.
        fetched_bytes: Bytes of data that all ranks read from a source that is cached or emulated; None if there is
            none.
        mfu: Model FLOPs utilization at `step_time_s`, by the formula of `JobPrediction.mfu` with the peak known at the
            launch; None if no step time was predicted then, or after a resize.
        link_utilization: Utilization of the busiest rank's link, by the formula of `JobPrediction.link_utilization`.
        loss_note: Why the loss may depend on how the batch is split into micro-batches and among ranks, and the remedy;
            None if there is no such reason.
        optimizer_note: Why a resumed run may train differently, if the optimizer could not be tried before the first
            step; None if there is no such reason.
        observing_bytes: Bytes sent by all ranks in the whole run for evaluations, checkpoints, measurements (gradient
            noise scale, consensus distance of gossip) and the numbers of targets in each step. Older runs did not count
            checkpoint traffic.
        straggler: Sentence on the rank that takes longer to compute than the other ranks, with the remedy; None if
            there is none in the newest steps.
        shares: Samples of each rank in a step, if divided by measured speed; otherwise None.
        dropped: Number of gradients that were discarded because other workers were faster (backup workers).
        expert_imbalance: Tokens of a layer's busiest expert relative to an even load, mean over layers and the newest
            steps; None for models without experts, as the next field.
        dropped_tokens: Fraction of the routed tokens that were dropped because their expert was full, in these steps.
        restarts: Number of times that the ranks were started again after a failure.
        lost_steps: Number of steps that all ranks had finished, and that restarts had to repeat.
        goodput: Fraction of `wall_s` spent in steps that count. The rest is setup, evaluations, checkpoints, restarts
            and steps that had to be repeated. The additional time of the first steps after a start is a cost of the
            start. Asynchronous workers with a budget each also lose the time in which some have finished and others
            have not.
    """

    state: str
    strategy: str | None
    world_size: int
    steps: int
    loss: float | None
    step_time_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    bytes_per_step: float | None
    process_bytes: int | None
    wall_s: float | None
    test_loss: float | None = None
    test_accuracy: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    transport: str | None = None
    transport_reason: str | None = None
    link: str | None = None
    link_note: str | None = None
    late_s_per_step: float | None = None
    compression: str | None = None
    uncompressed_bytes_per_step: float | None = None
    codec_s_per_step: float | None = None
    straggler: str | None = None
    shares: str | None = None
    dropped: int = 0
    observing_bytes: int = 0
    last_step: int = 0
    loss_mean: float | None = None
    diverged_at: int | None = None
    held_bytes: int | None = None
    world_sizes: str | None = None
    resize_s: float | None = None
    restarts: int = 0
    lost_steps: int = 0
    goodput: float | None = None
    cache_hit_rate: float | None = None
    fetched_bytes: int | None = None
    mfu: float | None = None
    link_utilization: float | None = None
    loss_note: str | None = None
    optimizer_note: str | None = None
    expert_imbalance: float | None = None
    dropped_tokens: float | None = None

    @property
    def bytes_ratio(self) -> float | None:
        """Compression ratio: `uncompressed_bytes_per_step` divided by `bytes_per_step`; None without compression."""
        if not self.uncompressed_bytes_per_step or not self.bytes_per_step:
            return None
        return self.uncompressed_bytes_per_step / self.bytes_per_step


def utilization(at_peak_s: float | None, step_time_s: float | None) -> float | None:
    """Return the fraction of a step that its work would take at peak rates; None if one of them is unknown."""
    return at_peak_s / step_time_s if at_peak_s and step_time_s else None


def summarise(log: RunLog, state: str, job: Job | None = None) -> Summary:
    """Return the summary of a run.

    Args:
        log: The run log, with the columns and totals of the run so far.
        state: State of the run.
        job: The run's job; without it, the fields about compression are None.
    """
    starts = log.starts
    start = starts[min(starts)] if starts else {}
    pauses = [each.pause_s for each in log.resizes if not each.is_failure]
    step, step_time = log.steps[-1] if log.steps else Step(0), log.step_time_s
    divergence, experts = log.divergence, log.experts.recent
    if job is not None and job.elastic is not None:
        job = job.at_size(log.world_size)
    return Summary(
        state=state,
        strategy=start.get("strategy"),
        world_size=log.world_size if log.resizes else len(starts),
        world_sizes=sizes_text(log.resizes),
        resize_s=sum(pauses) if pauses else None,
        steps=len(log.steps),
        last_step=log.last_step,
        loss=log.loss,
        loss_mean=log.loss_mean,
        diverged_at=None if divergence is None else divergence.step,
        step_time_s=step_time,
        samples_per_s=step.samples / step_time if step_time else None,
        tokens_per_s=step.tokens / step_time if step_time and step.tokens else None,
        bytes_per_step=log.bytes_per_step,
        held_bytes=log.held_bytes,
        process_bytes=log.process_bytes,
        wall_s=log.wall_s,
        restarts=len(log.restarts),
        lost_steps=log.lost_steps,
        goodput=log.goodput,
        mfu=None if log.resizes else utilization(log.at_peak.get("compute_s"), step_time),
        link_utilization=None if log.resizes else utilization(log.at_peak.get("sending_s"), step_time),
        observing_bytes=log.observing.total(),
        cache_hit_rate=log.epochs.hit_rate,
        fetched_bytes=log.epochs.fetched_bytes,
        straggler=None if log.straggler is None else log.straggler.text,
        shares=", ".join(map(str, log.shares)) or None,
        dropped=log.dropped,
        loss_note=log.loss_note,
        optimizer_note=log.optimizer_note,
        expert_imbalance=None if experts is None else experts.imbalance,
        dropped_tokens=None if experts is None else experts.dropped,
        **_quality(log, "test"),
        **_quality(log, "validation"),
        transport=start.get("transport"),
        transport_reason=start.get("transport_reason"),
        **_link(log, start),
        **(_compression(log, start, job) if job is not None and job.compression.is_on and starts else {}),
    )


def summary_from(stored: Any) -> Summary | None:
    """Return the summary in parsed JSON, which may be from an earlier version; None if it is not a summary.

    Fields that this version does not know are dropped, and values of the wrong type count as unknown.
    """
    if not isinstance(stored, dict) or not isinstance(stored.get("state"), str):
        return None
    counts = {name: stored[name] if is_whole(stored.get(name)) else 0 for name in _COUNTS}
    texts = {name: stored[name] if isinstance(stored.get(name), str) else None for name in _TEXTS}
    others = {field.name for field in fields(Summary)} - {"state", *_COUNTS, *_TEXTS}
    numbers = {name: stored[name] if is_real(stored.get(name)) else None for name in others}
    values: dict[str, Any] = {"state": stored["state"], **counts, **texts, **numbers}
    return Summary(**values)


_COUNTS = (
    "world_size", "steps", "last_step", "observing_bytes", "dropped", "restarts", "lost_steps",
)  # fmt: skip
_TEXTS = (
    "strategy", "world_sizes", "transport", "transport_reason", "link", "link_note", "compression", "straggler",
    "shares", "loss_note", "optimizer_note",
)  # fmt: skip


def _quality(log: RunLog, split: str) -> dict[str, Any]:
    """Return the summary's fields for one split: loss and accuracy in the last evaluation on the split."""
    last = log.last_on(split)
    if last is None:
        return {}
    accuracy = None if math.isnan(last.accuracy) else last.accuracy
    return {f"{split}_loss": last.loss, f"{split}_accuracy": accuracy}


def _link(log: RunLog, start: Event) -> dict[str, Any]:
    """Return the summary's fields on emulation: of the link, and of the processors."""
    link = start.get("link")
    if link is None:
        return {}
    notes = [link.get("note"), None if link["is_accurate"] else _TOO_FAST_NOTE]
    late, step_s = log.per_step("late_s") if link.get("paces_compute") else None, log.step_time_s
    if late and step_s and late > _NOTEWORTHY * step_s:
        notes.append(_LATE_NOTE.format(late=duration_text(late)))
    return {
        "link": link["label"],
        "link_note": "; ".join(filter(None, notes)) or None,
        "late_s_per_step": late,
    }


def _compression(log: RunLog, start: Event, job: Job) -> dict[str, Any]:
    """Return the summary's fields on compression; ``codec_s_per_step`` is None until a step has finished."""
    return {
        "compression": job.compression.label,
        "uncompressed_bytes_per_step": job.strategy.exchanged_bytes(
            start["gradient_bytes"], job.world_size, micro_batches=job.num_micro_batches
        ),
        "codec_s_per_step": log.per_step("codec_s"),
    }
