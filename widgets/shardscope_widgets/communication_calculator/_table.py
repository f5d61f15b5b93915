"""A table of the results for the current values of the controls, fastest algorithm first."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardscope.analytic import communication as comm
from shardscope.errors import SpecError
from shardscope.show import Table
from shardscope_widgets.figures._communication import CommunicationQuestion
from shardscope_widgets.figures._communication_look import title
from shardscope_widgets.words import bytes_text, duration_text

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
