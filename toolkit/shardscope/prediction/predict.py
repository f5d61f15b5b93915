"""The entry point `predict`, which predicts a job or a layout of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from shardscope.calibration.host_calibration import AnyCalibration
from shardscope.errors import SpecError, require
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.prediction.layout import Prediction, predict_layout
from shardscope.prediction.observed import ObservedPrediction
from shardscope.spec import Job
from shardscope.spec.cluster import Cluster, EmulatedCluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import LayerTable, Model, Transformer
from shardscope.spec.observed import ObservedJob


@overload
def predict(job: ObservedJob) -> ObservedPrediction: ...  # type: ignore[overload-overlap]
@overload
def predict(
    job: Job,
    cluster: Cluster | EmulatedCluster | None = None,
    *,
    calibration: AnyCalibration | None = None,
    software: str | None = None,
    expert_loads: Sequence[Sequence[float]] | None = None,
) -> JobPrediction: ...
@overload
def predict(
    job: Transformer | LayerTable | str,
    cluster: Cluster,
    layout: Layout,
    calibration: AnyCalibration | None = None,
    *,
    software: str | None = None,
) -> Prediction: ...
def predict(
    job: Job | Transformer | LayerTable | str,
    cluster: Cluster | EmulatedCluster | None = None,
    layout: Layout | None = None,
    calibration: AnyCalibration | None = None,
    *,
    software: str | None = None,
    expert_loads: Sequence[Sequence[float]] | None = None,
) -> JobPrediction | Prediction | ObservedPrediction:
    """Predict bytes sent, memory and step time of a job, or memory and step time for a layout of a large model.

    Args:
        job: A job. If `layout` is given, a transformer, its name, or a traced module that is a transformer. Or the
            ``run.job`` of a training loop recorded by `ss.observe`, for which traffic and model states are predicted.
        cluster: The cluster to train on; the layout, or the job's ranks, must use all of its devices. For a job, None
            means this machine, and an emulated cluster (`ss.Cluster.emulated`) its cores with emulated links.
        layout: The layout of the model; omit it for a job.
        calibration: The cluster's constants; None to use the constants of its device and the software. If
            these were never measured together, the constants of similar devices and software are used:
            `Calibration.note` says so, and the `interval` of the prediction is wider. For this machine and
            for emulated clusters, a `HostCalibration`; None to use the one that `ss.calibrate` has saved, or
            else the one that ships with Shardscope, scaled by the speed of this machine.
        software: Name of the framework that runs the layout on GPUs, such as ``"megatron-core"`` or
            ``"fsdp2"``: it determines constants and memory. None for the calibration's software, or else the
            software that the layout suggests: DeepSpeed with offload, FSDP2 with ZeRO 2 or 3, Megatron-Core
            otherwise. Jobs run on plain PyTorch.
        expert_loads: Fraction of the choices of tokens that each expert gets and keeps, by layer with experts, or one
            row for all layers, for a job with an expert axis: the step then waits for the rank with the fullest
            experts. ``run.reduced().experts.loads`` has those of a run. None for an even load.

    Example:
        >>> import shardscope as ss
        >>> found = ss.predict(ss.Job(model="mlp", data="digits", strategy="ring", world_size=4))
        >>> found.sent_bytes.tolist()
        [260408, 260412, 260416, 260412]

    Raises:
        SpecError: The job or layout does not use exactly the cluster's devices, the model or batch cannot be divided as
            the layout specifies, or the job's model cannot be traced.
    """
    known = Model.of(job) if isinstance(job, str) and layout is not None else job
    if isinstance(known, LayerTable):
        known = known.as_transformer or known
    if not isinstance(known, Job | Transformer):
        require(known, Job, by="predict", write="ss.predict(ss.Job(...))")
    if isinstance(known, ObservedJob):
        if (cluster, layout, calibration, software) != (None,) * 4:
            raise SpecError(
                "an observed training loop can be predicted only for the ranks on which it ran; omit cluster, layout, "
                "calibration and software"
            )
        return ObservedPrediction(known)
    is_emulated = isinstance(known, Job) and isinstance(cluster, EmulatedCluster)
    is_needed = cluster is not None or not isinstance(known, Job)
    if is_needed and not is_emulated and not isinstance(cluster, Cluster):
        require(cluster, Cluster, by="predict", write="ss.Cluster.of('a100-80gb', nodes=...)")
    if isinstance(known, Job):
        if layout is not None:
            raise SpecError(
                "layout has no effect on a job, whose strategy determines job.layout(); omit it, or give a Transformer"
            )
        found = predict_job(known, cluster, calibration, software=software)
        return found if expert_loads is None else found.with_expert_loads(expert_loads)
    if expert_loads is not None:
        raise SpecError("expert_loads has no effect on a layout; omit it, or give a job with an expert axis")
    if not isinstance(layout, Layout):
        require(layout, Layout, by="predict", write="ss.Layout(...)")
    assert isinstance(known, Transformer)
    assert isinstance(cluster, Cluster)
    assert layout is not None
    return predict_layout(known, cluster, layout, calibration, software=software)
