"""Output of a finished study: the Pareto front as a table and the report, or both as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardscope.commands._table import aligned
from shardscope.tuning.progress import settings_text, value_text

if TYPE_CHECKING:
    from shardscope.tuning.records import TrialRecord
    from shardscope.tuning.session import StudySession


def as_text(session: StudySession, records: Sequence[TrialRecord]) -> str:
    """Return the Pareto front as a table, the report, and where the study is stored."""
    report = session.report()
    names, front = session.definition.objectives, report.front
    rows = [
        [str(one.number), *(value_text(n, (one.values or {})[n]) for n in names), settings_text(one.params)]
        for one in front
    ]
    parts = [aligned(["trial", *names, "settings"], rows)] if rows else []
    if records:
        parts.append(str(report))
    parts.append(
        f"The study is stored in {session.where}\nOpen it in Optuna Dashboard: {session.dashboard_command()}"
    )
    return "\n\n".join(parts)


def as_dict(session: StudySession, records: Sequence[TrialRecord]) -> dict[str, Any]:
    """Return the study, its Pareto front and its trials as a JSON object."""
    report = session.report()
    front = {record.number for record in report.front}
    return {
        "study": report.name, "where": session.where, "dashboard": session.dashboard_command(),
        "trials_wanted": session.driver.trials, "objectives": list(session.definition.objectives),
        "states": dict(report.states), "samplers": dict(report.samplers), "batches": report.batches,
        "verdict": report.verdict, "front": sorted(front), "front_by_noise": list(report.by_noise),
        "trials": [
            {
                "number": record.number, "state": record.state, "counted": record.counted,
                "params": dict(record.params), "values": dict(record.values or {}), "reason": record.reason,
                "alarms": list(record.alarms), "origin": record.origin, "sampler": record.sampler, "run": record.run,
            }
            for record in records
        ],
    }  # fmt: skip
