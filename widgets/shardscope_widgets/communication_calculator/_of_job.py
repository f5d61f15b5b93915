"""A job's step in the calculator: its inputs immediately, and its curve once a thread has timed compression."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from typing import TYPE_CHECKING, Any

from shardscope.errors import ShardscopeError
from shardscope.measure.compression.curve import Worth
from shardscope_widgets.communication_calculator._asked import UNITS, CommunicationInputs
from shardscope_widgets.figures._communication import CommunicationQuestion
from shardscope_widgets.kit.background import Background

if TYPE_CHECKING:
    from shardscope.spec import Job

_HALF_A_STEP = 0.05
"""Largest relative error of the message size when the slider rounds it to one of 24 positions per decade."""
_WORKING = "Timing compression on this machine"


class JobStep(Background):
    """The step of a job.

    Args:
        job: The job.
        on_found: Called in the thread that timed compression, when it is done.

    Attributes:
        inputs: The calculator's inputs for the job.

    Raises:
        SpecError: Compression cannot be predicted for the job.
    """

    def __init__(self, job: Job, on_found: Callable[[], None]) -> None:
        from shardscope.measure.compression.speedup import compression_speedup  # needs torch

        self._job, self._on_found = job, on_found
        self._found: Worth | str = _WORKING
        plain = compression_speedup(job.replace(compression="none"), methods="none", runs=())  # packs nothing
        self.inputs = _inputs(job, plain)
        self._question = CommunicationInputs(**self.inputs).question

    def is_asked(self, question: CommunicationQuestion) -> bool:
        """Return whether inputs describe the step of the job, apart from the bandwidth."""
        fields = ("op", "workers", "latency", "compute_s")
        is_same = all(getattr(self._question, name) == getattr(question, name) for name in fields)
        return is_same and isclose(self._question.num_bytes, question.num_bytes, rel_tol=_HALF_A_STEP)

    def at(self, bandwidth: float) -> Worth | str:
        """Return the steps on a link, or why there are none yet; the first call starts timing."""
        if self._thread is None:
            self._start(self._work, name="packing")
        found = self._found
        return found if isinstance(found, str) else found.at(bandwidth)

    def time_again(self) -> None:
        """Forget the compression times, so that the next call of `at` times again, unless they are being timed."""
        from shardscope.measure.compression.codecs import forget_timings

        if not self._is_busy:
            forget_timings()
            self._thread, self._found = None, _WORKING

    def _work(self) -> None:
        from shardscope.measure.compression.speedup import compression_speedup

        try:
            self._found = compression_speedup(self._job)
        except ShardscopeError as error:
            self._found = str(error)
        except Exception as error:  # noqa: BLE001 - nobody sees an error of a thread
            self._found = f"{type(error).__name__}: {error}"
        self._on_found()


def _inputs(job: Job, worth: Worth) -> dict[str, Any]:
    """Return the calculator's inputs for a job."""
    share = 2 * (job.world_size - 1) / job.world_size  # of the gradient, sent by each rank of a ring
    return {
        "op": "all_reduce", "workers": job.world_size, "num_bytes": worth.plain.sent_bytes / share,
        "bandwidth": worth.link.bandwidth / UNITS["Gbit/s"], "bandwidth_unit": "Gbit/s",
        "latency_us": 1e6 * worth.link.latency_s, "compute_ms": float(f"{1e3 * worth.plain.compute_s:.4g}"),
    }  # fmt: skip
