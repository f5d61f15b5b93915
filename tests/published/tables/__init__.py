"""All tables of measured steps that ship with Shardscope; the effects of `calibration.effects` were fitted to them."""

from __future__ import annotations

from published.tables.bigscience import bigscience
from published.tables.mlperf import mlperf
from published.tables.nvidia import nvidia
from published.tables.own import one_h100
from published.tables.papers import papers
from published.tables.sharded import sharded
from published.tables.volta import volta
from shardscope.measure.calibrate.rows import Row


def published() -> dict[str, list[Row]]:
    """Return the rows of all tables, by table name."""
    return {
        **papers(),
        **nvidia(),
        **mlperf(),
        **sharded(),
        **bigscience(),
        **volta(),
        "FSDP2, one H100": one_h100(),
    }
