"""The sections of a report: one per workload, how each strategy works, predictions, settings and machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import plotly.graph_objects as go

from shardscope.measure.compare.comparison import OVERVIEW, Comparison, overview
from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.show import Table
from shardscope_widgets import figures
from shardscope_widgets.figures import _consensus, _curves, _pipeline, _staleness, _timeline, theme
from shardscope_widgets.figures._agreement import AgreementRow, agreement_info, draw_agreement
from shardscope_widgets.figures._memory_kinds import LAYERS
from shardscope_widgets.figures._stacks import Layer, RunBars, StackBar, draw_stacks
from shardscope_widgets.figures._step_parts import StepPartsRow, draw_step_parts, step_parts_info
from shardscope_widgets.html import runs_html
from shardscope_widgets.report._page import Page
from shardscope_widgets.report._settings import machine_rows, settings_rows
from shardscope_widgets.report.entries import Entry, Group
from shardscope_widgets.report.findings import (
    differences_text,
    lowest_loss_text,
    memory_text,
    saving_text,
    speed_text,
    step_text,
)
from shardscope_widgets.words import listed, safe


def workload_section(page: Page, group: Group, *, is_first: bool) -> str:
    """Return the section of one workload: its findings, a figure for each, and a table of its runs.

    The page's headline already states the findings of the first workload, so its section adds only details.
    """
    parts = [page.heading(2, group.name)]
    parts += _learning(page, group)
    parts += _speed(page, group, is_first=is_first)
    parts += _sizes(page, group, is_first=is_first)
    rows = [entry.row for entry in group.entries]
    parts += [page.heading(3, "All runs", within=group.name), runs_html(rows)]
    return f"<section>{''.join(parts)}</section>"


def _told(page: Page, group: Group, heading: str, finding: str, *shown: str) -> list[str]:
    text = f'<p class="finding">{safe(finding)}</p>' if finding else ""
    return [page.heading(3, heading, within=group.name), text, f'<div class="figures">{"".join(shown)}</div>']


def _learning(page: Page, group: Group) -> list[str]:
    entries = [entry for entry in group.entries if any(map(_is_number, entry.trace.steps.column("loss")))]
    if not entries:
        return []
    merged = _MERGED if any(entry.agrees for entry in entries) else ""
    shown = [page.figure(_curves.draw(_loss_curves(entries)), f"{_LOSS}{merged}")]
    judged = [
        AgreementRow(
            entry.label, entry.trace.strategy, entry.difference, bool(entry.agrees), entry.widest[1:]
        )
        for entry in entries
        if entry.difference is not None and entry.widest is not None
    ]
    if judged:
        bound = max(entry.bound for entry in entries)
        shown.append(page.figure(draw_agreement(agreement_info(judged, bound)), _AGREEMENT))
    finding = differences_text(entries) or lowest_loss_text(group)
    return _told(page, group, "What was learned", finding, *shown)


def _is_number(value: float) -> bool:
    return value == value  # noqa: PLR0124 - NaN differs from itself


def _loss_curves(entries: Sequence[Entry]) -> _curves.RunCurvesInfo:
    """Return the loss curves; runs that agree with one process are drawn as one curve, because they coincide."""
    same = [entry for entry in entries if entry.agrees]
    shown = [entry for entry in entries if not entry.agrees]
    found = _curves.loss_info([entry.trace for entry in shown])
    labels = [
        f"{entry.label} and {len(same)} that agree" if entry.is_alone and same else entry.label
        for entry in shown
    ]
    curves = (curve._replace(label=label) for curve, label in zip(found.curves, labels, strict=True))
    return found._replace(curves=tuple(curves))


def _speed(page: Page, group: Group, *, is_first: bool) -> list[str]:
    rows = [
        StepPartsRow(entry.label, entry.parts.parts, entry.row.step_time_s)
        for entry in group.entries
        if entry.parts is not None and entry.row.step_time_s is not None
    ]
    if not rows:
        return []
    alone_s = None if group.alone is None else group.alone.row.step_time_s
    finding = f"{'' if is_first else speed_text(group)} {step_text(group)}".strip()
    figure = draw_step_parts(step_parts_info(rows, alone_s if len(rows) > 1 else None))
    return _told(page, group, "Where a step's time goes", finding, page.figure(figure, _PARTS))


def _sizes(page: Page, group: Group, *, is_first: bool) -> list[str]:
    """Return two figures side by side: the bytes that ranks send, and the bytes that they hold."""
    sent = [StackBar(e.label, (round(e.row.bytes_per_step),)) for e in group.parallel if e.row.bytes_per_step]
    held = [
        StackBar(entry.label, tuple(entry.held.get(kind, 0) for kind in MEMORY_KINDS), entry.row.held_bytes)
        for entry in group.entries
        if entry.held
    ]
    shown = []
    if held:
        kinds = [place for place, kind in enumerate(MEMORY_KINDS) if any(bar.sizes[place] for bar in held)]
        bars = [bar._replace(sizes=tuple(bar.sizes[k] for k in kinds)) for bar in held]
        shown.append(page.figure(_stacked(bars, [LAYERS[k] for k in kinds]), _MEMORY))
    if sent:
        figure = _stacked(sent, [Layer("sent", theme.SPAN_LOOKS["all_reduce"])]).update_layout(
            showlegend=False
        )
        title = theme.note("<b>Sent per step</b>, all ranks together", x=0, y=1) | {"yshift": 6}
        shown.append(page.figure(figure.update_layout(annotations=[title], margin_t=36), _SENT))
    finding = f"{'' if is_first else memory_text(group)} {saving_text(group)}".strip()
    return _told(page, group, "Memory and bytes sent", finding, *shown) if shown else []


def _stacked(bars: Sequence[StackBar], layers: Sequence[Layer]) -> go.Figure:
    """Draw one bar per run, the smallest first, with room for its label on a narrow screen."""
    figure = draw_stacks([RunBars("", tuple(sorted(bars, key=lambda bar: bar.end)))], layers)
    return figure.update_layout(xaxis_range=[0, 1.32 * max(bar.end for bar in bars)], xaxis_nticks=5)


def strategies_section(page: Page, entries: Iterable[Entry]) -> str:
    """Return a section with a foldable part for each strategy: what its ranks did in the recorded steps."""
    parts = []
    for entry in _one_of_each(entries):
        shown = "".join(page.figure(figure, words) for figure, words in _pictures(entry))
        if shown:
            heading = page.heading(3, entry.label, within="strategy")
            parts.append(f"<details><summary>{heading}</summary>{shown}</details>")
    if not parts:
        return ""
    about = "Open a strategy to see what its ranks did in two recorded steps."
    return f"<section>{page.heading(2, 'Step by step')}<p>{about}</p>{''.join(parts)}</section>"


def _one_of_each(entries: Iterable[Entry]) -> list[Entry]:
    """Return the first run of each combination of strategy, compression and link; later runs would repeat it."""
    found: dict[tuple[str, str, str], Entry] = {}
    for entry in entries:
        trace = entry.trace
        found.setdefault((entry.run.job.strategy.label, trace.method_label, trace.link), entry)
    return list(found.values())


def _pictures(entry: Entry) -> Iterable[tuple[go.Figure, str]]:
    trace = entry.trace
    passes = _pipeline.gantt_info(trace)
    if passes.ops:
        yield _pipeline.draw_gantt(passes), f"{_pipeline.gantt_text(passes)} {_PASSES}"
    timeline = _timeline.timeline_info(trace)
    if timeline.steps and not passes.ops:
        yield figures.timeline(trace), f"{_timeline.timeline_text(timeline)} {_TIMELINE}"
    staleness = _staleness.staleness_info(trace)
    if staleness.is_telling:
        yield _staleness.draw_staleness(staleness), f"{_staleness.staleness_text(staleness)} {_STALENESS}"
    consensus = _consensus.consensus_info([trace])
    if consensus.curves:
        yield _consensus.draw_consensus(consensus), f"{_consensus.consensus_text(consensus)} {_CONSENSUS}"


def predicted_section(page: Page, comparisons: Sequence[Comparison]) -> str:
    """Return the section on predictions: a table with a row for each run, and a foldable list of its terms."""
    table = Table(OVERVIEW, overview(comparisons)).html("ss-table")
    parts = "".join(
        f'<details class="terms"><summary>{safe(each.label)}</summary>{each._repr_html_()}</details>'
        for each in comparisons
    )
    heading = page.heading(2, "Predicted and measured")
    where = listed(list(dict.fromkeys(each.where for each in comparisons)))
    about = f"<p>{safe(_PREDICTED)}</p><p>{safe(f'Predicted for {where}.')}</p>"
    return f"<section>{heading}{about}{table}{parts}</section>"


def settings_section(page: Page, groups: Sequence[Group], silent: Sequence[str]) -> str:
    """Return the section on the settings of each workload, the machine, the versions and the runs left out."""
    parts = [page.heading(2, "Settings and machine")]
    entries = [entry for group in groups for entry in group.entries]
    if groups:
        header = ["", *(group.name for group in groups)]
        parts.append(Table(header, settings_rows(groups), has_row_heads=True).html("facts"))
    parts.append(Table((), machine_rows(entries), has_row_heads=True).html("facts"))
    if entries:
        names = "".join(f"<li>{safe(entry.run.id)}</li>" for entry in entries)
        how = "Train one again: <code>shardscope reproduce RUN</code>. Open it: <code>ss.Run.attach(RUN)</code>."
        parts.append(f"<details><summary>Names of the runs</summary><p>{how}</p><ul>{names}</ul></details>")
    if silent:
        parts.append(f"<p>Left out because no step has finished: {safe(listed(silent))}.</p>")
    return f"<section>{''.join(parts)}</section>"


_LOSS = "Training loss, the mean over all ranks; the bold line is a moving average of the faint one."
_MERGED = (
    " Splitting the work must not change what is learned: runs that agree with one process share a curve."
)
_AGREEMENT = (
    "Summing in another order rounds differently, and training amplifies these errors slightly: "
    "differences within the shaded area are due to rounding. A cross marks a run whose losses differ by "
    "more, with its loss and that of one process in the step in which they differ most."
)
_PARTS = (
    "Medians over steps, on the rank that computes longest; overlapping work counts once. Communication includes "
    "waiting inside a collective for the slowest rank. The mark is the median step time (of the slowest "
    "rank in each step), and the rest is the part of it that these medians do not cover; the dashed line "
    "is the step time of one process."
)
_SENT = "Bytes are counted as the process group sends them; evaluations and checkpoints are not included."
_MEMORY = (
    "Bytes of tensors on the rank that holds the most, by type, each at its own peak within a step. "
    "Gathered parameters "
    "are temporary copies from other ranks; buffers hold messages and padding."
)
_TIMELINE = "Each row is a rank, with computation above and communication below; grey is idle time."
_PASSES = (
    "Each bar is a pass of one micro-batch, labelled with the micro-batch's number; gaps are the bubble."
)
_STALENESS = "The staleness of a gradient is the number of updates applied while it was being computed."
_CONSENSUS = "Ranks that average only with neighbours have slightly different parameters."
_PREDICTED = (
    "Predictions use formulas, a trace of the model on the meta device, and the speed of this machine, but no data "
    "from the run. They assume that no other program uses the cores. 90% of step times should lie inside their "
    "interval; * marks those that do not. Errors are predicted / measured - 1; for bytes, messages and states, "
    "the error of the worst term is shown. Open a run to see all of its terms."
)
