"""A Jupyter server extension that imports torch in a separate process, so that a kernel's first launch starts faster.

`shardscope lab` enables the extension. Installing Shardscope does not, because the process takes memory even if no
notebook uses it.
"""

from __future__ import annotations

from typing import Any

from shardscope.runtime.launcher import warm
from shardscope.runtime.launcher.driver_server import search_path


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(app: Any) -> None:
    app.shardscope_warm_process = warm.start(
        search_path()
    )  # it ends with the application, which holds its input
