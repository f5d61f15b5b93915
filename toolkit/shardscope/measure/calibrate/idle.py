"""The time per message of ranks that do not compute, such as those on emulated processors, which sleep.

Ranks sleep before each collective, as they do in training, so that a message wakes the core of its receiver. In one
long sequence of messages, cores would stay awake, and ranks that share a core would be awake at the same time either
hardly ever or always, depending on the kernel's scheduler.
"""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median

from shardscope.calibration.host_calibration import Constant

_PROGRAM = """\
import json
from shardscope.runtime.tools.transport_speed import measure
for _ in range(3):
    for ranks in (2, 4, 8):
        speeds = measure(ranks, pause_s=0.01)
        print(json.dumps([[speed.transport, speed.world_size, speed.message_s] for speed in speeds]))
"""
_NOISE = 0.2
"""Relative margin of the interval around the measured times."""
_PATIENCE_S = 30.0


def woken_message_constants() -> tuple[list[Constant], str]:
    """Return the time per message for each transport and number of ranks, and a note if it cannot be measured."""
    if sys.platform != "linux":
        return [], ""
    tries: dict[tuple[str, int], list[float]] = {}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True, text=True, timeout=_PATIENCE_S, check=True,
        )  # fmt: skip
        for line in done.stdout.splitlines():
            for transport, ranks, seconds in json.loads(line):
                tries.setdefault((transport, ranks), []).append(seconds)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [], f"The time of messages between idle ranks could not be measured ({type(error).__name__})."
    found = [
        Constant(
            name="woken_message_s", transport=transport, ranks=ranks,
            value=median(measured),
            low=min(measured) * (1 - _NOISE), high=max(measured) * (1 + _NOISE),
        )
        for (transport, ranks), measured in sorted(tries.items())
    ]  # fmt: skip
    return found, ""
