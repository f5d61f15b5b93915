"""Export a run: weights, Parquet tables, Chrome and Chakra traces, TensorBoard, Weights & Biases, MLflow.

All data are read through `Run`, so an export has the same values as the run's own tables. Files for another tool are
written by that tool's library, which is imported only for this export; the Chrome trace needs no library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.errors import SpecError, unknown_name
from shardscope.runlog.chrome_trace import write_trace
from shardscope.runtime.export._library import missing
from shardscope.runtime.export.chakra import write_chakra
from shardscope.runtime.export.trackers import write_mlflow, write_tensorboard, write_wandb
from shardscope.runtime.export.weights import write_pt, write_safetensors

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.runtime.record.run import Run


_COUNTS = ["payload_bytes", "sent_bytes", "received_bytes", "messages", "calls"]


def write_parquet(run: Run, path: str | Path) -> str:
    """Write the tables of a run into a folder, and return its path.

    ``steps`` is `Run.metrics`, ``spans`` is `Run.timeline`, ``traffic`` is `traffic_frame`.

    Raises:
        SpecError: pandas finds no library that writes Parquet.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in (("steps", run.metrics()), ("spans", run.timeline()), ("traffic", traffic_frame(run))):
        try:
            frame.to_parquet(folder / f"{name}.parquet")
        except ImportError as error:
            raise missing("pyarrow", "parquet", ModuleNotFoundError()) from error
    return str(folder)


def traffic_frame(run: Run) -> pd.DataFrame:
    """Return a data frame with one row for each rank, event and collective with counted traffic.

    Columns: event (``step``; ``traffic`` for messages that a parameter server sent for a step that had already ended;
    ``eval``, ``test``, ``end``), rank, step (missing for ``end``), collective (its name), payload_bytes, sent_bytes,
    received_bytes, messages and calls.
    """
    import pandas as pd

    rows = [
        (event["event"], event["rank"], event.get("step"), name, *(row.get(count) for count in _COUNTS))
        for event in run.events()
        for name, row in event.get("traffic", {}).items()
    ]
    frame = pd.DataFrame(rows, columns=["event", "rank", "step", "collective", *_COUNTS])
    return frame.astype(dict.fromkeys(["rank", "step", *_COUNTS], "Int64"))


def write_chrome_trace(run: Run, path: str | Path) -> str:
    """Write the spans of a run to a file, compressed if its name ends in ``.gz``, and return its path.

    Raises:
        SpecError: The run has recorded no spans.
    """
    spans = run.timeline()
    if not len(spans):
        raise SpecError(
            f"run {run.id} has recorded no spans; launch it with Record(spans_first=100), for example"
        )
    about = {"run": run.id, "strategy": run.job.strategy.label, "provenance": str(run.provenance or "")}
    return write_trace(spans, path, about)


FORMATS: Mapping[str, tuple[Callable[[Run, str | Path], str], str]] = {
    "parquet": (write_parquet, "a folder of tables: steps, spans, traffic"),
    "chrome-trace": (
        write_chrome_trace,
        "a JSON file of all spans, for ui.perfetto.dev and chrome://tracing",
    ),
    "chakra": (
        write_chakra,
        "MLCommons Chakra execution traces of one step, PATH.0.et and so on, one for each rank",
    ),
    "tensorboard": (write_tensorboard, "a folder of TensorBoard's event files"),
    "wandb": (write_wandb, "a folder for `wandb sync`; online with WANDB_MODE=online"),
    "pt": (write_pt, "the newest saved weights as a plain state dict, for torch.load"),
    "safetensors": (write_safetensors, "the newest saved weights as safetensors"),
    "mlflow": (write_mlflow, "a folder with MLflow's database, or the URI of a tracking server"),
}
"""File formats by name: the function that writes the format, and a description of the result."""
_BY_SUFFIX = {".pt": "pt", ".safetensors": "safetensors"}


def export_run(run: Run, path: str | Path, *, format: str | None = None) -> str:  # noqa: A002 - as in pandas and PIL
    """Write a run in one of `FORMATS` and return the path or address of the result.

    Args:
        run: The run.
        path: File or folder to write; for MLflow also the URI of a tracking server.
        format: One of `FORMATS`; None exports the weights in the format given by the suffix of the path.

    Raises:
        SpecError: There is no such format, its library is not installed, or the run has no data for it.
    """
    if format is None:
        format = _BY_SUFFIX.get(Path(path).suffix)  # noqa: A001 - as above
        if format is None:
            raise SpecError(
                f"path={str(path)!r} does not determine what to write: give format, one of "
                f"{', '.join(FORMATS)}, or for the "
                "weights a path that ends in .pt or .safetensors"
            )
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    return FORMATS[format][0](run, path)
