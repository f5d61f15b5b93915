"""A comparison of runs as a table in text or HTML, with one column per run; many runs have a row each in HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from math import isnan
from typing import TYPE_CHECKING, NamedTuple

from shardscope.runlog.figures import FIGURES, change_text, figure_text
from shardscope.spec.run_names import shared_words
from shardscope.spec.settings import heading_of, value_text
from shardscope.spec.text_table import aligned
from shardscope.spec.units import listed, plural, three_digits

if TYPE_CHECKING:
    from shardscope.measure.compare_runs.comparison import ComparedRun, RunsComparison

DIVERGED = "▲"
"""Mark of a run whose loss has diverged; a shape, so that it does not depend on colour."""
SPEED_LABEL = "speed-up over one process"
ADVICE = "Lower the learning rate, warm it up, or clip the gradients (clip_norm)."
"""What to do about a run whose loss has diverged."""


def label_of_result(name: str) -> str:
    """Return the label of a result."""
    return FIGURES[name].label if name in FIGURES else SPEED_LABEL


def about_result(name: str) -> str:
    """Return what a result is, in a few words."""
    if name in FIGURES:
        return FIGURES[name].about
    return (
        "throughput divided by that of one process with the same model, data, batch, precision and optimizer"
    )


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
    """Return how a result of a run differs from the baseline's; empty for the baseline, and without one."""
    if comparison.baseline is None or index == comparison.baseline or name == "last_step":
        return ""
    base = comparison.runs[comparison.baseline].result(name)
    return change_text(name, comparison.runs[index].result(name), base)


def title(comparison: RunsComparison) -> str:
    """Return what the runs have in common, such as ``3 runs of gpt-nano on python-source, ring, 2 ranks``."""
    shared = shared_words([run.job for run in comparison.runs])
    return plural(len(comparison.runs), "run") + (f" of {shared}" if shared else "")


def sentences(comparison: RunsComparison) -> list[str]:
    """Return what stands out, in sentences: diverged runs, the lowest loss, the fastest run, and the baseline."""
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
    """Name all runs whose loss reads as the lowest one: further digits are rounding or noise.

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
        yield f"Changes are against {comparison.runs[comparison.baseline].name}."


def as_text(comparison: RunsComparison) -> str:
    """Return the comparison as aligned text: a column per run, and rows in the order of the table's columns."""
    runs = comparison.runs
    rows = [["", *(run.name for run in runs)]]
    rows += [[label_of_result(name), *_result_cells(comparison, name)] for name in comparison.speed_names]
    rows += [
        [
            heading_of(name),
            *(value_text(name, table[name]) if name in table else "–" for table in comparison.tables),
        ]
        for name in comparison.setting_names
    ]
    rows.append(["state", *map(state_text, runs)])
    rows += [[label_of_result(name), *_result_cells(comparison, name)] for name in comparison.other_names]
    if any(run.note for run in runs):
        rows.append(["note", *(" ".join(run.note.split()) for run in runs)])
    return "\n".join([title(comparison), "", *aligned(rows, right=True), "", *sentences(comparison)])


def _result_cells(comparison: RunsComparison, name: str) -> Iterator[str]:
    for index, run in enumerate(comparison.runs):
        change = change_of(comparison, index, name)
        yield result_text(name, run.result(name)) + (f" ({change})" if change else "")


_CELL = "text-align:right;padding:.25em .5em"
_FIRST = "text-align:left;padding:.25em .5em .25em 0"
_RULE = "border-bottom:1px solid color-mix(in srgb,currentColor 22%,transparent)"
_MOST_COLUMNS = 8
"""Number of runs up to which a table in HTML has a column per run; one of more runs has a row per run."""


class _Cell(NamedTuple):
    """A cell of an HTML table: its HTML, its tooltip, and what its style adds."""

    html: str
    about: str = ""
    look: str = "font-weight:400"


def as_html(comparison: RunsComparison) -> str:
    """Return the comparison as HTML: the settings that differ, the results, and the changes."""
    words = "".join(f"<div>{escape(text)}</div>" for text in sentences(comparison))
    return (
        f'<div class="ss-compared-runs"><strong>{escape(title(comparison))}</strong>'
        f'{table_html(comparison)}<div style="margin:.3em 0">{words}</div></div>'
    )


def table_html(comparison: RunsComparison, marks: tuple[str, ...] = ()) -> str:
    """Return the comparison as an HTML table: speed first, then the settings that differ, then the other results.

    Args:
        comparison: The comparison.
        marks: HTML before the name of each run, such as a line sample.
    """
    notes = ["note"] if any(run.note for run in comparison.runs) else []
    bold = "font-weight:600"
    head = [_Cell("run", look=bold), *_result_heads(comparison.speed_names)]
    head += [_Cell(escape(heading_of(name)), name, bold) for name in comparison.setting_names]
    head += [_Cell("state", look=bold)] * _end_apart(comparison)
    head += [*_result_heads(_others_in_html(comparison)), *(_Cell(name, look=bold) for name in notes)]
    lines = [head, *(_cells_of(comparison, index, marks, notes) for index in range(len(comparison.runs)))]
    if len(comparison.runs) <= _MOST_COLUMNS:
        lines = [list(line) for line in zip(*lines, strict=True)]
    first, *rest = (
        "".join(_cell_html(cell, row, at) for at, cell in enumerate(c)) for row, c in enumerate(lines)
    )
    return _table_of(first, f"<tr>{'</tr><tr>'.join(rest)}</tr>")


def _table_of(head: str, body: str) -> str:
    """Return a table that scrolls if it is too wide, from the cells of its header and the rows below it as HTML."""
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;font-variant-numeric:tabular-nums;'
        f'font-size:13px"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell_html(cell: _Cell, row: int, column: int) -> str:
    tag = "td" if row and column else "th"
    scope = "" if row and column else f' scope="{"row" if row else "col"}"'
    title = f' title="{escape(cell.about, quote=True)}"' if cell.about else ""
    return (
        f'<{tag}{scope}{title} style="{_CELL if column else _FIRST};{_RULE};{cell.look}">{cell.html}</{tag}>'
    )


def _cells_of(
    comparison: RunsComparison, index: int, marks: tuple[str, ...], notes: list[str]
) -> list[_Cell]:
    run, table = comparison.runs[index], comparison.tables[index]
    pinned = " (baseline)" if index == comparison.baseline else ""
    name = _Cell(
        (marks[index] if marks else "") + escape(run.name + pinned),
        look="font-weight:600" if pinned or len(comparison.runs) <= _MOST_COLUMNS else "font-weight:400",
    )
    words = [value_text(n, table[n]) if n in table else "–" for n in comparison.setting_names]
    words += [state_text(run)] * _end_apart(comparison)
    speeds, others = (
        [_Cell(_result_html(comparison, index, n), look="white-space:nowrap") for n in names]
        for names in (comparison.speed_names, _others_in_html(comparison))
    )
    return [
        name, *speeds, *(_Cell(escape(text)) for text in words), *others, *[_Cell(escape(run.note))] * len(notes),
    ]  # fmt: skip


def _result_heads(names: Iterable[str]) -> list[_Cell]:
    return [_Cell(escape(label_of_result(n)), about_result(n), "font-weight:600") for n in names]


def _others_in_html(comparison: RunsComparison) -> list[str]:
    return [name for name in comparison.other_names if name != "last_step" or _end_apart(comparison)]


def _result_html(comparison: RunsComparison, index: int, name: str) -> str:
    change = change_of(comparison, index, name)
    small = f'<br><span style="font-size:11.5px;opacity:.75">{escape(change)}</span>' if change else ""
    return escape(result_text(name, comparison.runs[index].result(name))) + small


def grouped_html(comparison: RunsComparison, by: str) -> str:
    """Return the means over the runs with the same value of a setting as an HTML table; see `grouped`."""
    found = comparison.grouped(by)
    heads = [heading_of(by), "runs", *(label_of_result(name) for name in comparison.result_names)]
    head = "".join(f'<th scope="col" style="{_CELL};{_RULE}">{escape(text)}</th>' for text in heads)
    rows = []
    for value, row in found.iterrows():
        texts = [f"{row['runs']:.0f}"]
        texts += [
            result_text(name, None if isnan(row[name]) else row[name]) for name in comparison.result_names
        ]
        cells = "".join(f'<td style="{_CELL};{_RULE}">{escape(text)}</td>' for text in texts)
        rows.append(
            f'<tr><th scope="row" style="{_CELL};{_RULE}">{escape(value_text(by, value))}</th>{cells}</tr>'
        )
    return _table_of(head, "".join(rows))
