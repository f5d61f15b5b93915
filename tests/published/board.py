"""Errors of the shipped calibrations on measured data sets, and those of two trivial formulas.

    cd tests; python -m published.board ROWS.json [--fitted]

prints one line per data set; with ``--fitted``, another one for the rows that the constants were fitted to.
"""

from __future__ import annotations

import sys
from pathlib import Path

from published.calibrate import own_calibration
from published.datasets import load
from published.lines import board
from shardscope.commands.scoreboard import text

if __name__ == "__main__":
    lines = board(load(Path(sys.argv[1])), fitted="--fitted" in sys.argv[2:], chosen=own_calibration)
    print(text([line.to_dict() for line in lines]))
