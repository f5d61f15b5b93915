"""Seeded cases, run in slices and resumed: what the campaigns beside this file share.

A case is a function of its own random generator. Its result goes as one line of JSON to a file, and a case that is in
the file already is not run again, so a campaign of hours can be run in slices, or go on after it was interrupted:

    python tests/campaigns/kills.py                              every case
    python tests/campaigns/kills.py --first 50 --count 25        the cases 50 to 74
    python tests/campaigns/kills.py --seed 7 --out kills.jsonl   other cases, into a file of their own
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What became of a case: its class, whether it violates what the campaign asserts, and details to look into."""

    name: str
    violation: bool = False
    details: dict[str, Any] = {}  # noqa: RUF012 - never written to


def run(
    case: Callable[[int, random.Random], Outcome],
    *,
    cases: int,
    description: str | None,
    at_most: Mapping[str, float] | None = None,
) -> None:
    """Run the asked slice of the cases, print what all lines of the file say, and exit with 1 on a violation.

    ``case`` is called with its number and a generator seeded by the campaign's seed and that number. An exception it
    lets out is a violation. ``at_most`` bounds the share of outcomes whose names begin with a text.
    """
    campaign = Path(sys.argv[0]).stem
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that a case ends its processes when it is timed out
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=cases)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or Path(tempfile.gettempdir()) / f"shardscope-{campaign}-{options.seed}.jsonl"
    asked = range(options.first, min(options.first + options.count, cases))
    done = {line["case"] for line in _lines(out)}
    with out.open("a", encoding="utf-8") as file:
        for number in asked:
            if number in done:
                continue
            outcome = _outcome(case, number, random.Random(f"{options.seed}/{number}"))
            line = {
                "case": number,
                "outcome": outcome.name,
                "violation": outcome.violation,
                **outcome.details,
            }
            file.write(json.dumps(line, default=str) + "\n")
            file.flush()
    lines = _lines(out)
    too_many = [name for name, most in (at_most or {}).items() if _share(lines, name) > most]
    sys.exit(_report(lines, cases=cases, out=out) or bool(too_many))


def _outcome(case: Callable[[int, random.Random], Outcome], number: int, source: random.Random) -> Outcome:
    try:
        return case(number, source)
    except Exception as error:
        return Outcome(
            f"raised {type(error).__name__}", violation=True, details={"error": traceback.format_exc()}
        )


def _lines(out: Path) -> list[dict[str, Any]]:
    if not out.exists():
        return []
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def _share(lines: list[dict[str, Any]], name: str) -> float:
    """Of the outcomes that begin with this name; printed."""
    found = sum(line["outcome"].startswith(name) for line in lines)
    share = found / max(1, len(lines))
    print(f"{found:,} of {len(lines):,} {name} ({share:.1%})")
    return share


def _report(lines: Iterable[dict[str, Any]], *, cases: int, out: Path) -> int:
    lines = list(lines)
    violations = [line for line in lines if line["violation"]]
    for name, times in Counter(line["outcome"] for line in lines).most_common():
        print(f"{times:6,}  {name}")
    for line in violations:
        print(f"violation in case {line['case']}: {line['outcome']}  {str(line)[:2000]}")
    print(f"{len(lines):,} of {cases:,} cases, {len(violations)} violations; all lines in {out}")
    return bool(violations)
