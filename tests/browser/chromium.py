"""The system's Chromium, as Playwright drives it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
ARGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]  # fmt: skip
"""Nothing but loopback is reached. A page's `route` would do this too, but turns off the cache, and then each page
loads and compiles all of JupyterLab's scripts again."""
VIEWPORT = {"width": 1360, "height": 1100}


def needs_chromium() -> None:
    """Skip a test where there is no Chromium."""
    if not CHROMIUM:
        pytest.skip("no chromium on PATH (apt-get install chromium) and no $CHROMIUM")


@contextmanager
def chromium(playwright: Any, profile: Path, viewport: Mapping[str, int] = VIEWPORT) -> Iterator[Any]:
    """A browser with a profile of its own."""
    context = playwright.chromium.launch_persistent_context(
        str(profile), executable_path=CHROMIUM, headless=True, args=ARGS, viewport=viewport
    )
    yield context
    context.close()
