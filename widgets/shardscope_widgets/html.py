"""Tables as static HTML for a notebook or a report, without scripts and with all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from IPython.display import HTML

from shardscope_widgets.figures._comparison import HEADERS, RunRow, comparison_info, comparison_text
from shardscope_widgets.trace import Source, Trace
from shardscope_widgets.words import safe

_NOTHING = "Tick runs in the list to compare them."


def table_html(rows: Sequence[RunRow]) -> str:
    """Return the rows as an HTML table."""
    head = "".join(f'<th scope="col">{safe(name)}</th>' for name in HEADERS)
    body = "".join(f"<tr>{''.join(f'<td>{safe(cell)}</td>' for cell in row.cells())}</tr>" for row in rows)
    table = f'<table class="ss-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div style="overflow-x:auto">{table}</div>'


def summary_html(traces: Sequence[Trace]) -> str:
    """Return a table and a text description of `traces` as HTML."""
    rows = comparison_info([trace for trace in traces if trace.steps])
    if not rows:
        return f'<div class="ss-words">{_NOTHING}</div>'
    speed = any(row.speed for row in rows)
    note = "Speed is throughput against the single process on the same model and data." if speed else ""
    words = f"{comparison_text(rows)} {note} Times are medians without the first two steps; bytes are means."
    return f'{table_html(rows)}<div class="ss-words">{safe(" ".join(words.split()))}</div>'


def summary(runs: Iterable[Source]) -> HTML:
    """Compare runs in a table with a short description, for display in a notebook.

    Example:
        >>> summary(ss.runs()[:3])  # doctest: +SKIP
    """
    return HTML(summary_html([Trace.read(run) for run in runs]))
