"""What a redesign must leave as it is: numbers, texts, JSON, HTML, options and public names.

    PYTHONPATH=tests python tests/campaigns/unchanged.py --record FILE    # at the commit before
    PYTHONPATH=tests python tests/campaigns/unchanged.py --against FILE   # at every commit after

Parts (`--only losses,predictions,...` chooses some):
    losses       real training: losses to the bit, bytes and messages, JSON of the jobs
    predictions  seeded layouts and jobs predicted, simulated and planned: every number within a relative 1e-12
    results      text and HTML of every kind of result, and the command line's `--json` and help
    public       public names with signatures and members, what imports load, files of the wheel by room

Runs that results describe are trained once, by `--record`, and are part of FILE; `--against` reads the same ones, so
that measured times are equal to the last digit. "This machine" is predicted with the calibration that ships. Compare on
the machine that recorded. What was not recorded, such as a method that has come since, is not compared; what has gone
is a difference. One line per difference; exit code 1 if there is any.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _unchanged_losses
import _unchanged_predictions
import _unchanged_public
import _unchanged_results
from _unchanged_tools import differences, pin_this_machine

PARTS = {
    "losses": _unchanged_losses.record,
    "predictions": _unchanged_predictions.record,
    "results": _unchanged_results.record,
    "public": _unchanged_public.record,
}


def _compared(part: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield the differences of one part, one line each."""
    for name, value in before.items():
        if name not in after:
            yield f"{part}: {name}: is no more"
        elif part == "losses":
            yield from (
                f"{part}: {name}: {fault}" for fault in _unchanged_losses.differences(value, after[name])
            )
        else:
            yield from (f"{part}: {name}{fault}" for fault in differences(value, after[name]))


def _clean(root: Path) -> None:
    """Set what results depend on besides the code: folders, the saved calibration, the width of a terminal."""
    (root / "cache").mkdir(mode=0o700)
    os.environ.update(
        SHARDSCOPE_CACHE=str(root / "cache"), SHARDSCOPE_RUNS=str(root / "none"), COLUMNS="100", NO_COLOR="1"
    )
    os.environ.pop("SHARDSCOPE_CACHE_LIMIT", None)
    pin_this_machine(root / "cache")


def main() -> int:
    """Record or compare; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--against", type=Path, metavar="FILE")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help="parts, by default all")
    options = parser.parse_args()
    if bool(options.record) == bool(options.against):
        parser.error("give either --record or --against")
    parts = options.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only {unknown[0]}: use {', '.join(PARTS)}")
    before = json.loads(gzip.decompress(options.against.read_bytes())) if options.against else {}
    root = Path(tempfile.mkdtemp(prefix="shardscope-unchanged-"))
    try:
        _clean(root)
        if "results" in parts:
            stored = before.get("runs") or _unchanged_results.train(root / "runs")
            before["runs"] = stored
            _unchanged_results.unpack(stored, root / "runs")
        found = {part: PARTS[part](root) for part in parts}
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if options.record:
        text = json.dumps({**found, "runs": before.get("runs")})
        options.record.write_bytes(gzip.compress(text.encode()))
        print(", ".join(f"{part}: {len(found[part])}" for part in parts))
        return 0
    found = json.loads(json.dumps(found))
    faults = [fault for part in parts for fault in _compared(part, before.get(part, {}), found[part])]
    print("\n".join(faults))
    print(
        ", ".join(f"{part}: {len(before.get(part, {}))}" for part in parts) + f"; {len(faults)} differences"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
