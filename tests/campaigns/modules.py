"""FLOPs and peak memory of torch's layers and losses, predicted from shapes and measured.

    python tests/campaigns/modules.py [--seed SEED] [--only WORD]

Each row is one module in one precision: FLOPs over a count from the definition of the layer, and the predicted peak of
a training step over what torch's CPU allocator records. Sizes are drawn with the seed. Ends with the rows that are more
than 1 % off in FLOPs, or 2 % in memory.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from conformance.allocator import Peaks, in_precision, peaks, sum_of
from conformance.torch_layers import Case, torch_layers

PRECISIONS = ("fp32", "fp64", "bf16-mixed", "fp16-mixed")
FLOPS, MEMORY = 0.01, 0.02


def check(case: Case, precision: str) -> tuple[Peaks, float]:
    """The peaks of one case, and FLOPs over those by definition."""
    torch.manual_seed(0)
    loss = sum_of if case.loss is None else lambda output, targets: case.loss(output, *targets)
    found = peaks(case.make(), case.inputs, precision, loss, in_precision(precision, case.targets))
    counted = found.table.flops * case.inputs[0].shape[0]
    return found, counted / (2 * case.products) if case.products else 1.0 + counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names to try")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    misses = []
    cases = [case for case in torch_layers(given.seed) if given.only in case.name]
    for case in cases:
        for precision in PRECISIONS:
            name = f"{case.name:<34} {precision:<11}"
            try:
                found, flops = check(case, precision)
            except Exception as error:
                misses.append(f"{name} {type(error).__name__}: {str(error).splitlines()[0][:200]}")
                print(misses[-1], "<", flush=True)
                continue
            is_off = abs(flops - 1) > FLOPS or abs(found.ratio - 1) > MEMORY
            row = f"{name} FLOPs {flops:.4f}  peak {found.ratio:.4f} of {found.measured:,}"
            misses += [row] * is_off
            print(row, "<" * is_off, flush=True)
    print(f"\n{len(misses)} of {len(cases) * len(PRECISIONS)} rows are off", *misses, sep="\n")


if __name__ == "__main__":
    main()
