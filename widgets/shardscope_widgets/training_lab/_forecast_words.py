"""The prediction for a job in a few sentences: its time, bytes and memory, whether it fits, and what takes longest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.machine import usable_memory_bytes
from shardscope.prediction.job import beside_peak
from shardscope.runtime.launcher.preflight import about
from shardscope_widgets.words import bytes_text

if TYPE_CHECKING:
    from shardscope.analytic.terms import Term
    from shardscope.prediction.job import JobPrediction
    from shardscope.runtime.launcher.preflight import Preflight

_WAITING = "waiting for other stages"
_PARTS = {
    "computation": ("data", "forward", "backward", "optimizer"),
    "gradient compression": ("codec",),
    "communication": ("communication",),
    _WAITING: ("pipeline bubble",),
    "the fixed cost per step": ("fixed cost",),
}
"""Terms of a predicted step, by their name in sentences."""
_MOST = 0.5
_COMPARABLE = 0.5
"""Minimum waiting, as a fraction of the longest part of a step, at which the sentence mentions it too."""


def forecast_text(found: Preflight) -> str:
    """Return what will happen if a job is started, in two to four sentences.

    Example:
        >>> forecast_text(preflight(ss.Job(model="mlp", data="digits", strategy="ring")))  # doctest: +SKIP
        'About 1.2 s for 100 steps, once the ranks have started. Each rank sends 173.6 kB per step ...'
    """
    prediction = found.prediction
    if prediction is None:
        return (
            f"This job cannot be predicted: {found.problem}"
            if found.problem
            else "This job has functions of your own; predicting it calls them once in this kernel."
        )
    sentences = (_time(found, prediction), _bytes(prediction), _memory(found), dominant_text(prediction.time))
    return " ".join(filter(None, sentences))


def _time(found: Preflight, prediction: JobPrediction) -> str:
    if found.run_time_s is None:
        return f"The time is not predicted: {prediction.note}."
    text = f"{about(found.run_time_s)} for {prediction.job.last_step} steps"
    return f"{text[0].upper()}{text[1:]}, once the ranks have started."


def _bytes(prediction: JobPrediction) -> str:
    sent, peak = prediction.sent_bytes, prediction.held_bytes
    parts = []
    if prediction.job.world_size > 1 and sent is not None:
        least, most = bytes_text(int(sent.min())), bytes_text(int(sent.max()))
        parts.append(f"sends {most if least == most else f'{least} to {most}'} per step")
    if peak is not None:
        parts.append(f"needs {bytes_text(int(peak))} of memory at its peak{beside_peak(prediction)}")
    who = "Each rank" if prediction.job.world_size > 1 else "The process"
    return f"{who} {' and '.join(parts)}." if parts else ""


def _memory(found: Preflight) -> str:
    if found.memory is None:
        return ""
    total, room = bytes_text(int(found.memory.machine_bytes)), bytes_text(int(usable_memory_bytes()))
    return f"All processes together need {total} of the {room} of memory available on this machine."


def dominant_text(time: Term | None) -> str:
    """Return the sentence on the largest part of a step, and on waiting of similar size; empty without a prediction.

    The waiting is that of the rank that computes longest, and includes that for slower stages: it is less than the
    bubble of the schedule, which is the mean over ranks with stages of equal cost.
    """
    if time is None:
        return ""
    found = [each for part in time.parts for each in (part.parts if part.name == "idle" else (part,))]
    shares = {
        name: sum(part.value for part in found if part.name in terms) / time.value
        for name, terms in _PARTS.items()
    }
    name = max(shares, key=lambda name: shares[name])
    verb = (
        "takes most of the step time" if shares[name] >= _MOST else "takes the largest part of the step time"
    )
    is_near = name != _WAITING and shares[_WAITING] >= _COMPARABLE * shares[name]
    waiting = f", and {_WAITING} {shares[_WAITING]:.0%}" if is_near else ""
    where = ", on the rank that computes longest" if is_near or name == _WAITING else ""
    return f"{name[0].upper()}{name[1:]} {verb}: {shares[name]:.0%}{waiting}{where}."
