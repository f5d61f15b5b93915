"""The time per message of ranks that do not compute, such as those on emulated processors, which sleep."""

from __future__ import annotations

import json
import subprocess
import sys

from shardscope.spec.host_calibration import Constant

_PROGRAM = """\
import json
from shardscope.runtime.transport_speed import measure
print(json.dumps([[speed.transport, speed.message_s] for speed in measure(2)]))
"""
_NOISE = 0.2
"""Half width of an interval, relative to the value: how much a measurement varies."""
_PATIENCE_S = 30.0


def idle_message_constants() -> list[Constant]:
    """Return the time per message between two ranks, for each transport; none if it cannot be measured here."""
    if sys.platform != "linux":
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):  # then predictions take the times of ranks that compute
        return []
    return [
        Constant(
            name="idle_message_s", transport=transport, value=value,
            low=value * (1 - _NOISE), high=value * (1 + _NOISE),
        )
        for transport, value in json.loads(done.stdout)
    ]  # fmt: skip
