"""A random grid of jobs, each trained on real ranks and held against plain torch on one process.

    python tests/campaigns/grid.py                       all of it
    python tests/campaigns/grid.py --first 0 --count 50  a slice

Models × strategies × optimizers × 2 to 5 ranks × accumulation × clip × schedule × weight-decay mask × precision ×
recomputation. No job may be silently wrong or refused by anything but a known sentence; see `oracle.grid`.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import _campaign
import torch

from oracle import grid

MOST_REFUSED = 162 / 425
"""The share of jobs that may be refused: what an earlier grid measured, and no version since may exceed."""


def case(number: int, source: random.Random) -> _campaign.Outcome:
    """Draw one job and hold it against the oracle."""
    torch.set_num_threads(1)
    drawn = grid.draw(number, source)
    with tempfile.TemporaryDirectory() as folder:
        ending = grid.hold(drawn, Path(folder))
    return _campaign.Outcome(ending.name, ending.violation, {"job": str(drawn), **ending.details})


if __name__ == "__main__":
    _campaign.run(case, cases=grid.CASES, description=__doc__, at_most={"refused": MOST_REFUSED})
