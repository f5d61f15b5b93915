"""Threads of panels, which must not be the first to import a module that Plotly looks for.

Plotly looks in `sys.modules` for modules such as pandas, whose arrays it accepts, but does not import them. While
another thread imports such a module, the main thread finds it partially initialised, and cannot create any figure.
Python's import lock does not help, because reading `sys.modules` does not take the lock.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable

LOOKED_FOR = ("numpy", "pandas")
"""Modules that Plotly looks for, and that this package's own code imports when it is called."""


def panel_thread(work: Callable[..., object], *arguments: object, name: str) -> threading.Thread:
    """Return a daemon thread, after importing the modules that Plotly looks for in the current thread.

    The caller must store the thread before it starts the thread, because short work may end immediately.
    """
    for module in LOOKED_FOR:
        with contextlib.suppress(ImportError):  # pages in a browser do not have all of them
            importlib.import_module(module)
    return threading.Thread(target=work, args=arguments, name=f"shardscope-{name}", daemon=True)
