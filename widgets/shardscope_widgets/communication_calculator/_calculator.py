"""The calculator widget: controls on the left, results on the right, and the callbacks between them."""

from __future__ import annotations

from importlib.resources import files
from math import isclose
from typing import TYPE_CHECKING, Any, NamedTuple

import ipywidgets as widgets
import traitlets as t

from shardscope.analytic import communication as comm
from shardscope.errors import SpecError
from shardscope.measure.compression.curve import Worth
from shardscope.show import Table
from shardscope_widgets.communication_calculator._asked import UNITS, CommunicationInputs
from shardscope_widgets.communication_calculator._controls import Ways, make_controls, panel
from shardscope_widgets.communication_calculator._views import make_views
from shardscope_widgets.figures._communication import CommunicationQuestion
from shardscope_widgets.figures._communication_look import title
from shardscope_widgets.figures._compression_speedup import worth_of
from shardscope_widgets.kit.form import check_options
from shardscope_widgets.kit.frame import LAB_CSS, Frame
from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.kit.markup import classed, columns, note_html, status_html
from shardscope_widgets.kit.still import Still
from shardscope_widgets.words import bytes_text, duration_text, plural

if TYPE_CHECKING:
    from shardscope.spec import Job

_HALF_A_STEP = 0.05
"""Largest relative change of the message by its slider, which moves a value to the nearest of 24 places per decade."""
ABOUT = "all values are computed from formulas; hover over a curve for its formula, inputs and source"


class _Frame(Frame):
    _css = LAB_CSS + files(__package__).joinpath("calculator.css").read_text(encoding="utf-8")


class CommunicationCalculator(Still, widgets.VBox, CommunicationInputs):  # type: ignore[misc]
    """Compare collective algorithms: time and traffic by message size and number of workers, crossovers, efficiency.

    Every trait of `CommunicationInputs` can be passed here or set later: ``calculator.workers = 256``.

    Args:
        job: A job whose gradients, ranks, link and compute time are the initial values, and whose compression is
            predicted by `ss.compression_speedup`; None for the defaults.
        asked: Initial values of traits, for example ``num_bytes=1e9, bandwidth=400, bandwidth_unit="Gbit/s"``.

    Raises:
        SpecError: A value is out of range or unknown, or compression cannot be predicted for the job.
        TypeError: `CommunicationInputs` has no trait with one of these names.

    Example:
        >>> CommunicationCalculator(workers=256, bandwidth=50, bandwidth_unit="GB/s")  # doctest: +SKIP
    """

    def __init__(self, *, job: Job | None = None, **asked: Any) -> None:
        check_options("CommunicationCalculator", asked, CommunicationInputs.class_own_traits())
        self._of_job: tuple[Worth, CommunicationQuestion] | None = None
        worth = None if job is None else _worth_of_job(job)
        CommunicationInputs.__init__(
            self, **({} if worth is None or job is None else _inputs(job, worth)) | asked
        )
        super().__init__()
        self._is_stale: set[str] = set()
        self.controls = make_controls(self)
        self.ways = Ways(self)
        if worth is not None:
            self._of_job = worth, self.question
        self.views = make_views(self._worth)
        self.status, self.problem, self.table = (widgets.HTML() for _ in range(3))
        self.tabs = widgets.Tab(list(self.views.values()), titles=tuple(self.views))
        self._guard = Guard(lambda problem: setattr(self.problem, "value", problem))
        self._arrange()
        self.observe(self._guard.callback(self.draw), [*CommunicationInputs.class_own_traits()])
        self.tabs.observe(self._guard.callback(self._draw_tab), "selected_index")
        self.draw()

    def _arrange(self) -> None:
        left = panel(self, self.controls, self.ways)
        bar = classed(widgets.VBox([self.status]), "ss-stay")
        right = widgets.VBox([self.problem, self.tabs, self.table, widgets.HTML(note_html(_SYMBOLS))])
        frame = _Frame(title="Communication Calculator", about=ABOUT)
        t.dlink((self, "op"), (frame, "subject"))
        frame.offer_copy(self, [*CommunicationInputs.class_own_traits()])
        self.children = (frame, bar, columns(left, right))
        classed(self, "ss-lab", "ss-comm")

    def _kept(self) -> list[widgets.Widget | str]:
        return [self.status, self.problem, self.tabs, self.table]

    def draw(self) -> None:
        """Recompute the results and redraw the visible tab; hidden tabs are redrawn when they are next shown."""
        self.problem.value = ""
        self._is_stale = set(self.views)
        self._draw_tab()  # first, because a figure takes longest to draw
        found = answers(self.question)
        self.table.value = answers_html(found)
        self.status.value = status_html(f"{_first_text(found)}{self._in_words()}.")

    def _draw_tab(self) -> None:
        shown = list(self.views)[self.tabs.selected_index or 0]
        if shown in self._is_stale:
            self.views[shown].show(self.question)
            self._is_stale.discard(shown)

    def _worth(self, question: CommunicationQuestion) -> Worth | None:
        """Return the steps with and without compression: those of the job, until the workers' step is changed."""
        if self._of_job is not None and _is_same_step(self._of_job[1], question):
            return self._of_job[0].at(question.bandwidth)
        return worth_of(question) if question.op == "all_reduce" else None

    def _in_words(self) -> str:
        question = self.question
        rate = f"{bytes_text(question.bandwidth)}/s each way ({question.bandwidth * 8 / 1e9:.4g} Gbit/s)"
        what = f"{self.op.replace('_', '-')} of {bytes_text(self.num_bytes)}"
        return f"{what} among {plural(self.workers, 'worker')}, {rate}, {duration_text(question.latency)} per message"


_SYMBOLS = (
    "In formulas, S is the size of the message, W the number of workers, α the latency, B the bandwidth, and γ the "
    "rate at which a worker adds bytes, which is unlimited here."
)


def _worth_of_job(job: Job) -> Worth:
    from shardscope.measure.compression.speedup import compression_speedup  # needs torch

    return compression_speedup(job)


def _inputs(job: Job, worth: Worth) -> dict[str, Any]:
    """Return the calculator's inputs for a job."""
    share = 2 * (job.world_size - 1) / job.world_size  # of the gradient, sent by each rank of a ring
    return {
        "op": "all_reduce", "workers": job.world_size, "num_bytes": worth.plain.sent_bytes / share,
        "bandwidth": worth.link.bandwidth / UNITS["Gbit/s"], "bandwidth_unit": "Gbit/s",
        "latency_us": 1e6 * worth.link.latency_s, "compute_ms": float(f"{1e3 * worth.plain.compute_s:.4g}"),
    }  # fmt: skip


def _is_same_step(of_job: CommunicationQuestion, question: CommunicationQuestion) -> bool:
    """Return whether inputs still describe the step of a job, whose bandwidth may differ."""
    fields = ("op", "workers", "latency", "compute_s")
    is_same = all(getattr(of_job, name) == getattr(question, name) for name in fields)
    return is_same and isclose(of_job.num_bytes, question.num_bytes, rel_tol=_HALF_A_STEP)


_HEADERS = (
    "Algorithm",
    "Time",
    "Latency share",
    "Busiest worker sends",
    "Busiest link, one direction",
    "Vs fastest",
)


class Answer(NamedTuple):
    """Times in seconds and traffic in bytes of one algorithm for the current values of the controls.

    `sent_bytes` is the traffic of the busiest worker, `carried_bytes` that of the busiest link in one direction.
    """

    algorithm: str
    seconds: float
    latency_s: float
    sent_bytes: float
    carried_bytes: float


def answers(question: CommunicationQuestion) -> list[Answer]:
    """Return the results of the algorithms that can run with these inputs, fastest first."""
    found = []
    for name in question.algorithms:
        own: dict[str, Any] = {"op": question.op, "algorithm": name, **question.options.get(name, {})}
        own |= {"num_bytes": question.num_bytes, "workers": question.workers, **question.link}
        try:
            outcome = comm.collective_outcome(**own)
        except SpecError:
            continue
        values = (outcome.seconds, outcome.latency_s, outcome.sent_bytes, outcome.carried_bytes)
        found.append(Answer(name, *map(float, values)))
    return sorted(found, key=lambda answer: answer.seconds)


def _first_text(found: list[Answer]) -> str:
    """Return the start of a sentence that names the fastest algorithm and its time; empty if none can run."""
    if not found:
        return ""
    name = title(found[0].algorithm)
    is_fastest = " is the fastest" if found[1:] else ""
    return f"{name[0].upper()}{name[1:]}{is_fastest}, {duration_text(found[0].seconds)}: "


def answers_html(found: list[Answer]) -> str:
    """Return the results as an HTML table, with the fastest algorithm in bold."""
    if not found:
        return ""
    least = found[0].seconds
    fastest = {at: ' class="ss-fastest"' for at, answer in enumerate(found) if answer.seconds == least}
    return Table(_HEADERS, [_row(answer, least) for answer in found]).html("ss-table", fastest)


def _row(answer: Answer, least: float) -> list[str]:
    return [
        title(answer.algorithm),
        duration_text(answer.seconds),
        f"{answer.latency_s / answer.seconds:.0%}" if answer.seconds else "",
        bytes_text(answer.sent_bytes),
        bytes_text(answer.carried_bytes),
        f"{answer.seconds / least:.3g} ×" if least > 0 else "",
    ]
