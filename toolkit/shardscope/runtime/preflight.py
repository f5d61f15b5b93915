"""Before a job starts on this machine: whether it fits, and about how long it takes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from shardscope.analytic.show import figure
from shardscope.machine import nvml_works, usable_memory_bytes
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.prediction.traced import Traced, traced
from shardscope.runtime.driver_server import trace_on_server
from shardscope.spec import Job
from shardscope.spec.user_code import UserCode

AGENT_BYTES = 200e6
RANK_BYTES = 80e6
"""What the agent and a rank of a tiny model take: proportional set size, measured on Linux with 4 ranks."""


@dataclass(frozen=True)
class Preflight:
    """What is known of a job before it starts; `prediction` is None where nothing could be predicted."""

    prediction: JobPrediction | None

    @property
    def whole_bytes(self) -> float | None:
        """Of all processes together, interpreters and libraries included; None where nobody knows."""
        found = self.prediction
        if found is None or found.by_rank is None:
            return None
        held = sum(term.value for term in found.by_rank)
        return AGENT_BYTES + found.job.world_size * RANK_BYTES + held

    @property
    def refusal(self) -> str | None:
        """Why it will not fit in this machine's memory, as a clause; None where it does, or nobody knows."""
        whole, room = self.whole_bytes, usable_memory_bytes()
        if whole is None or whole <= room:
            return None
        return (
            f"it would take {figure(whole, 'bytes')} of the {figure(room, 'bytes')} that this machine has for it; use "
            "a smaller batch, smaller micro-batches, fewer ranks or a higher ZeRO stage"
        )

    def __str__(self) -> str:
        """One line, such as ``about 12 s, and 370 MiB of memory in all``."""
        if self.prediction is None:
            return "nothing could be predicted"
        held = (
            "" if self.whole_bytes is None else f", and {figure(self.whole_bytes, 'bytes')} of memory in all"
        )
        return f"about {_about(self.prediction.run_time_s)}{held}"


def preflight(job: Job) -> Preflight:
    """Look at a job before it starts; nothing is refused here, and what cannot be predicted is not."""
    if not _is_predictable(job):
        return Preflight(None)
    try:
        return Preflight(predict_job(job, trace=_trace))
    except Exception:  # of the user's code, whatever it may be: its ranks will tell
        return Preflight(None)


def _trace(job: Job) -> Traced:
    return traced(job, trace_on_server, builds=False)


def _is_predictable(job: Job) -> bool:
    """On CPUs, without running code of the user's but that which builds a model where torch is loaded anyway."""
    codes = job.user_code
    if any(isinstance(code, UserCode) and place != "model" for place, code in codes.items()):
        return False
    if codes and "torch" not in sys.modules:
        return False
    return job.device == "cpu" or (job.device == "auto" and not nvml_works())


def _about(seconds: float) -> str:
    """A rounded time: ``40 s``, ``3 min``, ``2 h``."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"
