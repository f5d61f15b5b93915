"""Version of a job's JSON format, so that a newer format is refused rather than misread."""

from __future__ import annotations

from typing import Any

from shardscope._version import __version__
from shardscope.errors import SpecError, quoted

FORMAT = 1
"""Version of a job's JSON format. It increases when earlier versions would misread a job, not with each new field."""


def require_readable(written: Any) -> None:
    """Refuse a format that is not a version, or one newer than this version of shardscope reads.

    Raises:
        SpecError: The message names both versions.
    """
    if type(written) is not int or written < 1:
        raise SpecError(
            f"format={quoted(written)} is not a version of a job's JSON; use {FORMAT}, or leave it out"
        )
    if written > FORMAT:
        raise SpecError(
            f"the job is written in format {written}, and shardscope {__version__} reads formats up to {FORMAT}; "
            "update shardscope to read it"
        )
