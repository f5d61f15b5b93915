"""Processes that a test or a case of a campaign has started, however detached: they inherit a mark."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil


def marked(variable: str, mark: str) -> Iterator[psutil.Process]:
    """The other living processes that have this environment variable with this value."""
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(variable) == mark:
                yield process
        except psutil.Error:
            continue
