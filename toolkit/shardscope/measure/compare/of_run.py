"""The comparison of a run with its prediction.

Both sides use the same names and cover the same steps and ranks. A term that only one side has is left out, and the
notes say why.
"""

from __future__ import annotations

from shardscope.errors import RunUnreadable, ShardscopeError, SpecError
from shardscope.measure.compare.comparison import Comparison
from shardscope.measure.compare.memory import memory_rows
from shardscope.measure.compare.parts import time_rows
from shardscope.measure.compare.traffic import traffic_rows
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.observed import ObservedPrediction
from shardscope.prediction.predict import predict
from shardscope.runlog.spans import finished_steps
from shardscope.runtime import Run
from shardscope.runtime.preflight import preflight
from shardscope.spec.cluster import Cluster
from shardscope.spec.observed import ObservedJob

_NOT_PREDICTED = (
    "This run cannot be compared: its job cannot be predicted here, for example because its model, data or loss is "
    "your own."
)


def compare(
    run: Run, cluster: Cluster | None = None, *, prediction: JobPrediction | ObservedPrediction | None = None
) -> Comparison:
    """Compare a run with its prediction, term by term: traffic, memory by kind, and step time by part.

    Bytes and messages are means over the newest steps after the warm-up, each of which is predicted separately. Memory
    is from the newest step that measured it by kind. Times are medians. A run that is still running is compared up to
    its newest step. For a training loop that `ss.observe` recorded, bytes and model states are compared.

    Args:
        run: A run with at least one finished step.
        cluster: The cluster on which it ran, one device per rank; None for this machine.
        prediction: A prediction of the run's job, for example with a calibration; None predicts it now.

    Raises:
        RunUnreadable: No step has been finished by all ranks.
        SpecError: The prediction is for another number of ranks, or the job cannot be predicted: its model or loss is a
            function that does not exist in this process, or cannot be traced on shapes.

    Example:
        >>> run = ss.launch(ss.Job(model="mlp", data="digits", strategy="ring", world_size=2)).wait()  # doctest: +SKIP
        >>> compare(run)["bytes", "ring_all_reduce"].agrees  # doctest: +SKIP
        True
    """
    events = run.events()
    steps = finished_steps(events, run.job.world_size)
    if not steps:
        raise RunUnreadable(
            f"run {run.id} has nothing to compare: no step has been finished by all ranks; wait for one"
        )
    if prediction is None:
        prediction = predict(run.job, cluster)
    if prediction.job.world_size != run.job.world_size:
        raise SpecError(
            f"prediction is for {prediction.job.world_size} ranks, but run {run.id} has {run.job.world_size}; use "
            "ss.predict(run.job)"
        )
    notes: list[str] = []
    rows = [
        *traffic_rows(prediction, steps, notes),
        *memory_rows(prediction, events, steps, notes),
    ]
    where = "this machine"
    if isinstance(prediction, JobPrediction):
        rows += time_rows(prediction, steps, notes)
        where = where if prediction.cluster is None else prediction.cluster.name
    else:
        notes.append("Step time is left out: it is not predicted for an observed training loop.")
    return Comparison(run.id, run.name, where, tuple(rows), tuple(notes))


def comparison_or_reason(run: Run) -> Comparison | str:
    """Return the comparison of a finished run with its prediction, or a sentence on why there is none.

    The job is traced by the process that launches runs, as it is before a run starts, so torch is not imported here.
    """
    try:
        if isinstance(run.job, ObservedJob):
            return compare(run)
        prediction = preflight(run.job, timed=False).prediction
        return _NOT_PREDICTED if prediction is None else compare(run, prediction=prediction)
    except ShardscopeError as error:
        return str(error)
