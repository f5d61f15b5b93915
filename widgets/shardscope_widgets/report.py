"""A report on runs as one self-contained HTML file that needs no network, server or notebook.

The page embeds Plotly's script once and follows the reader's light or dark theme. Text from jobs and errors is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import plotly.graph_objects as go

from shardscope.measure.compare.comparison import Comparison
from shardscope.measure.compare.view import OVERVIEW, as_html, overview
from shardscope_widgets import figures
from shardscope_widgets.figures._comparison import RunRow, comparison_info, comparison_text
from shardscope_widgets.figures._comparison import draw as draw_comparison
from shardscope_widgets.html import table_html
from shardscope_widgets.trace import Source, Trace
from shardscope_widgets.words import listed, plural, safe

_STYLE = files("shardscope_widgets").joinpath("report.css").read_text(encoding="utf-8")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,
initial-scale=1"> <meta name="color-scheme" content="light
dark"><title>{title}</title><style>{style}</style></head> <body><main><h1>{title}</h1><p
class="lead">{lead}</p>{body}</main></body></html>
"""
_MEASURED = (
    "Everything on this page was measured in real processes.",
    "Everything on this page except the predictions was measured in real processes.",
)
"""Lead sentences of a report without predictions and with predictions."""
_EXPLAIN = {
    "curves": "Loss is the mean over all ranks; the bold line is a moving average of the faint one. Curves of "
    "the same job with different strategies should coincide: splitting the work must not change what is "
    "learned. Bytes are exact counts from the process group; memory is the peak that training itself used on "
    "each rank.",
    "bars": "Step time is the median over steps of the slowest rank. A strategy on several ranks can be slower "
    "than one process where the ranks share few cores or the model is small: sending the gradients then costs "
    "more than parallelism saves.",
    "timeline": "Each row is a rank, with computing above and communication below; grey is idle.",
    "memory": "Bytes held by tensors on each rank; each kind is at its own peak within the newest measured step. "
    "Gathered parameters are temporary copies from other ranks.",
    "passes": "Each bar is one pass of one micro-batch, labelled with its number; the gaps are the bubble.",
    "staleness": "The staleness of a gradient is the number of updates applied while it was being computed.",
    "consensus": "Ranks that average only with neighbours hold slightly different parameters; this is their distance.",
    "predicted": "Predictions use formulas, a trace of the model on shapes, and the speed of this machine, but no data "
    "from the run. Errors are predicted / measured - 1; for bytes, messages and states, the error of the worst term is "
    "shown. Open a run to see all of its terms.",
    "hops": "Each line is one chunk of the gradients, sent from a rank to its neighbour.",
}


def write_report(
    runs: Iterable[Source],
    path: Path | str,
    *,
    title: str = "Shardscope report",
    comparisons: Sequence[Comparison] = (),
) -> Path:
    """Write a report on `runs` to `path` and return the path.

    Args:
        runs: Runs, in the order in which they appear; those without a finished step are only listed by name.
        path: The file to write; its folder must exist.
        title: The heading, as plain text.
        comparisons: Comparisons of runs with their predictions, from `ss.compare`, for the last section.
    """
    target = Path(path)
    page = report_html([Trace.read(run) for run in runs], title=title, comparisons=comparisons)
    target.write_text(page, encoding="utf-8")
    return target


def report_html(
    traces: Sequence[Trace], *, title: str = "Shardscope report", comparisons: Sequence[Comparison] = ()
) -> str:
    """Return the whole page as an HTML string; arguments as for `write_report`."""
    told = [trace for trace in traces if trace.steps]
    silent = [trace.label for trace in traces if not trace.steps]
    page = _Page()
    sections = [_summary(told)] + [page.workload(name, own) for name, own in _by_workload(told).items()]
    if silent:
        sections.append(f"<p>Left out because no step has finished: {safe(listed(silent))}.</p>")
    if comparisons:
        sections.append(page.compared(comparisons))
    when = f"{datetime.now(UTC).astimezone():%d %B %Y, %H:%M}"
    lead = f"{plural(len(traces), 'run')}, {when}. {_MEASURED[bool(comparisons)]}"
    return _PAGE.format(title=safe(title), style=_STYLE, lead=safe(lead), body="".join(sections))


def _by_workload(traces: Sequence[Trace]) -> dict[str, list[Trace]]:
    names = dict.fromkeys(trace.workload for trace in traces)
    return {name: [trace for trace in traces if trace.workload == name] for name in names}


def _summary(traces: Sequence[Trace]) -> str:
    rows: Sequence[RunRow] = comparison_info(traces)
    note = "Speed is throughput against the single process on the same model and data."
    return f"<h2>Summary</h2>{table_html(rows)}<p>{safe(comparison_text(rows))} {note}</p>" if rows else ""


class _Page:
    """Builds the sections and tracks whether the page already contains Plotly's script."""

    def __init__(self) -> None:
        self._has_script = False

    def workload(self, name: str, traces: Sequence[Trace]) -> str:
        parts = [f"<h2>{safe(name)}</h2>"]
        parts += self._part("Curves", _EXPLAIN["curves"], figures.overview(traces))
        if len(traces) > 1:
            parts += self._part("Side by side", _EXPLAIN["bars"], draw_comparison(comparison_info(traces)))
        parts += self._held(traces) + self._consensus(traces)
        parts += [part for trace in traces for part in self._run(trace)]
        return f"<section>{''.join(parts)}</section>"

    def _held(self, traces: Sequence[Trace]) -> list[str]:
        alone = next((trace for trace in traces if trace.world_size == 1), None)
        info = figures.memory_kinds_info(traces, alone=alone)
        if not info.runs:
            return []
        return self._part("Memory by kind", _EXPLAIN["memory"], figures.draw_memory_kinds(info))

    def _consensus(self, traces: Sequence[Trace]) -> list[str]:
        info = figures.consensus_info(traces)
        if not info.curves:
            return []
        words = f"{figures.consensus_text(info)} {_EXPLAIN['consensus']}"
        return self._part("Consensus", words, figures.draw_consensus(info))

    def _run(self, trace: Trace) -> list[str]:
        parts: list[str] = []
        schedule, staleness = figures.gantt_info(trace), figures.staleness_info(trace)
        timeline, ring = figures.timeline_info(trace), figures.ring_info(trace)
        if schedule.ops:
            words = f"{figures.gantt_text(schedule)} {_EXPLAIN['passes']}"
            parts += self._part(f"Schedule of {trace.label}", words, figures.draw_gantt(schedule))
        if timeline.steps:
            words = f"{figures.timeline_text(timeline)} {_EXPLAIN['timeline']}"
            parts += self._part(f"Timeline of {trace.label}", words, figures.timeline(trace))
        if staleness.is_telling:
            words = f"{figures.staleness_text(staleness)} {_EXPLAIN['staleness']}"
            parts += self._part(f"Staleness of {trace.label}", words, figures.draw_staleness(staleness))
        if ring.rounds:
            words = f"{figures.ring_text(ring)} {_EXPLAIN['hops']}"
            parts += self._part(f"Ring of {trace.label}", words, figures.ring(trace))
        return parts

    def compared(self, comparisons: Sequence[Comparison]) -> str:
        """Return the section on predictions: a row for each run, and all its terms in an expandable list."""
        head = "".join(f'<th scope="col">{safe(name)}</th>' for name in OVERVIEW)
        body = "".join(
            f"<tr>{''.join(f'<td>{safe(cell)}</td>' for cell in cells)}</tr>"
            for cells in overview(comparisons)
        )
        table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        parts = "".join(
            f'<details class="terms"><summary>{safe(each.label)}</summary>{as_html(each, title=False)}</details>'
            for each in comparisons
        )
        return f"<section><h2>Predicted and measured</h2><p>{safe(_EXPLAIN['predicted'])}</p>{table}{parts}</section>"

    def _part(self, heading: str, words: str, figure: go.Figure) -> list[str]:
        script: bool = not self._has_script
        self._has_script = True
        settings = {"displaylogo": False, "responsive": True}
        drawn = figure.to_html(full_html=False, include_plotlyjs=script, config=settings)
        return [f"<h3>{safe(heading)}</h3><figure>{drawn}<figcaption>{safe(words)}</figcaption></figure>"]
