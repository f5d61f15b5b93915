"""The version of a job's JSON format, and a check that rejects newer formats, which this version would misread."""

from __future__ import annotations

from typing import Any

from shardscope._version import __version__
from shardscope.errors import SpecError, quoted

FORMAT = 1
"""Version of a job's JSON format. It increases when earlier versions would misread a job, not with each new field."""


def require_readable(written: Any) -> None:
    """Reject a format version that is invalid, or newer than this version of shardscope reads.

    Raises:
        SpecError: The version is invalid or too new; the message states the supported versions.
    """
    if type(written) is not int or written < 1:
        raise SpecError(
            f"format={quoted(written)} is not a format version of a job's JSON; use {FORMAT}, or leave it out"
        )
    if written > FORMAT:
        raise SpecError(
            f"the job is written in format {written}, but shardscope {__version__} reads formats up to {FORMAT}; "
            "update shardscope to read it"
        )
