"""Random layouts and jobs: with more of anything, no prediction is slower, and with less, none needs more memory.

    python tests/campaigns/laws.py                          5,000 of them, of which one in 25 is a job
    python tests/campaigns/laws.py --first 0 --count 500

More is more FLOP/s, memory, bandwidth of memory, host, drives and links, or less latency, by 10 %, twice or ten times;
less is smaller micro-batches, shorter sequences, fewer layers or fewer activations that are kept.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from _campaign import Outcome, run

from conformance.laws import broken_by_job, broken_by_layout

CASES = 5_000
JOBS_EVERY = 25


def case(number: int, source: random.Random) -> Outcome:
    """Check all laws on one draw."""
    kind, check = ("job", broken_by_job) if number % JOBS_EVERY == 0 else ("layout", broken_by_layout)
    broken = check(source)
    return Outcome(f"{kind}: {'broken' if broken else 'kept'}", bool(broken), {"laws": broken})


if __name__ == "__main__":
    run(case, cases=CASES, description=__doc__)
