"""Fill a form from a job."""

from __future__ import annotations

from typing import Any

from shardscope.spec import Job, UserCode
from shardscope.spec.units import bit_rate_text, seconds_text
from shardscope_widgets.job_form.choices import AS_IT_IS, KINDS, NO_LATENCY
from shardscope_widgets.job_form.families import options_of
from shardscope_widgets.job_form.topics import OPTIONS, all_names


def choices_of(job: Job) -> dict[str, Any]:
    """Return the trait values with which a form describes `job`.

    Fields of a job without a control are left out.
    """
    places = (job, job.batch, job.record)
    found = {
        name: getattr(place, name)
        for name in all_names()
        for place in places
        if name not in {*OPTIONS, *KINDS} and name in type(place).model_fields
    }
    for kind in KINDS:
        method = getattr(job, kind)
        found |= {kind: method.name, f"{kind}_options": options_of(method)}
    shares = job.batch.shares
    return found | {
        "model": _plain(job.model), "data": _plain(job.data), "micro_batch": job.batch.micro_batch or 0,
        "shares": ", ".join(map(str, shares)) if isinstance(shares, tuple) else shares or "",
        "optimizer": job.optimizer.name, "lr": job.optimizer.lr,
        "bandwidth": AS_IT_IS if job.link is None else bit_rate_text(job.link.bandwidth),
        "checkpoint_every": job.checkpoint.every if isinstance(job.checkpoint.every, int) else 0,
        "restarts": 0 if job.recovery is None else job.recovery.restarts,
        "elastic": "" if job.elastic is None else job.elastic.label,
        "latency": NO_LATENCY if job.link is None else seconds_text(job.link.latency_s),
    }  # fmt: skip


def _plain(value: Any) -> Any:
    return value.function if isinstance(value, UserCode) else value
