"""The memory of layouts under FSDP2, against what torch's own `fully_shard` allocates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from analytic.fsdp2_on_torch import CASES


@pytest.mark.slow
def test_layouts_need_as_much_memory_as_fully_shard_allocates() -> None:
    """Within 5 %: the smallest models lack the shards from which units are gathered, in 16 bits."""
    program = Path(__file__).parent / "fsdp2_on_torch.py"
    environment = {**os.environ, "PYTHONPATH": str(program.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=240, check=True
    )
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == len(CASES)
    for case, (measured, predicted) in zip(CASES, rows, strict=True):
        assert predicted == pytest.approx(measured, rel=0.05), case
