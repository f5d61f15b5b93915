"""Texts of the lab: the state of a run, the plan before it starts, and error boxes."""

from __future__ import annotations

from shardscope.errors import RunFailed
from shardscope.spec import Job, Strategy, registry
from shardscope.spec.models import MODELS
from shardscope_widgets.kit.guard import problem_html
from shardscope_widgets.trace import Trace
from shardscope_widgets.training_lab._runbook import RunEntry
from shardscope_widgets.words import count_text, plural, rate_text, safe


def plan_text(job: Job) -> str:
    """Describe what the Start button would do: model size, samples per rank and micro-batches."""
    micro = job.num_micro_batches
    parts = f" in {micro} micro-batches" if micro > 1 else ""
    size = f"{count_text(MODELS[job.model].num_params)} parameters. " if isinstance(job.model, str) else ""
    return f"{size}{_share(job)} per step{parts}."


def _share(job: Job) -> str:
    share, among = plural(job.batch.per_rank(job.num_data_ranks), "sample"), job.num_data_ranks
    if job.world_size == 1:
        return f"One process takes {share}"
    if among == job.world_size:
        return f"Each of {job.world_size} ranks takes {share}"
    if among == 1:
        return f"All {job.world_size} ranks work on the same {share}"
    return f"{among} of {job.world_size} ranks take {share} each"


def strategy_text(name: str) -> str:
    """Return the first line of a strategy's docstring."""
    return (registry.require_known(Strategy, name).__doc__ or "").strip().partition("\n")[0]


def progress_text(entry: RunEntry) -> str:
    """Return the progress of a run: ``step 12 of 100, loss 2.345``."""
    steps = entry.trace.steps
    if not steps:
        return "no step finished yet" if entry.is_alive else "no step finished"
    return f"step {entry.run.job.progress(steps[-1].number)}, loss {steps[-1].loss:.3f}"


def state_text(entry: RunEntry) -> str:
    """Return the state of a run in a few words: ``running, step 12 of 100``, ``completed, loss 2.345``."""
    steps = entry.trace.steps
    if not steps or entry.tail is None:
        return entry.state
    if entry.state == "completed":
        return f"completed, loss {steps[-1].loss:.3f}"
    return f"{entry.state}, step {entry.run.job.progress(steps[-1].number)}"


def status_text(entry: RunEntry | None) -> str:
    """Return the status line of a run; a prompt to start one if `entry` is None."""
    if entry is None:
        return "Ready. Choose a job and press Start."
    name = entry.trace.label
    if entry.state == "starting" and not entry.trace.steps:
        return f"{name} is starting {plural(entry.trace.world_size, 'rank')}."
    verbs = {"starting": "is running", "running": "is running", "completed": "has finished"}
    verb = verbs.get(entry.state) or ("was stopped" if entry.state == "stopped" else "has failed")
    return f"{name} {verb}: {progress_text(entry)}{_rate(entry.trace) if entry.is_alive else ''}."


def _rate(trace: Trace) -> str:
    if not trace.steps:
        return ""
    step = trace.steps[-1]
    if step.tokens_per_s is not None:
        return f", {rate_text(step.tokens_per_s, 'tokens')}"
    return f", {rate_text(step.samples_per_s, 'samples')}"


def failure_html(entry: RunEntry, error: RunFailed) -> str:
    """Return an error box for a failed run, with rank, step, message and a collapsed traceback."""
    where = "the run" if error.rank is None else f"rank {error.rank}"
    when = "" if error.step is None else f" at step {error.step}"
    head = f"<b>{safe(entry.trace.label)}: {where} failed{when}</b> (strategy {safe(error.strategy)})"
    text = error.args[0] if error.args else ""
    details = f"<details><summary>Traceback</summary><pre>{safe(error.traceback)}</pre></details>"
    return problem_html(f"{head}<br>{safe(text)}{details if error.traceback else ''}")
