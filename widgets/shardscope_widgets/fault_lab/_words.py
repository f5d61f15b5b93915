"""Sentences on the effect of each button that breaks a run."""

from __future__ import annotations

import math
from typing import NamedTuple

from shardscope.spec import Job
from shardscope.spec.fault_kinds import AnyFault, Slow
from shardscope.spec.observed import ObservedJob
from shardscope_widgets.words import plural

NOT_RUNNING = (
    "This run has ended, so no faults can be injected. Launch a run, and inject faults here while it trains."
)
NO_RUN = "Launch a run, and inject faults here while it trains."
OBSERVED = "This run records a training script of your own (ss.observe), so no faults can be injected here."
OBSERVED_SIZE = "This run records a training script of your own (ss.observe), so it cannot be resized here."
_NO_RECOVERY = (
    "The run then fails, because its job has no recovery. To see a run recover, set Restarts and Checkpoint every "
    "before it starts."
)


class Standing(NamedTuple):
    """Progress of a run: its job, the last finished step, and the step of its newest checkpoint (0 if it has none)."""

    job: Job
    last_step: int
    saved: int


def when_text(step: int) -> str:
    """Return when a fault takes place: before `step`, or before the next step if `step` is 0."""
    return f"before step {step}" if step else "before its next step"


def kill_text(standing: Standing, rank: int, step: int) -> str:
    """Return sentences on what killing a rank does.

    Args:
        standing: Progress of the run.
        rank: The rank.
        step: The step before which the rank is killed; 0 for the next step.
    """
    job, saved = standing.job, standing.saved
    killed = f"The process of rank {rank} gets SIGKILL {when_text(step)}, as if its machine had lost power."
    if job.recovery is None:
        return f"{killed} {_NO_RECOVERY}"
    done, every = max(step or standing.last_step + 1, 1) - 1, job.checkpoint.every
    if isinstance(every, int) and done > standing.last_step:  # there will be newer checkpoints by then
        saved = max(saved, done - done % every)
    lost = max(0, done - saved)
    source = (
        f"from the checkpoint of step {saved}" if saved else "from the beginning, as there is no checkpoint"
    )
    return f"{killed} All ranks then continue {source}, and repeat {plural(lost, 'step')}."


def asked_text(fault: AnyFault, step: int) -> str:
    """Return a sentence on the fault that was requested.

    Args:
        fault: The fault.
        step: The chosen step; 0 for the next step, which may come after the fault's step by the time the ranks read the
            fault.
    """
    if step:
        return f"Requested: {fault.text}."
    if isinstance(fault, Slow):
        first, last = fault.steps
        lasts = f"for {plural(last - first + 1, 'step')}" if last is not None else "until the run ends"
        return f"Requested: {fault.who} computes {fault.factor:g} times slower {lasts}, starting with its next step."
    return f"Requested: {fault.text.replace(f'before step {fault.step}', when_text(0))}."


def slow_text(standing: Standing, rank: int, step: int, factor: float, num_steps: int) -> str:
    """Return sentences on what slowing a rank down does.

    Args:
        standing: Progress of the run.
        rank: The rank.
        step: The first slow step; 0 for the next step.
        factor: Factor by which the rank's compute time grows.
        num_steps: Number of slow steps.
    """
    begin = f"starting with step {step}" if step else "starting with its next step"
    slowed = f"Rank {rank} computes {factor:g} times slower for {plural(num_steps, 'step')}, {begin}."
    strategy, world_size = standing.job.strategy, standing.job.world_size
    if world_size == 1:
        return slowed
    drift, bound = strategy.drift(world_size), getattr(strategy, "bound", math.inf)
    if drift is None and math.isfinite(bound):
        stale = plural(int(bound), "update")
        how = f"the other ranks run ahead until its gradients are {stale} stale, and then wait for it"
    elif drift is None:
        how = "the other ranks do not wait for it"
    elif drift:
        how = f"the other ranks run up to {plural(drift, 'step')} ahead, and then wait for it"
    else:
        how = "all ranks wait for the slowest one in every step"
    return f"{slowed} With {strategy.label}, {how}."


def drop_text(node: int, step: int, seconds: float, timeout_s: float) -> str:
    """Return sentences on what dropping the link of a node does.

    Args:
        node: The node.
        step: The step before which the link is dropped; 0 for the next step.
        seconds: Duration of the drop, in seconds.
        timeout_s: Time that a rank waits for another rank, in seconds.
    """
    dropped = f"The link of node {node} carries no traffic for {seconds:g} s, starting {when_text(step)}."
    if seconds < timeout_s:
        return f"{dropped} The other ranks wait until its messages arrive again."
    return f"{dropped} That exceeds the timeout of {timeout_s:g} s, so the run fails or restarts."


def why_not_resized(job: Job | ObservedJob, *, is_alive: bool) -> str:
    """Return why a run cannot be resized; empty if it can."""
    if isinstance(job, ObservedJob):
        return OBSERVED_SIZE
    if job.elastic is None:
        return (
            f"The number of ranks of this run is fixed ({job.world_size}). To be able to resize a run, set Elastic "
            "(such as 2:4) before it starts."
        )
    return "" if is_alive else "This run has ended, so it cannot be resized."


def resize_text(job: Job, before: int, after: int) -> str:
    """Return sentences on what changing the number of ranks of a run of `job` from `before` to `after` does."""
    if before == after:
        return f"The run already has {plural(before, 'rank')}. Choose another number."
    in_memory = job.recovery is not None and job.recovery.replica_every is not None
    saved = "copy their state to memory" if in_memory else "save a checkpoint"
    return (
        f"After the step in progress, the {plural(before, 'rank')} {saved} and end; {plural(after, 'rank')} load this "
        "state and continue, so no step is lost."
    )
