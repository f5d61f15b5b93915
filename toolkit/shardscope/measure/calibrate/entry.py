"""The entry point `shardscope.calibrate`: measure this machine, or fit to measured steps of a GPU cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import overload

from shardscope.calibration.calibration import Calibration
from shardscope.calibration.host_calibration import AnyCalibration, HostCalibration
from shardscope.errors import SpecError, require
from shardscope.measure.calibrate.calibrate import Told, calibrate_machine
from shardscope.measure.calibrate.of_rows import calibrate_rows
from shardscope.measure.calibrate.tables import Rows
from shardscope.runtime import Run
from shardscope.spec.cluster import Cluster, EmulatedCluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Model


@overload
def calibrate(
    cluster: EmulatedCluster | Run | None = None,
    *,
    runs: Run | Iterable[Run] | None = None,
    prior: HostCalibration | None = None,
    save: bool = True,
    progress: Told | None = None,
) -> HostCalibration: ...
@overload
def calibrate(
    cluster: Cluster | None = None,
    *,
    rows: Rows,
    model: Model | str | None = None,
    layout: Layout | None = None,
    software: str | None = None,
    prior: Calibration | None = None,
) -> Calibration: ...
def calibrate(
    cluster: Cluster | EmulatedCluster | Run | None = None,
    *,
    rows: Rows | None = None,
    runs: Run | Iterable[Run] | None = None,
    prior: AnyCalibration | None = None,
    model: Model | str | None = None,
    layout: Layout | None = None,
    software: str | None = None,
    save: bool = True,
    progress: Told | None = None,
) -> HostCalibration | Calibration:
    """Measure the constants of this machine, or fit those of a GPU cluster to measured step times.

    **This machine**, or a cluster emulated on it, takes less than a minute. Short real runs of small jobs are launched:
    on 1, 2 and 4 ranks, through shared memory and over TCP, or on the cluster. The constants of `ss.predict` are fitted
    to the measured times of steps and their parts. Each constant has an interval that contains 90 % of repeated
    measurements; errors are measured on jobs left out of the fit. Keep the machine idle in the meantime: load by other
    programs makes the fitted constants too slow. Calibrate the machine before an emulated cluster, whose runs hardly
    determine the constants of computation.

    **A GPU cluster** is calibrated with `rows`, the step times that you measured on it. One row mainly changes the
    scale of all times; more rows change more constants, each as far as the rows determine it. With three or more
    configurations, the result has cross-validated errors, and its outliers are listed with their weights; rows that
    differ only in the batch count as one configuration. With twelve or more, it may also contain factors for shapes of
    layers that take longer. Pass the result to `ss.predict` and `ss.plan`.

    Args:
        cluster: An emulated cluster, or a GPU cluster for `rows`; None for this machine, or if the rows have a column
            ``device``. A run given here is used as `runs`.
        rows: The path of a CSV or JSON file or of a log of Megatron-LM, Megatron-DeepSpeed or torchtitan, a data
            frame, or dictionaries. Columns are the fields of `ss.Layout`, and one of ``step_time_s``, ``step_time_ms``,
            ``tokens_per_s`` and ``tokens_per_s_per_device``; optionally ``model``, ``seq``, ``device``, ``per_node``,
            ``software`` and ``label``. Rows may use fewer devices than the cluster has. A log counts from the third
            logged step after each start, with the batch of its arguments; a log of torchtitan needs `model` and
            `layout`.
        runs: Finished runs of your own on this machine, to refine `prior` without further measurements.
        prior: Calibration to refine; None to use the saved calibration, or the one that ships with Shardscope; for
            `rows`, the calibration of their device and software. Rows that it was fitted to are kept, and cannot be
            given again.
        model: Model of all `rows` without a column ``model``.
        layout: Settings of all `rows`; columns override them.
        software: Software of all `rows` without a column ``software``; None for the software in the log, or
            else the software that the layouts suggest.
        save: Whether predictions for this machine, or for this cluster, use the result from now on. It is saved in
            ``$SHARDSCOPE_CACHE`` or ``~/.cache/shardscope``, for this user only. Calibrations of GPU clusters are not
            saved; use ``calibration.save("mine.json")``.
        progress: Function that is called before each probe with its number from 1, the number of probes, and the
            probe's name.

    Raises:
        SpecError: `cluster` is not an emulated cluster or has a single device, a run cannot be used, or a row lacks a
            column, has an unknown column, or is from a different cluster than the other rows.
        DataError: The calibration cannot be saved; nothing has been measured yet.
        LaunchError: The cluster cannot be emulated here, or a run cannot be started.
        RunFailed: A rank of a probe failed.

    Example:
        >>> import shardscope as ss
        >>> ss.calibrate()  # doctest: +SKIP
        >>> ss.predict(ss.Job(model="mlp", data="digits", world_size=2)).interval  # doctest: +SKIP
        >>> cluster = ss.Cluster.of("a100-80gb", nodes=2)
        >>> row = {"data": 2, "tensor": 8, "global_batch": 64, "step_time_s": 21.5}
        >>> mine = ss.calibrate(cluster, rows=[row], model="llama-2-13b")
        >>> layout = ss.Layout(data=2, tensor=8, global_batch=64)
        >>> round(ss.predict("llama-2-13b", cluster, layout, calibration=mine).step_time_s)
        21
    """
    if rows is not None:
        _check_for_rows(cluster, runs, prior)
        assert isinstance(cluster, Cluster | None)
        assert isinstance(prior, Calibration | None)
        return calibrate_rows(
            rows, cluster=cluster, model=model, layout=layout, software=software, prior=prior
        )
    for name, given in (("model", model), ("layout", layout), ("software", software)):
        if given is not None:
            raise SpecError(
                f"{name} has no effect without rows; give rows=[...] of measured steps, or omit {name}"
            )
    if cluster is not None and not isinstance(cluster, Run):
        require(cluster, EmulatedCluster, by="calibrate", write=_WITHOUT_ROWS)
    if prior is not None:
        require(prior, HostCalibration, by="calibrate", write="a calibration from ss.calibrate()")
    assert isinstance(cluster, EmulatedCluster | Run | None)
    assert isinstance(prior, HostCalibration | None)
    return calibrate_machine(cluster, runs=runs, prior=prior, save=save, progress=progress)


_WITHOUT_ROWS = (
    "ss.Cluster.emulated(nodes=4), no cluster, or rows=[...] of steps that you measured on a GPU cluster"
)


def _check_for_rows(cluster: object, runs: object, prior: object) -> None:
    if runs is not None:
        raise SpecError(
            "rows and runs cannot be combined: rows are from a GPU cluster, runs from this machine"
        )
    if cluster is not None:
        require(cluster, Cluster, by="calibrate(rows=...)", write="ss.Cluster.of('a100-80gb', nodes=2)")
    if prior is not None:
        require(
            prior, Calibration, by="calibrate(rows=...)", write="prior=ss.Calibration.of('a100-megatron')"
        )
