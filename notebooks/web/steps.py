"""Predicted training steps, each a page of its own that plays the step: ranks, messages, memory and timeline.

The steps come from `simulate.step_events`, so nothing is trained. They are predicted when the page is built, because
the prediction of a job reads its PyTorch module, which a browser does not have.
"""

from __future__ import annotations

from pathlib import Path

import shardscope as ss
from shardscope_widgets import StepPlayer

CLUSTER = ss.Cluster.of("a100-80gb", nodes=4, per_node=1)
STEPS = {
    "ring": ("Ring all-reduce", {"strategy": "ring"}),
    "tree": ("Tree all-reduce", {"strategy": "tree"}),
    "parameter-server": ("Parameter server", {"strategy": "parameter-server"}),
    "pipeline": ("Pipeline", {"strategy": "pipeline"}),
    "zero-3": ("ZeRO-3", {"strategy": "zero-3"}),
}
"""Title of each step, and how its job differs from a small GPT on four ranks."""


def write_steps(folder: Path) -> list[dict[str, str]]:
    """Write a page for each step to `folder`, and return their titles and file names."""
    folder.mkdir(parents=True)
    written = []
    for name, (title, settings) in STEPS.items():
        job = ss.Job(model="gpt-mini", data="python-source", world_size=4, **settings)
        StepPlayer(ss.simulate.step_events(job, CLUSTER)).html(folder / f"{name}.html")
        written.append({"title": title, "file": f"{name}.html"})
    return written
