"""Texts of the Tuning Lab: what the Start button would do, the progress of the study, the results of a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardscope.runlog.figures import FIGURES
from shardscope.runtime.launcher.preflight import about
from shardscope.show import Table
from shardscope.spec import Job, Optimizer, registry
from shardscope.spec.job_parts import label_of
from shardscope.tuning.definition import Definition
from shardscope.tuning.measured import TrialMetrics
from shardscope.tuning.priors import BASELINES, optimizers_of, seeds, with_baselines
from shardscope_widgets.figures._trials import TrialInfo, objective_text, short_name, title_of, value_text
from shardscope_widgets.kit.markup import heading_html, words_html
from shardscope_widgets.words import bytes_text, duration_text, listed, plural, safe, three_digits

_SHOWN = 6


def plan_text(
    definition: Definition,
    trials: int,
    known: int,
    *,
    is_running: bool = False,
    trial_s: float | None = None,
    parallel: int = 1,
) -> str:
    """Return a description of what the Start button would do.

    Args:
        definition: Definition of the study.
        trials: Total number of trials requested.
        known: Number of trials that the study already has.
        is_running: Whether trials are running.
        trial_s: Predicted seconds of a trial with the current job; None if unknown.
        parallel: Number of trials that run at the same time.
    """
    job = definition.job
    searched = plural(len(definition.searched.parameters), "hyperparameter")
    what = f"{searched} of {label_of(job.model)} on {label_of(job.data)}"
    length = f"{plural(job.steps, 'step')} on {plural(job.world_size, 'rank')} with the current job"
    same = ", or the same number of samples at another batch size" if _scales_steps(definition) else ""
    each = f"Each trial is a real run: {length}{same}."
    if is_running:
        return f"Searches over {what}. {each}"
    if known >= trials:
        return f"Searches over {what}. The study has {plural(known, 'trial')}; raise Trials to continue."
    goes = (
        f"Searches over {what}. The study has {known} of {trials} trials; Continue runs the others"
        if known
        else f"Searches over {what} in {plural(trials, 'trial')}"
    )
    if trial_s is not None:
        in_turn = " if run one after another" if parallel > 1 else ""
        took = about(trial_s * (trials - known))
        goes += (
            f": {took} of training{in_turn}, predicted for the current job, plus the time to start each trial"
        )
    return f"{goes}. {each}"


def baselines_text(definition: Definition) -> str:
    """Return the label of the switch for the baselines: their names, and the number of trials they would add."""
    searched = definition.searched
    names = [registry.require_known(Optimizer, name).__name__ for name in BASELINES]
    drawn = optimizers_of(searched)
    found = seeds(definition.job, with_baselines(searched), definition.objectives, drawn=drawn)
    return f"Baselines: {', '.join(names)} ({plural(sum(s.origin == 'baseline' for s in found), 'trial')})"


def _scales_steps(definition: Definition) -> bool:
    """Return whether trials take different numbers of steps: they differ in batch size and train on equal samples."""
    return definition.equal == "samples" and "batch" in definition.space.parameters


def counts(trials: Sequence[TrialInfo]) -> dict[str, int]:
    """Return the number of trials in each state; trials that do not count are omitted unless they are impossible."""
    found: dict[str, int] = {}
    for trial in trials:
        if trial.is_counted or trial.state == "impossible":
            found[trial.state] = found.get(trial.state, 0) + 1
    return found


def num_ended(trials: Sequence[TrialInfo]) -> int:
    """Return the number of trials that count towards the study's number of trials and have ended."""
    found = counts(trials)
    return sum(found.get(state, 0) for state in ("complete", "pruned", "failed"))


def status_text(
    name: str,
    trials: Sequence[TrialInfo],
    wanted: int,
    doing: str,
    *,
    before: str = "",
    ended: str = "",
    left: str = "",
) -> str:
    """Return the status line.

    Args:
        name: Name of the study.
        trials: Trials of the study.
        wanted: Total number of trials requested.
        doing: ``running``, ``stopping`` or ``idle``.
        before: Sentence on what is done before the first trial.
        ended: Sentence on why the study has ended with fewer trials.
        left: The time left, such as ``3 min left``; empty if unknown.
    """
    found = counts(trials)
    done = num_ended(trials)
    wanted = max(wanted, done)  # another driver may have requested more
    if not trials:
        return (
            before or f"Study {name}: starting."
            if doing == "running"
            else "Ready. Choose what to search and press Start."
        )
    states = ("complete", "running", "paused", "pruned", "failed", "impossible")
    parts = [f"{found[state]} {state}" for state in states if found.get(state)]
    verb = {"running": "is running", "stopping": "is stopping"}.get(doing) or (
        "has finished" if done >= wanted or ended else "is stopped"
    )
    progress = f"{done} of {wanted} trials{f', about {left}' * bool(left)}"
    text = f"Study {name} {verb}: {progress}; {listed(parts) or 'none started'}."
    return f"{text} {ended}" if ended else text


def state_of(trial: TrialInfo) -> str:
    """Return a trial's state in a few words."""
    if trial.state == "running":
        return f"step {trial.done} of {trial.steps}"
    if trial.state == "failed" and not trial.is_counted:
        return "rerun"
    if trial.state == "complete" and trial.is_front:
        return "front"
    return trial.state


def chosen_html(trial: TrialInfo, objectives: Sequence[str]) -> str:
    """Return the heading, settings and objective values of the chosen trial as HTML."""
    values = [(title_of(n), objective_text(n, trial.values[n])) for n in objectives if n in trial.values]
    chips = [
        f"<span>{safe(short)} <b>{safe(text)}</b></span>" for short, text in [*_settings(trial), *values]
    ]
    why = trial.reason or trial.note
    note = words_html(f"{why[0].upper()}{why[1:]}.").replace("..", ".") if why else ""
    state = f"{state_of(trial)}{', baseline' * trial.is_baseline}{', pinned' * trial.is_pinned}"
    head = heading_html(f"Trial {trial.number}", state)
    return f'{head}<div class="ss-chips">{"".join(chips)}</div>{note}'


def _settings(trial: TrialInfo) -> list[tuple[str, str]]:
    return [(short_name(name), value_text(value)) for name, value in trial.params]


def figures_html(job: Job, measured: TrialMetrics | None, formula: float | None, projected: str) -> str:
    """Return measured and predicted values of a trial as a small HTML table; empty before the first step.

    Args:
        job: Job of the trial.
        measured: Its measurements; None if it has none.
        formula: Bytes per step without compression by the formula; None if the trial has no compression.
        projected: Predicted step time on the chosen link, as text; empty to show measured times.
    """
    if measured is None or measured.step_s is None:
        return ""
    parts = [("step time", duration_text(measured.step_s))]
    if measured.compute_s is not None:
        parts.append(("of which computation", duration_text(measured.compute_s)))
    if job.compression.is_on:
        parts.append(("compression and decompression", duration_text(measured.codec_s)))
    if projected:
        parts.append(("predicted step time on the chosen link", projected))
    parts.append((FIGURES["bytes_per_step"].label, bytes_text(measured.bytes / max(1, measured.steps))))
    if formula is not None:
        parts.append(("uncompressed, by formula", bytes_text(formula)))
    parts.append((FIGURES["process_bytes"].label, bytes_text(measured.memory)))
    if measured.test is not None:
        parts.append(("loss on the test split", three_digits(measured.test[0])))
    return Table((), parts, has_row_heads=True).html("ss-figures")


def alarms_html(measured: TrialMetrics | None) -> str:
    """Return one line per alarm as HTML; empty if there are none."""
    alarms = () if measured is None else measured.alarms
    lines = "".join(f"<li>{safe(text[0].upper() + text[1:])}.</li>" for text in alarms)
    return f'<ul class="ss-alarms" aria-label="Alarms of this trial">{lines}</ul>' if lines else ""


def link_text(label: str, notes: Mapping[str, Sequence[int]]) -> str:
    """Return sentences about the effect of the link sliders.

    Args:
        label: Link for which times are predicted; empty to show measured times.
        notes: Numbers of the trials without a predicted time, by reason.
    """
    if not label:
        return "Times are measured. To predict those on another link without new runs, tick “Another link”."
    told = [
        f"{_trials(numbers)} {'has' if len(numbers) == 1 else 'have'} no predicted time: {why}"
        for why, numbers in notes.items()
    ]
    return " ".join(
        [
            f"Times are predicted for {label}: measured times, corrected for the predicted effect of the link.",
            *(f"{t}." for t in told),
        ]
    )


def _trials(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers[:_SHOWN]]
    more = [f"{len(numbers) - _SHOWN} more"] if len(numbers) > _SHOWN else []
    return f"trial{'s' * (len(numbers) > 1)} {listed([*shown, *more])}"


def impossible_text(trials: Sequence[TrialInfo]) -> str:
    """Return a sentence about impossible trials, grouped by reason; empty if there are none."""
    found: dict[str, list[int]] = {}
    for trial in trials:
        if trial.state == "impossible":
            found.setdefault(trial.reason, []).append(trial.number)
    if not found:
        return ""
    told = [f"{_trials(numbers)}: {why}" for why, numbers in found.items()]
    return "Impossible, so not run: " + "; ".join(told) + "."
