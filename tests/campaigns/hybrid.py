"""A random grid of layouts of several axes × settings, each held against one process.

    python tests/campaigns/hybrid.py                       all of it
    python tests/campaigns/hybrid.py --first 0 --count 50  a slice

No job may be silently wrong, or refused by anything but a sentence with a way out; see `oracle.hybrid`.
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
            drawn = hybrid.draw_setting(number)
            with tempfile.TemporaryDirectory() as folder:
                ending = hybrid.hold(drawn, pools, Path(folder))
            return _campaign.Outcome(ending.name, ending.violation, {"job": str(drawn), **ending.details})

        _campaign.run(case, cases=hybrid.GRID, description=__doc__)


if __name__ == "__main__":
    main()
