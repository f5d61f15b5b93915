"""Write a run's metrics to experiment trackers: TensorBoard, Weights & Biases, MLflow, each through its own library."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.runtime.export._library import library

if TYPE_CHECKING:
    from shardscope.runtime.record.run import Run

PROJECT = "shardscope"
"""Name of the project or experiment to which runs are exported."""
_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""Maximum numbers of metrics and of parameters that an MLflow server accepts in one request."""


class Figures(NamedTuple):
    """Metrics of one step, by name, and the time at which the last rank finished the step, in Unix seconds."""

    step: int
    t: float
    numbers: dict[str, float]


def figures_of(run: Run) -> list[Figures]:
    """Return the metrics of each step: the columns of `Run.metrics`, and the results of an evaluation after the step.

    Metrics that a step does not have are left out. Evaluations on the test split during training, which only runs from
    earlier versions contain, are left out too.
    """
    found: dict[int, Figures] = {}
    for row in run.metrics().to_dict("records"):
        step, t = int(row.pop("step")), float(row.pop("t"))
        found[step] = Figures(step, t, _finite(row))
    log = run.reduced()
    for each in (*log.evaluations, *([log.final] if log.final else [])):
        if each.step in found and (each.split != "test" or each is log.final):
            rows = {f"{each.split}_loss": each.loss, f"{each.split}_accuracy": each.accuracy}
            found[each.step].numbers.update(_finite(rows))
    return list(found.values())


def _finite(values: Mapping[Any, Any]) -> dict[str, float]:
    numbers = {str(name): float(value) for name, value in values.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def settings_of(run: Run) -> dict[str, str | int | float | bool]:
    """Return the settings of a run's job as one mapping, keyed as ``optimizer.lr``, without those that are None."""
    return dict(_flat(json.loads(run.job.to_json())))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, Mapping):
        for key, held in value.items():
            yield from _flat(held, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        yield name, json.dumps(value)
    elif value is not None:
        yield name, value


def write_tensorboard(run: Run, path: str | Path) -> str:
    """Write a run as TensorBoard event files into a folder, and return its path.

    Raises:
        SpecError: Neither tensorboard nor tensorboardX is installed.
    """
    modules = ("torch.utils.tensorboard", "tensorboardX")
    writers = library(*modules, package="tensorboard", format="tensorboard")
    with writers.SummaryWriter(str(path)) as writer:
        writer.add_text("job", f"```\n{run.job.to_json()}\n```")
        for step, t, values in figures_of(run):
            for name, value in values.items():
                writer.add_scalar(name, value, step, walltime=t)
    return str(path)


def write_wandb(run: Run, path: str | Path) -> str:
    """Write a run with Weights & Biases, and return the folder of its files. Offline unless WANDB_MODE says otherwise.

    Raises:
        SpecError: wandb is not installed.
    """
    wandb = library("wandb", package="wandb", format="wandb")
    Path(path).mkdir(parents=True, exist_ok=True)
    settings, mode = settings_of(run), os.environ.get("WANDB_MODE", "offline")
    with wandb.init(
        project=PROJECT, name=run.id, dir=str(path), config=settings, mode=mode, reinit="create_new"
    ) as tracked:
        for step, _, values in figures_of(run):
            tracked.log(values, step=step)
        return str(Path(tracked.dir).parent)


def write_mlflow(run: Run, path: str | Path) -> str:
    """Write a run to MLflow, and return the tracking URI.

    Args:
        run: The run.
        path: URI of a tracking server, or a folder, in which MLflow's database is created if there is none.

    Raises:
        SpecError: mlflow is not installed.
    """
    tracking = library("mlflow.tracking", package="mlflow", format="mlflow")
    entities = library("mlflow.entities", package="mlflow", format="mlflow")
    uri = _tracking_uri(path)
    client = tracking.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(PROJECT)
    place = client.create_experiment(PROJECT) if experiment is None else experiment.experiment_id
    figures = figures_of(run)
    times = [round(each.t * 1000) for each in figures]
    made = client.create_run(place, start_time=times[0] if times else None, run_name=run.id).info.run_id
    metrics = [
        entities.Metric(name, value, time, step)
        for (step, _, values), time in zip(figures, times, strict=True)
        for name, value in values.items()
    ]
    params = [entities.Param(name, str(value)) for name, value in settings_of(run).items()]
    for start in range(0, len(metrics), _MOST_METRICS):
        client.log_batch(made, metrics=metrics[start : start + _MOST_METRICS])
    for start in range(0, len(params), _MOST_PARAMS):
        client.log_batch(made, params=params[start : start + _MOST_PARAMS])
    status = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}.get(run.state, "RUNNING")
    client.set_terminated(made, status=status, end_time=times[-1] if times else None)
    return uri


def _tracking_uri(path: str | Path) -> str:
    if "://" in str(path):
        return str(path)
    folder = Path(path).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}"
