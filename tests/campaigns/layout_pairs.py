"""Random pairs of layouts: a checkpoint saved under one is resumed under the other.

    python tests/campaigns/layout_pairs.py                       all of it
    python tests/campaigns/layout_pairs.py --first 0 --count 50  a slice

All losses and the final parameters must be those of one process to 1e-6; see `oracle.hybrid`.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import _campaign

from oracle import hybrid


def main() -> None:
    """Run the campaign."""
    with hybrid.pools() as pools:

        def case(number: int, source: random.Random) -> _campaign.Outcome:
            drawn = hybrid.draw_pair(number)
            with tempfile.TemporaryDirectory() as folder:
                ending = hybrid.resume(drawn, pools, Path(folder))
            return _campaign.Outcome(ending.name, ending.violation, {"pair": str(drawn), **ending.details})

        _campaign.run(case, cases=hybrid.PAIRS, description=__doc__)


if __name__ == "__main__":
    main()
