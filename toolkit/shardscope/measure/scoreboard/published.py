"""All tables of measured steps that ship with Shardscope; the effects of `calibration.effects` were fitted to them."""

from __future__ import annotations

from shardscope.measure.scoreboard.bigscience import bigscience
from shardscope.measure.scoreboard.mlperf import mlperf
from shardscope.measure.scoreboard.nvidia import nvidia
from shardscope.measure.scoreboard.own import one_h100
from shardscope.measure.scoreboard.rows import Row
from shardscope.measure.scoreboard.sharded import sharded
from shardscope.measure.scoreboard.tables import papers
from shardscope.measure.scoreboard.volta import volta


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
