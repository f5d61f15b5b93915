"""Tables as static HTML for a notebook or a report, without scripts and with all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from IPython.display import HTML

from shardscope.measure.compare_runs.comparison import RunsComparison
from shardscope.measure.compare_runs.of_runs import compared
from shardscope.measure.compare_runs.view import html_table, sentences, title
from shardscope.methods.strategies.pipeline import with_split
from shardscope.runlog.figures import FIGURES
from shardscope.runlog.summary import summarise
from shardscope.show import Table
from shardscope_widgets.figures._comparison import HEADERS, NONE, RunRow
from shardscope_widgets.figures.theme import run_looks
from shardscope_widgets.kit import markup
from shardscope_widgets.kit.swatch import swatch
from shardscope_widgets.trace import Source, Trace, named_apart
from shardscope_widgets.words import safe

_NOTHING = "Tick runs in the list to compare them."


def runs_html(rows: Sequence[RunRow]) -> str:
    """Return the rows as an HTML table, omitting columns for which no run has a value."""
    cells = [row.cells() for row in rows]
    kept = [at for at in range(len(HEADERS)) if any(row[at] != NONE for row in cells)]
    return Table([HEADERS[at] for at in kept], [[row[at] for at in kept] for row in cells]).html("ss-table")


def comparison_of(
    traces: Sequence[Trace], *, states: Mapping[str, str] | None = None, notes: Mapping[str, str] | None = None,
    baseline: str = "",
) -> RunsComparison | None:  # fmt: skip
    """Return the comparison of the runs that have finished a step; None if there are none.

    Args:
        traces: The runs.
        states: States by run id; a run without one counts as completed.
        notes: Notes by run id.
        baseline: Id of the run to which the other runs are compared; empty for none.
    """
    begun = [trace for trace in named_apart(traces) if trace.steps and trace.job is not None]
    told = [
        (each.run_id, with_split(each.job, each.split),
         summarise(each, (states or {}).get(each.run_id, "completed"), each.job), (notes or {}).get(each.run_id, ""))
        for each in begun
        if each.job is not None
    ]  # fmt: skip
    ids = [run_id for run_id, *_ in told]
    index = ids.index(baseline) if baseline in ids else None
    return compared(told, index, [trace.label for trace in begun]) if told else None


def comparison_html(found: RunsComparison | None, traces: Sequence[Trace]) -> str:
    """Return a comparison as HTML that shows each run's line style; `traces` are all runs in the plots."""
    if found is None:
        return markup.words_html(_NOTHING)
    looks = run_looks(traces)
    samples = {trace.run_id: swatch(look) for trace, look in zip(traces, looks, strict=True)}
    table = html_table(found, [samples[run.run_id] for run in found.runs]).html()
    about = f"{FIGURES['loss'].label.capitalize()}: {FIGURES['loss'].about}. Hover over a heading for its meaning."
    words = "".join(map(markup.words_html, [*sentences(found), about]))
    return f'<div style="margin:.7em 0 .2em"><strong>{safe(title(found))}</strong></div>{table}{words}'


def summary_html(traces: Sequence[Trace]) -> str:
    """Return, as HTML, a table that compares `traces` and sentences on the main differences."""
    return comparison_html(comparison_of(traces), traces)


def summary(runs: Iterable[Source]) -> HTML:
    """Compare runs in a table with a short description, for display in a notebook.

    Example:
        >>> summary(ss.runs()[:3])  # doctest: +SKIP
    """
    return HTML(summary_html([Trace.read(run) for run in runs]))
