"""The measured step in a log of Megatron-LM, Megatron-DeepSpeed or torchtitan, with the settings that the log contains.

`text` turns bytes into lines. `steps` finds the typical step in lines that several ranks or a restarted job have
written. `arguments` reads the arguments that Megatron prints and classifies each of them by `megatron_arguments.json`,
`model` and `layout` turn them into columns, and `megatron` builds the row. `deepspeed` adds the configuration that
DeepSpeed prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardscope.errors import DataError
from shardscope.measure.calibrate.logs import megatron, torchtitan
from shardscope.measure.calibrate.logs.text import decoded, lines_of
from shardscope.spec.model import Transformer

__all__ = ["decoded", "row_of_log"]


def row_of_log(text: str, name: str, given: Transformer | None = None) -> Mapping[str, Any]:
    """Return the row measured by a log: the median over its steps, without the first two after each start.

    A Megatron log contains the arguments, and so the model and layout; a torchtitan log contains at most the batch.

    Args:
        text: The log.
        name: Name of the log, for messages and as the row's label.
        given: Model that the user gives for the log, if any.

    Raises:
        DataError: The log has no steps of Megatron or torchtitan, too few steps, or steps of several runs.
        SpecError: Arguments are incomplete, contradict each other or the given model, or change time or memory in a
            way that rows cannot express.
    """
    lines = lines_of(text)
    for read in (megatron.row, torchtitan.row):
        found = read(lines, name, given)
        if found is not None:
            return {"label": name, **found}
    raise DataError(
        f"rows={name!r} has no step of Megatron ('iteration 10/ 100 | ... elapsed time per iteration (ms): ...') or "
        "torchtitan ('step: 10 ... tps: 6,667'); give such a log, or a CSV file"
    )
