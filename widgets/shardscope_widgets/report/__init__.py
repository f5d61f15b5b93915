"""A report on runs as one self-contained HTML file that needs no network, server or notebook.

The page opens with what was tried and what was found, in sentences computed from the runs, then shows one figure for
each idea. It embeds Plotly once, follows the reader's light or dark theme, and can be printed. Text from jobs and
errors is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from shardscope.errors import SpecError
from shardscope.measure.compare.comparison import Comparison
from shardscope.measure.compare.of_run import comparison_or_reason
from shardscope.runtime import Run
from shardscope_widgets.report import _sections as sections
from shardscope_widgets.report._page import Page
from shardscope_widgets.report._settings import machine_rows
from shardscope_widgets.report.entries import Group, groups_of
from shardscope_widgets.report.findings import headline, tried_text
from shardscope_widgets.trace import Source
from shardscope_widgets.words import safe

__all__ = ["report_html", "report_on", "write_report"]


def write_report(
    runs: Iterable[Source],
    path: Path | str,
    *,
    title: str = "Shardscope report",
    comparisons: Sequence[Comparison] = (),
) -> Path:
    """Write a report on `runs` to `path` and return the path.

    Args:
        runs: Runs, in the order in which they appear; runs without a finished step are only listed by name.
        path: The file to write; its folder must exist.
        title: The heading, as plain text.
        comparisons: Comparisons of runs with their predictions, from `ss.compare`.
    """
    target = Path(path)
    target.write_text(report_html(runs, title=title, comparisons=comparisons), encoding="utf-8")
    return target


def report_on(
    runs: Sequence[Run], path: Path, *, title: str, is_predicted: bool = True
) -> tuple[Path, list[str]]:
    """Write a report on runs, compared with their predictions, and return its path and the findings as sentences.

    Args:
        runs: The runs.
        path: The file to write.
        title: The heading, as plain text.
        is_predicted: Whether to compare the runs with their predictions, where these exist.

    Raises:
        SpecError: The file cannot be written.
    """
    found = [comparison_or_reason(run) for run in runs] if is_predicted else []
    comparisons = [each for each in found if not isinstance(each, str)]
    groups, silent = groups_of(runs)
    page = _html(groups, silent, title, comparisons)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"the report {str(path)!r} cannot be written ({error.strerror}); choose another path"
        ) from None
    return path, headline(groups)


def report_html(
    runs: Iterable[Source], *, title: str = "Shardscope report", comparisons: Sequence[Comparison] = ()
) -> str:
    """Return the page that `write_report` writes; the arguments are the same."""
    groups, silent = groups_of(runs)
    return _html(groups, silent, title, comparisons)


def _html(
    groups: Sequence[Group], silent: Sequence[str], title: str, comparisons: Sequence[Comparison]
) -> str:
    page = Page()
    parts = [sections.workload_section(page, group, is_first=group is groups[0]) for group in groups]
    parts.append(sections.strategies_section(page, [entry for group in groups for entry in group.entries]))
    if comparisons:
        parts.append(sections.predicted_section(page, comparisons))
    parts.append(sections.settings_section(page, groups, silent))
    return page.html(title, f"{_head(groups, title)}{page.nav()}{''.join(parts)}")


def _head(groups: Sequence[Group], title: str) -> str:
    when = f"{datetime.now(UTC).astimezone():%d %B %Y, %H:%M}"
    machine = dict(machine_rows(entry for group in groups for entry in group.entries))
    lines = [when, machine.get("machine", ""), machine.get("versions", "")]
    lead = f'<p class="lead">{safe(tried_text(groups))}</p>' if groups else ""
    found = "".join(f"<li>{safe(text)}</li>" for text in headline(groups))
    about = f'<p class="about">{safe(" · ".join(filter(None, lines)))}</p>'
    return f"<header><h1>{safe(title)}</h1>{lead}{f'<ol class=headline>{found}</ol>' if found else ''}{about}</header>"
