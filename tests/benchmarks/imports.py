"""Seconds of a new process until it has a model or a prediction, against one that imports shardscope and ends.

Run it as ``python tests/benchmarks/imports.py [rounds]``. The interpreter's own start is in all of them.
"""

from __future__ import annotations

import subprocess
import sys

from _report import compare

PROGRAMS = {
    "nothing": "",
    "import shardscope": "import shardscope",
    "a model by name": "import shardscope as ss; ss.Model.of('gpt3-175b')",
    "a prediction": (
        "import shardscope as ss; model = ss.Model.of('gpt3-175b');"
        "cluster = ss.Cluster.of('a100-80gb', nodes=128, per_node=8);"
        "ss.predict(model, cluster, ss.Layout(data=16, tensor=8, pipeline=8, global_batch=1536))"
    ),
    "import torch": "import torch",
}


def main(rounds: int = 10) -> None:
    """Print medians, and ratios to the import alone."""
    starts = {
        name: lambda code=code: subprocess.run([sys.executable, "-c", code], check=True)
        for name, code in PROGRAMS.items()
    }
    compare(starts, rounds=rounds, baseline="import shardscope", warm_up=1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
