"""The time per message of ranks that do not compute, such as those on emulated processors, which sleep."""

from __future__ import annotations

import json
import subprocess
import sys

from shardscope.spec.host_calibration import Constant

_PROGRAM = """\
import json
from shardscope.runtime.transport_speed import measure
speeds = [speed for ranks in (2, 4, 8) for speed in measure(ranks)]
print(json.dumps([[speed.transport, speed.world_size, speed.message_s] for speed in speeds]))
"""
_NOISE = 0.2
"""Half width of an interval, relative to the value: how much a measurement varies."""
_PATIENCE_S = 30.0


def idle_message_constants() -> tuple[list[Constant], str]:
    """Return the time per message for each transport and number of ranks, and a sentence if it cannot be measured."""
    if sys.platform != "linux":
        return [], ""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=_PATIENCE_S, check=True
        )
        measured = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [], f"The time of messages between idle ranks could not be measured ({type(error).__name__})."
    found = [
        Constant(
            name="idle_message_s", transport=transport, ranks=ranks, value=value,
            low=value * (1 - _NOISE), high=value * (1 + _NOISE),
        )
        for transport, ranks, value in measured
    ]  # fmt: skip
    return found, ""
