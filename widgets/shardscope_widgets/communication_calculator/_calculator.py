"""The calculator widget: controls on the left, results on the right, and the callbacks between them."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import ipywidgets as widgets
import traitlets as t

from shardscope.analytic import communication as comm
from shardscope.errors import SpecError
from shardscope.measure.compression.curve import Worth
from shardscope.show import Table
from shardscope_widgets.communication_calculator._asked import CommunicationInputs
from shardscope_widgets.communication_calculator._controls import Ways, make_controls, panel
from shardscope_widgets.communication_calculator._of_job import JobStep
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

OVER_A_RING = "Over a ring"
ABOUT = (
    "time and traffic of collectives, from formulas; hover over a curve for its formula, inputs and source"
)


class _Frame(Frame):
    _css = LAB_CSS + files(__package__).joinpath("calculator.css").read_text(encoding="utf-8")


class CommunicationCalculator(Still, widgets.VBox, CommunicationInputs):  # type: ignore[misc]
    """Compare collective algorithms: time and traffic by message size and number of workers, crossovers, efficiency.

    Every trait of `CommunicationInputs` can be passed here or set later: ``calculator.workers = 256``.

    Args:
        job: A job whose gradients, ranks, link and compute time are the initial values, and whose compression is
            predicted by `ss.compression_speedup` when the tab is first opened, and shown until an input other than the
            bandwidth is changed; None for the defaults.
        asked: Initial values of traits, for example ``num_bytes=1e9, bandwidth=400, bandwidth_unit="Gbit/s"``.

    Raises:
        SpecError: A value is out of range or unknown, or compression cannot be predicted for the job.
        TypeError: `CommunicationInputs` has no trait with one of these names.

    Example:
        >>> CommunicationCalculator(workers=256, bandwidth=50, bandwidth_unit="GB/s")  # doctest: +SKIP
    """

    def __init__(self, *, job: Job | None = None, **asked: Any) -> None:
        check_options("CommunicationCalculator", asked, CommunicationInputs.class_own_traits())
        self._guard = Guard(lambda problem: setattr(self.problem, "value", problem))
        self._of_job = None if job is None else JobStep(job, self._guard.callback(self._draw_compression))
        CommunicationInputs.__init__(self, **({} if self._of_job is None else self._of_job.inputs) | asked)
        super().__init__()
        self._is_stale: set[str] = set()
        self.controls = make_controls(self)
        self.ways = Ways(self)
        self.views = make_views(self._worth)
        self.status, self.problem, self.table = (widgets.HTML() for _ in range(3))
        self.tabs = widgets.Tab(list(self.views.values()), titles=tuple(self.views))
        self.again = widgets.Button(description="Time compression again", icon="refresh")
        self.again.tooltip = "Measure the time of compression again, in case other programs slowed it down"
        self.again.on_click(self._guard.callback(self._time_again))
        self.views["Compression"].children += (self.again,)
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
        if self._of_job is None:  # code with these inputs alone would give another curve than the job's
            frame.offer_copy(self, [*CommunicationInputs.class_own_traits()])
        self.children = (frame, bar, columns(left, right))
        classed(self, "ss-lab", "ss-comm")

    def _kept(self) -> list[widgets.Widget | str]:
        return [self.status, self.problem, self.tabs, self.table]

    def draw(self) -> None:
        """Recompute the results and redraw the visible tab; hidden tabs are redrawn when they are next shown."""
        self.problem.value = ""
        self._is_stale = set(self.views)
        self.controls["memory_bandwidth"].disabled = self._shows_job(self.question)
        self.again.layout.display = None if self._shows_job(self.question) else "none"
        self._draw_tab()

    def _draw_tab(self) -> None:
        shown = list(self.views)[self.tabs.selected_index or 0]
        if shown in self._is_stale:
            self.views[shown].show(self.question)  # first, because a figure takes longest to draw
            self._is_stale.discard(shown)
        self._answer(self._worth(self.question) if shown == "Compression" else None)

    def _answer(self, worth: Worth | str | None) -> None:
        """Say what the open tab answers: where compression pays off, over a ring, or which algorithm is the fastest."""
        self.table.layout.display = None if worth is None else "none"
        if worth is None:
            found = answers(self.question)
            self.table.value = answers_html(found)
            self.status.value = status_html(f"{_first_text(found)}{self._in_words()}.")
        else:
            first = f"{worth}." if isinstance(worth, str) else worth.limit
            self.status.value = status_html(f"{first} {OVER_A_RING}: {self._in_words()}.")

    def _draw_compression(self) -> None:
        self._is_stale.add("Compression")
        self._draw_tab()

    def _time_again(self) -> None:
        if self._of_job is not None:
            self._of_job.time_again()
            self._draw_compression()

    def _shows_job(self, question: CommunicationQuestion) -> bool:
        """Return whether the job's own step, with timed compression, is shown; False once its inputs are changed."""
        return self._of_job is not None and self._of_job.is_asked(question)

    def _worth(self, question: CommunicationQuestion) -> Worth | str:
        """Return the steps with and without compression, or why there are none."""
        if self._of_job is not None and self._shows_job(question):
            return self._of_job.at(question.bandwidth)
        if question.op != "all_reduce":
            return "Compressed gradients are exchanged by an all-reduce"
        return worth_of(question)

    def _in_words(self) -> str:
        question = self.question
        rate = f"{bytes_text(question.bandwidth)}/s in each direction ({question.bandwidth * 8 / 1e9:.4g} Gbit/s)"
        what = f"{self.op.replace('_', '-')} of {bytes_text(self.num_bytes)}"
        return f"{what} among {plural(self.workers, 'worker')}, {rate}, {duration_text(question.latency)} of latency"


_SYMBOLS = (
    "In formulas, S is the message size, W the number of workers, α the latency and B the bandwidth. γ is the rate at "
    "which a worker sums bytes, which is unlimited here."
)


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

    `sent_bytes` is the traffic of the busiest worker, `carried_bytes` is the traffic of the busiest link in
    one direction.
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
    return f"{name[0].upper()}{name[1:]}{is_fastest}, at {duration_text(found[0].seconds)}: "


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
