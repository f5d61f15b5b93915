"""Texts of the lab: the state of a run, the description of a job before it starts, and error boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.errors import RunFailed, ShardscopeError
from shardscope.machine import usable_cores
from shardscope.measure.compare_runs.view import ADVICE, DIVERGED
from shardscope.runlog.figures import FIGURES, figure_text
from shardscope.runtime.record.status import Cause
from shardscope.spec import Job, Strategy, registry
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.models import MODELS
from shardscope.spec.settings import differing, heading_of, settings_of, value_text
from shardscope_widgets.figures._faults import faults_info, incident_text
from shardscope_widgets.kit.guard import problem_html
from shardscope_widgets.trace import Trace
from shardscope_widgets.training_lab._runbook import RunEntry, busy_load
from shardscope_widgets.words import count_text, duration_text, listed, plural, rate_text, safe

if TYPE_CHECKING:
    from shardscope.runlog.step_events import StepEvents

LEAST_STEPS = 6
"""Number of finished steps that a run needs before it is explained and compared with its predicted step time."""
_SLOW = 2.0
"""Ratio to the predicted step time above which the status calls a run slow, if there is no prediction interval."""


_FAR = 0.1
"""Relative difference of a step time from the predicted one, below it, for which a calibration is suggested."""


def plan_text(job: Job, cluster: EmulatedCluster | None = None) -> str:
    """Describe what the Start button would do: model size, samples per rank, micro-batches, and an emulated cluster."""
    micro = job.num_micro_batches
    parts = f" in {micro} micro-batches" if micro > 1 else ""
    size = f"{count_text(MODELS[job.model].num_params)} parameters. " if isinstance(job.model, str) else ""
    where = "" if cluster is None else f" Runs on {cluster.name}."
    return f"{size}{_share(job)} per step{parts}.{where}"


def _share(job: Job) -> str:
    share, among = plural(job.batch.per_rank(job.num_data_ranks), "sample"), job.num_data_ranks
    if shape := job.strategy.shape(job.world_size):
        axes = " × ".join(f"{axis} {ranks}" for axis, ranks in shape.items() if ranks > 1) or "one replica"
        each = "the replica" if among == 1 else f"each of the {among} replicas"
        return f"{job.world_size} ranks as {axes}: {each} processes {share}"
    if job.world_size == 1:
        return f"One process trains on {share}"
    if among == job.world_size:
        return f"Each of the {job.world_size} ranks processes {share}"
    if among == 1:
        return f"All {job.world_size} ranks work on the same {share}"
    return f"{among} of the {job.world_size} ranks process {share} each"


def ranks_text(
    entry: RunEntry, why_not: str, predicted_s: float | None = None, shown: StepEvents | None = None
) -> str:
    """Describe where a run's ranks run, and how its step time compares with the prediction.

    Args:
        entry: The run.
        why_not: Why this machine cannot emulate clusters; empty if it can.
        predicted_s: Predicted time of a step in seconds; None if unknown.
        shown: The measured step that is played; None if there is none.
    """
    ranks = plural(entry.trace.world_size, "real rank")
    if entry.cluster is not None:
        speed = entry.cluster.nodes[0].flops
        told = f"{ranks} on {entry.cluster.name}, emulated on this machine"
        told += "." if speed is None else ", so step times do not depend on what else the machine does."
    else:
        told = f"{ranks} directly on this machine, so step times depend on what else runs on it."
        told += f" This machine cannot emulate a cluster: {why_not}." if why_not else ""
    measured_s = entry.trace.step_time_s if len(entry.trace.steps) >= LEAST_STEPS else None
    if measured_s is None or not predicted_s:
        return told
    gap = measured_s / predicted_s - 1
    word = f"{abs(gap):.0%} {'longer' if gap > 0 else 'shorter'} than" if abs(gap) >= 0.005 else "as"
    took = f" The median step takes {duration_text(measured_s)}, {word} predicted"
    if shown is not None:
        took += f"; step {shown.step}, which is played here, took {duration_text(shown.step_time_s)}"
    return (
        f"{told}{took}.{uncalibrated_text(entry) if gap < -_FAR else ''}"  # the status says so of a slow run
    )


def strategy_text(name: str) -> str:
    """Return the first line of a strategy's docstring."""
    return (registry.require_known(Strategy, name).__doc__ or "").strip().partition("\n")[0]


def progress_text(entry: RunEntry) -> str:
    """Return the progress of a run: ``step 12 of 100, loss 2.3451``."""
    if not entry.last_step:
        return "no step finished yet" if entry.is_alive else "no step finished"
    return f"step {entry.run.job.progress(entry.last_step)}{_loss(entry)}"


def state_text(entry: RunEntry) -> str:
    """Return the state of a run in a few words: ``running, step 12 of 100, loss 2.3451``, ``completed, loss 2.3451``.

    A run whose loss has diverged has a mark, ``▲ diverged``.
    """
    mark = "" if entry.diverged_at is None else f", {DIVERGED} diverged"
    if not entry.last_step or entry.state == "completed":
        return f"{entry.state}{_loss(entry)}{mark}"
    return f"{entry.state}, {progress_text(entry)}{mark}"


def _loss(entry: RunEntry) -> str:
    return "" if entry.loss is None else f", {FIGURES['loss'].label} {figure_text('loss', entry.loss)}"


def straggler_text(trace: Trace) -> str:
    """Return a sentence on the straggler that other ranks wait for, with advice; empty if there is none."""
    found = trace.straggler
    return "" if found is None else f" {found.text[0].upper()}{found.text[1:]}."


def divergence_text(trace: Trace) -> str:
    """Return a sentence about a diverged loss, with advice; empty if the loss has not diverged."""
    found = trace.divergence
    return f" {DIVERGED} It {found.text}. {ADVICE}" if found is not None else ""


def status_text(entry: RunEntry | None, predicted_s: float | None = None) -> str:
    """Return the status line of a run; a prompt to start one if `entry` is None.

    Args:
        entry: The run.
        predicted_s: Predicted time of a step in seconds; None if unknown.
    """
    if entry is None:
        return "Ready. Press a button above, or choose a job and press Start."
    name, where = entry.trace.label, "" if entry.cluster is None else f" on {entry.cluster.name}"
    if entry.state == "starting" and not entry.trace.steps:
        return f"{name} is starting {plural(entry.trace.world_size, 'rank')}{where}."
    verbs = {"starting": "is running", "running": "is running", "completed": "has finished"}
    verb = verbs.get(entry.state) or ("was stopped" if entry.state == "stopped" else "has failed")
    if entry.state == "stopped" and entry.run.cause is Cause.RECORDING_STOPPED:
        verb = f"was recorded only in part ({entry.run.reason})"
    rate = _rate(entry.trace) if entry.is_alive else ""
    slow = _stop_text(entry) + _slow_text(entry, predicted_s)
    straggler = straggler_text(entry.trace)
    return (
        f"{name} {verb}{where}: {progress_text(entry)}{rate}.{_restart_text(entry.trace)}{slow}{straggler}"
        f"{divergence_text(entry.trace)}"
    )


def _restart_text(trace: Trace) -> str:
    """Return how often the run was restarted, and the consequence of the last failure; empty if no rank has failed."""
    if not trace.restarts:
        return ""
    count, last = len(trace.restarts), faults_info(trace).incidents[-1]
    return f" Restarted {'once' if count == 1 else f'{count} times'}. {incident_text(last)}"


def status_state(entry: RunEntry | None, predicted_s: float | None = None) -> str:
    """Return the state that colours the status; ``warning`` if a completed run was slow, diverged or had stragglers."""
    if entry is None or entry.state != "completed":
        return entry.state if entry else "idle"
    told = _slow_text(entry, predicted_s) + straggler_text(entry.trace) + divergence_text(entry.trace)
    return "warning" if told else entry.state


def _stop_text(entry: RunEntry) -> str:
    """Return a sentence on why a run was stopped; empty if it was not stopped, or if a user requested the stop."""
    if entry.state != "stopped":
        return ""
    if entry.run.cause is Cause.DRIVER_ENDED:
        return " It ended with the kernel or program that launched it."
    reason = entry.run.reason if entry.run.cause is not Cause.REQUESTED else None
    return f" Reason: {reason}." if reason else ""


def _slow_text(entry: RunEntry, predicted_s: float | None) -> str:
    """Return a sentence on steps that take far longer than predicted, with the machine's load; else empty."""
    measured_s = entry.trace.step_time_s if len(entry.trace.steps) >= LEAST_STEPS else None
    if not predicted_s or measured_s is None:
        return ""
    interval = entry.predicted.interval if entry.predicted else None
    if measured_s <= (interval.high if interval else _SLOW * predicted_s):
        return ""
    told = f" Slower than predicted: {duration_text(measured_s)} per step instead of {duration_text(predicted_s)}"
    num_ranks, is_alive = entry.trace.world_size, entry.is_alive
    recorded = entry.predicted.busy_load(num_ranks) if entry.predicted else 0.0
    load = busy_load(num_ranks) if is_alive else entry.busy_load or recorded
    if not load:
        return f"{told}.{uncalibrated_text(entry)}"
    keep = "keep" if is_alive else "kept"
    return (
        f"{told}. Other programs {keep} the machine busy: load {load:.0f} on {usable_cores():g} cores, including "
        f"{plural(num_ranks, 'rank')} of this run.{uncalibrated_text(entry)}"
    )


def uncalibrated_text(entry: RunEntry) -> str:
    """Return a sentence on how to calibrate this machine; empty if the run was predicted with its calibration."""
    if entry.predicted is None or entry.predicted.is_calibrated:
        return ""
    return " This machine was not calibrated when the run started; ss.calibrate() does so in under a minute."


def _rate(trace: Trace) -> str:
    if not trace.steps:
        return ""
    step = trace.steps[-1]
    if step.tokens_per_s is not None:
        return f", {rate_text(step.tokens_per_s, 'tokens')}"
    return f", {rate_text(step.samples_per_s, 'samples')}"


def without_control_html(job: Job, described: Job) -> str:
    """Return an HTML box that names the settings that the form cannot show; empty if the form describes everything.

    Args:
        job: The job that the form should describe.
        described: The job that the form describes.
    """
    wanted = settings_of(job)
    names = differing([wanted, settings_of(described)])
    left = [f"{heading_of(name)} ({value_text(name, wanted.get(name))})" for name in names]
    told = listed(left)
    text = f"The form has no control for these settings of the job, so Start leaves them out: {told}."
    return problem_html(safe(text)) if left else ""


def failure_html(entry: RunEntry, error: RunFailed) -> str:
    """Return an error box for a failed run, with rank, step, message and a collapsed traceback."""
    where = "the run" if error.rank is None else f"rank {error.rank}"
    when = "" if error.step is None else f" at step {error.step}"
    head = f"<b>{safe(entry.trace.label)}: {where} failed{when}</b> (strategy {safe(error.strategy)})"
    return error_html(head, error)


def error_html(head: str, error: ShardscopeError) -> str:
    """Return an error box with a heading (safe HTML), the error's message and its collapsed traceback."""
    text, traceback = error.args[0] if error.args else "", getattr(error, "traceback", "")
    details = f"<details><summary>Traceback</summary><pre>{safe(traceback)}</pre></details>"
    return problem_html(f"{head}<br>{safe(text)}{details if traceback else ''}")
