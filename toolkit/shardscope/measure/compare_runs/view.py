"""Display of a comparison of runs: sentences, and a table with one column per run (in HTML, one row per run if there
are many).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isnan
from typing import TYPE_CHECKING

from shardscope.runlog.figures import FIGURES, change_text, figure_text
from shardscope.show import Cell, Part, Sentences, Table
from shardscope.spec.run_names import shared_words
from shardscope.spec.settings import heading_of, value_text
from shardscope.spec.units import listed, plural, three_digits

if TYPE_CHECKING:
    from shardscope.measure.compare_runs.comparison import ComparedRun, RunsComparison

DIVERGED = "▲"
"""Mark of a run whose loss has diverged; a shape, so that it does not depend on colour."""
SPEED_LABEL = "speed-up over one process"
ADVICE = "Lower the learning rate, warm it up, or clip the gradients (clip_norm)."
"""Advice for a run whose loss has diverged."""


def label_of_result(name: str) -> str:
    """Return the label of a result."""
    return FIGURES[name].label if name in FIGURES else SPEED_LABEL


def about_result(name: str) -> str:
    """Return a short description of a result."""
    if name in FIGURES:
        return FIGURES[name].about
    return "throughput relative to one process with the same model, data, batch, precision and optimizer"


def result_text(name: str, value: float | None) -> str:
    """Write a result; a dash if it is unknown."""
    if name in FIGURES:
        return figure_text(name, value)
    return "–" if value is None else f"{three_digits(value)} ×"


def state_text(run: ComparedRun) -> str:
    """Return the state of a run: ``completed``, or ``completed, ▲ diverged at step 4``."""
    at, state = run.summary.diverged_at, run.summary.state
    return state if at is None else f"{state}, {DIVERGED} diverged at step {at}"


def change_of(comparison: RunsComparison, index: int, name: str) -> str:
    """Return how a result of a run differs from the baseline; empty for the baseline itself, or without a baseline."""
    if comparison.baseline is None or index == comparison.baseline or name == "last_step":
        return ""
    base = comparison.runs[comparison.baseline].result(name)
    return change_text(name, comparison.runs[index].result(name), base)


def title(comparison: RunsComparison) -> str:
    """Return the settings that the runs share, such as ``3 runs of gpt-nano on python-source, ring, 2 ranks``."""
    shared = shared_words([run.job for run in comparison.runs])
    return plural(len(comparison.runs), "run") + (f" of {shared}" if shared else "")


def sentences(comparison: RunsComparison) -> list[str]:
    """Return sentences on the most notable results: diverged runs, the lowest loss, the fastest run, and the
    baseline.
    """
    return [*_ended(comparison), *_diverged(comparison), *_best(comparison), *_baseline(comparison)]


def _ended(comparison: RunsComparison) -> Iterator[str]:
    if not _end_apart(comparison):
        steps = {run.summary.last_step for run in comparison.runs}
        yield f"All have completed {steps.pop() if len(steps) == 1 else 'their'} steps."


def _end_apart(comparison: RunsComparison) -> bool:
    """Return whether the runs differ in their state or their last step, so that a table needs both columns."""
    if len(comparison.runs) == 1 or {state_text(run) for run in comparison.runs} != {"completed"}:
        return True
    steps = {run.summary.last_step for run in comparison.runs}
    return len(steps) > 1 and "steps" not in comparison.setting_names


def _diverged(comparison: RunsComparison) -> Iterator[str]:
    names = [run.name for run in comparison.runs if run.summary.diverged_at is not None]
    if names:
        yield f"{DIVERGED} {listed(names)} diverged. {ADVICE}"


def _best(comparison: RunsComparison) -> Iterator[str]:
    kept = [run for run in comparison.runs if run.summary.diverged_at is None]
    losses = [(run.summary.loss_mean, run) for run in kept if run.summary.loss_mean is not None]
    if len(losses) > 1 and len({run.summary.last_step for _, run in losses}) == 1:
        yield _lowest_loss(losses, len(comparison.runs))
    rate_name = next((name for name in comparison.speed_names if name != "step_time_s"), None)
    rates = [
        (rate, run) for run in comparison.runs if rate_name and (rate := run.result(rate_name)) is not None
    ]
    if rate_name and len(rates) > 1:
        rate, fastest = max(rates, key=lambda each: each[0])
        yield f"{fastest.name} is the fastest: {figure_text(rate_name, rate)} {label_of_result(rate_name)}."


def _lowest_loss(losses: list[tuple[float, ComparedRun]], num_runs: int) -> str:
    """Return a sentence that names all runs whose loss, as displayed, equals the lowest; further digits are noise.

    Args:
        losses: Mean loss of each run that has one and has not diverged.
        num_runs: Number of compared runs, including those without a loss and diverged ones.
    """
    lowest = figure_text("loss_mean", min(loss for loss, _ in losses))
    names = [run.name for loss, run in losses if figure_text("loss_mean", loss) == lowest]
    label = FIGURES["loss_mean"].label
    if len(names) == num_runs:
        return f"All have the same {label}: {lowest}."
    if len(names) == len(losses):
        return f"{listed(names)} have the same {label}: {lowest}."
    return f"{listed(names)} {'has' if len(names) == 1 else 'have'} the lowest {label}: {lowest}."


def _baseline(comparison: RunsComparison) -> Iterator[str]:
    if comparison.baseline is not None:
        yield f"Changes are relative to {comparison.runs[comparison.baseline].name}."


_MOST_COLUMNS = 8
"""Maximum number of runs for which an HTML table has a column per run; with more runs, it has a row per run."""


def shown(comparison: RunsComparison, *, in_html: bool) -> list[Part]:
    """Return the parts of a comparison to display: the title, the table and the sentences."""
    table = html_table(comparison) if in_html else _text_table(comparison)
    inside = [f"{comparison.inside}."] * bool(comparison.inside)
    return [Sentences([title(comparison), *inside]), table, Sentences(sentences(comparison), is_titled=False)]


def _text_table(comparison: RunsComparison) -> Table:
    """Return a table with a column per run, with state and number of steps even if they are equal in all runs."""
    (_, *names), *rows = _table(comparison, [run.name for run in comparison.runs], is_whole=True)
    return Table(["", *names], rows)


def html_table(comparison: RunsComparison, marks: Sequence[str] = ()) -> Table:
    """Return a table with a column per run, or a row if there are many; `marks` is HTML to put before runs' names."""
    names = [
        Cell(run.name + " (baseline)" * (index == comparison.baseline), mark=marks[index] if marks else "")
        for index, run in enumerate(comparison.runs)
    ]
    head, *rows = _table(comparison, names, is_whole=_end_apart(comparison))
    if len(names) > _MOST_COLUMNS:
        head, *rows = map(list, zip(head, *rows, strict=True))
    return Table(head, rows, has_row_heads=True)


def _table(
    comparison: RunsComparison, names: Sequence[str | Cell], *, is_whole: bool
) -> list[list[str | Cell]]:
    """Return a row for the names, and one for each result, each setting, the state and the notes."""
    rows: list[list[str | Cell]] = [["run", *names]]
    rows += [_results(comparison, name) for name in comparison.speed_names]
    rows += [_settings(comparison, name) for name in comparison.setting_names]
    if is_whole:
        rows.append(["state", *map(state_text, comparison.runs)])
    others = [name for name in comparison.other_names if is_whole or name != "last_step"]
    rows += [_results(comparison, name) for name in others]
    if any(run.note for run in comparison.runs):
        rows.append(["note", *(" ".join(run.note.split()) for run in comparison.runs)])
    return rows


def _settings(comparison: RunsComparison, name: str) -> list[str | Cell]:
    values = (value_text(name, table[name]) if name in table else "–" for table in comparison.tables)
    return [Cell(heading_of(name), about=name), *values]


def _results(comparison: RunsComparison, name: str) -> list[str | Cell]:
    values = (
        Cell(result_text(name, run.result(name)), change_of(comparison, index, name))
        for index, run in enumerate(comparison.runs)
    )
    return [Cell(label_of_result(name), about=about_result(name)), *values]


def grouped_table(comparison: RunsComparison, by: str) -> Table:
    """Return the means over the runs with the same value of a setting; see `grouped`."""
    rows = [
        [value_text(by, value), f"{count:.0f}", *map(_mean_text, comparison.result_names, means)]
        for value, count, *means in comparison.grouped(by).itertuples(name=None)
    ]
    heads = [heading_of(by), "runs", *map(label_of_result, comparison.result_names)]
    return Table(heads, rows, has_row_heads=True)


def _mean_text(name: str, mean: float) -> str:
    return result_text(name, None if isnan(mean) else mean)
