"""Alarms about the layers of the chosen trial, shown below its figures."""

from __future__ import annotations

from shardscope.tuning.measured import TrialMetrics
from shardscope_widgets.words import safe


def alarms_html(measured: TrialMetrics | None) -> str:
    """Return one line per alarm as HTML; empty if there are none."""
    alarms = () if measured is None else measured.alarms
    lines = "".join(f"<li>{safe(text[0].upper() + text[1:])}.</li>" for text in alarms)
    return f'<ul class="ss-alarms" aria-label="Alarms of this trial">{lines}</ul>' if lines else ""
