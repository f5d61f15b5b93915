"""Export a run: weights, Parquet tables, Chrome and Chakra traces, TensorBoard, Weights & Biases, MLflow.

All data are read through `Run`, so an export has the same values as the run's own tables. Files for another tool are
written by that tool's library, which is imported only for this export; the Chrome trace needs no library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.errors import SpecError, unknown_name
from shardscope.runtime.export.chakra import write_chakra
from shardscope.runtime.export.chrome_trace import write_chrome_trace
from shardscope.runtime.export.tables import write_parquet
from shardscope.runtime.export.trackers import write_mlflow, write_tensorboard, write_wandb
from shardscope.runtime.export.weights import write_pt, write_safetensors

if TYPE_CHECKING:
    from shardscope.runtime.record.run import Run

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
"""File formats by name: the function that writes the format, and a description of what it writes."""
_BY_SUFFIX = {".pt": "pt", ".safetensors": "safetensors"}


def export_run(run: Run, path: str | Path, *, format: str | None = None) -> str:  # noqa: A002 - as in pandas and PIL
    """Write a run in one of `FORMATS` and return the path or address of the result.

    Args:
        run: The run.
        path: File or folder to write; for MLflow also the URI of a tracking server.
        format: One of `FORMATS`; None for weights, whose format the suffix of the path states.

    Raises:
        SpecError: There is no such format, its library is not installed, or the run has no data for it.
    """
    if format is None:
        format = _BY_SUFFIX.get(Path(path).suffix)  # noqa: A001 - as above
        if format is None:
            raise SpecError(
                f"path={str(path)!r} does not say what to write: give format, one of {', '.join(FORMATS)}, or for the "
                "weights a path that ends in .pt or .safetensors"
            )
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    return FORMATS[format][0](run, path)
