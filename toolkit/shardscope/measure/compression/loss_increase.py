"""Loss increase under each compression method and optimizer: the results of `tests/benchmarks/convergence.py`, as data.

These runs take hours, so their results are shipped. They show which methods are harmless and which are not; for another
model, data or learning rate the loss may differ.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from io import StringIO
from typing import TYPE_CHECKING

from shardscope.spec import Compression

if TYPE_CHECKING:
    import pandas as pd

MEASURED_ON = "gpt-nano on python-source, 2 ranks, 200 steps, 3 seeds"
"""The runs whose held-out loss was compared with the loss of uncompressed runs with the same seeds."""
_OPTIMIZERS = {"sgd": "SGD", "nesterov": "Nesterov", "lars": "LARS", "adamw": "AdamW", "lamb": "LAMB"}
_TABLE = """labels,method,SGD,Nesterov,LARS,AdamW,LAMB,tolerance
fp16;bf16,"fp16, bf16",0.0,0.0,0.1,0.2,0.2,0.5
fp8,fp8,0.0,-0.4,0.3,2.0,1.5,0.5
int8,int8,0.0,0.1,-0.1,0.0,-0.4,0.5
int4,int4,0.1,0.4,-0.8,-2.9,-0.9,1
qsgd,qsgd,0.0,-0.1,0.1,1.0,-0.1,1
natural,natural,0.1,1.3,-0.8,-0.1,5.8,1
terngrad,terngrad,5.9,-2.9,-11,-1.3,-0.1,2
adaptive-bits,adaptive bits,0.0,0.1,-0.8,-2.8,-0.9,2
local-sgd,"local SGD, every 8 steps",0.1,0.2,0.2,1.9,1.8,3
,"1-bit Adam, 1-bit LAMB",,,,2.8,1.4,2
,"1-bit Adam, warm-up twice as long",,,,1.4,,2
powersgd,"PowerSGD, rank 4",0.1,-0.1,-0.1,2.8,2.2,2
,"PowerSGD, rank 4, warm-up",,,,1.1,2.2,2
adaptive-rank,adaptive rank,-0.2,-0.1,-0.1,7.2,4.9,2
,"adaptive rank, warm-up",,,,1.0,,2
topk ratio=0.1,"top-k, 10%",-0.2,0.0,-0.5,8.4,6.2,3
topk,"top-k, 1%",0.2,3.3,-0.3,19,18,3
,"DGC, 1%",11,,1.7,,,3
sign-vote,majority vote of signs,0.1,67,-2.5,-3.4,-1.7,3
sign feedback=False,"signs, without feedback",7.2,6.6,-13,7.1,8.0,3
sign,"signs, with feedback",6.0,127,21,16,70,3
randomk ratio=0.1,"random-k, 10%",5.7,inf,3.9,17,32,3
randomk,"random-k, 1%",14,inf,67,39,46,3
randomblock,"random blocks, 1%",74,inf,61,50,84,3
"""
"""Loss increase in percent; empty if the method does not support the optimizer or was not run, inf if it diverged."""


def loss_increase() -> pd.DataFrame:
    """Return the loss increase over uncompressed runs, in percent, with one row per method.

    Columns: one per optimizer, and the tolerance, which was fixed before the first run. NaN means not measured, inf
    means that the run diverged. The loss is measured on held-out data at the end of the runs in
    ``.attrs["measured_on"]``.
    """
    import pandas as pd

    found = pd.read_csv(StringIO(_TABLE), index_col="method").drop(columns="labels")
    found.attrs["measured_on"] = MEASURED_ON
    return found


def loss_text(compression: Compression, optimizer: str, *, with_tolerance: bool = False) -> str:
    """Return how much the loss increased with a method and an optimizer, such as ``loss 19% higher than uncompressed
    with AdamW``; see `change_text` for the arguments.
    """
    told = change_text(compression, optimizer, with_tolerance=with_tolerance)
    return told if diverges(compression, optimizer) else f"loss {told}"


def change_text(compression: Compression, optimizer: str, *, with_tolerance: bool = False) -> str:
    """Return the same without the word ``loss``: ``19% higher than uncompressed with AdamW``.

    Args:
        compression: The method.
        optimizer: Name of the optimizer.
        with_tolerance: Whether to add the method's tolerance: ``19% higher than uncompressed with AdamW (up to 3%
            higher is tolerated)``.
    """
    if not compression.is_on:
        return "unchanged"
    column = _OPTIMIZERS.get(optimizer, optimizer)
    percent, tolerance = increase_and_tolerance(compression, optimizer)
    if math.isnan(percent):
        return f"not measured with {column}"
    limit = f" (up to {tolerance:g}% higher is tolerated)" if with_tolerance else ""
    if math.isinf(percent):
        return f"diverges with {column}{limit}"
    if percent == 0:
        return f"unchanged with {column}{limit}"
    return f"{abs(percent):g}% {'lower' if percent < 0 else 'higher'} than uncompressed with {column}{limit}"


def diverges(compression: Compression, optimizer: str) -> bool:
    """Return whether the run with a method and an optimizer diverged."""
    return math.isinf(increase_and_tolerance(compression, optimizer)[0])


def is_within_tolerance(compression: Compression, optimizer: str) -> bool:
    """Return whether a method's loss increase with an optimizer was measured and is within the method's tolerance."""
    percent, tolerance = increase_and_tolerance(compression, optimizer)
    return not compression.is_on or percent <= tolerance


@cache
def _rows() -> tuple[dict[str, str], ...]:
    return tuple(csv.DictReader(StringIO(_TABLE)))


def increase_and_tolerance(compression: Compression, optimizer: str) -> tuple[float, float]:
    """Return the loss increase and the tolerated one, in percent; NaN if not measured."""
    for row in _rows():
        if compression.label in row["labels"].split(";"):
            return float(row.get(_OPTIMIZERS.get(optimizer, "")) or math.nan), float(row["tolerance"])
    return math.nan, math.nan
