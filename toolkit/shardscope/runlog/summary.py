"""Summary of a run in about a dozen numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardscope.runlog.reducer import RunLog
from shardscope.runlog.steps import Step
from shardscope.runlog.traffic import Event
from shardscope.spec import Job

_TOO_FAST = (
    "messages cannot be held back precisely on a link above 5 Gbit/s: copying them through this machine takes about as "
    "long as sending them would, so the run was slower than on a real one"
)


@dataclass(frozen=True)
class Summary:
    """Summary of a run. A field is None if the run did not get that far, or if the field does not apply.

    Attributes:
        state: State of the run.
        strategy: Name of the strategy.
        world_size: Number of ranks that have started.
        steps: Number of optimizer steps that all ranks finished in this run.
        last_step: Number of the last of them; a resumed run does not start at 1.
        loss: Mean training loss over all ranks at the last step.
        samples_per_s: Samples of all ranks per second, at `step_time_s`.
        tokens_per_s: Tokens of all ranks per second; None if the model does not read tokens.
        test_loss: Loss on the test split, which is evaluated once, after the job's last step. Runs from earlier
            versions also evaluated it during training and have no validation split; for them, this is the last
            evaluation.
        test_accuracy: Fraction of correct answers on the test split; None for regressions.
        validation_loss: Loss of the last evaluation on the validation split, on which studies base their choices.
        validation_accuracy: Fraction of correct answers on the validation split; None for regressions.
        step_time_s: Time of a step on the slowest rank, in seconds: the median over steps, without warm-up. If steps
            differ (local SGD, an uncompressed start), the medians of all kinds, weighted by frequency; None until each
            kind has occurred.
        bytes_per_step: Bytes sent by all ranks together per step: the mean, without warm-up, weighted as the step
            time. Here and in every other field, bytes are training traffic; `observing_bytes` is counted separately.
        peak_memory_bytes: Peak memory of the rank that used most.
        wall_s: Time from the first rank's start to the last event, in seconds.
        link: Emulated link between the ranks; None for the machine's own.
        link_note: Sentence on why measurements on this link are unreliable; None if they are reliable.
        compression: Compression of the gradients; this field and the next two are None without compression.
        uncompressed_bytes_per_step: Bytes that all ranks together would send per step without compression, by formula.
        codec_s_per_step: Time of packing and unpacking on the slowest rank, in seconds (mean, as for bytes). It is part
            of the step time, or overlaps the backward pass.
        observing_bytes: Bytes sent by all ranks in the whole run for evaluations, checkpoints and measurements
            (gradient noise scale, consensus distance of gossip). Older runs did not count checkpoint traffic.
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
    peak_memory_bytes: int | None
    wall_s: float | None
    test_loss: float | None = None
    test_accuracy: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    link: str | None = None
    link_note: str | None = None
    compression: str | None = None
    uncompressed_bytes_per_step: float | None = None
    codec_s_per_step: float | None = None
    observing_bytes: int = 0
    last_step: int = 0

    @property
    def bytes_ratio(self) -> float | None:
        """Compression ratio: uncompressed bytes per step, by formula, over bytes sent; None without compression."""
        if not self.uncompressed_bytes_per_step or not self.bytes_per_step:
            return None
        return self.uncompressed_bytes_per_step / self.bytes_per_step


def summarise(log: RunLog, state: str, job: Job | None = None) -> Summary:
    """Return the summary of a run from its reduced events.

    Args:
        log: The run's events so far, reduced.
        state: The state of the run.
        job: The run's job; None leaves out the fields on compression.
    """
    starts = log.starts
    start = starts[min(starts)] if starts else {}
    step, step_time = log.steps[-1] if log.steps else Step(0), log.step_time_s
    return Summary(
        state=state,
        strategy=start.get("strategy"),
        world_size=len(starts),
        steps=len(log.steps),
        last_step=log.last_step,
        loss=None if math.isnan(step.loss) else step.loss,
        step_time_s=step_time,
        samples_per_s=step.samples / step_time if step_time else None,
        tokens_per_s=step.tokens / step_time if step_time and step.tokens else None,
        bytes_per_step=log.bytes_per_step,
        peak_memory_bytes=log.peak_memory_bytes,
        wall_s=log.last_t - min(each["t"] for each in starts.values()) if starts else None,
        observing_bytes=log.observing.total(),
        **_quality(log, "test"),
        **_quality(log, "validation"),
        **_link(start),
        **(_compression(log, start, job) if job is not None and job.compression.is_on and starts else {}),
    )


def _quality(log: RunLog, split: str) -> dict[str, Any]:
    """Return the fields of a split: loss and accuracy of its last evaluation."""
    last = log.last_on(split)
    if last is None:
        return {}
    accuracy = None if math.isnan(last.accuracy) else last.accuracy
    return {f"{split}_loss": last.loss, f"{split}_accuracy": accuracy}


def _link(start: Event) -> dict[str, Any]:
    link = start.get("link")
    if link is None:
        return {}
    return {"link": link["label"], "link_note": None if link["is_accurate"] else _TOO_FAST}


def _compression(log: RunLog, start: Event, job: Job) -> dict[str, Any]:
    """Return the compression fields of the summary; the time is None if no step has finished."""
    return {
        "compression": job.compression.label,
        "uncompressed_bytes_per_step": job.strategy.exchanged_bytes(
            start["gradient_bytes"], job.world_size, micro_batches=job.num_micro_batches
        ),
        "codec_s_per_step": log.per_step("codec_s"),
    }
