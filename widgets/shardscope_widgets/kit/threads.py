"""Threads of panels, which must not be the first to import a module that figures look for.

Plotly looks in `sys.modules` for modules such as pandas, whose arrays it accepts, but does not import them. While a
thread imports one, the main thread finds a module without its contents there, and fails to make any figure. Python's
import lock does not help, because a look into `sys.modules` does not take it.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable

LOOKED_FOR = ("numpy", "pandas")
"""Modules that Plotly looks for, and that this package's own code imports when it is called."""


def panel_thread(work: Callable[..., object], *arguments: object, name: str) -> threading.Thread:
    """Return a daemon thread, after importing what figures look for in this thread.

    The caller starts it, once it has stored it: a short piece of work may end, and say so, before this returns.
    """
    for module in LOOKED_FOR:
        with contextlib.suppress(ImportError):  # pages in a browser do not have all of them
            importlib.import_module(module)
    return threading.Thread(target=work, args=arguments, name=f"shardscope-{name}", daemon=True)
