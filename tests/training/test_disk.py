"""What an error says of the disk, however errors caused one another."""

from __future__ import annotations

import errno

from shardscope.training.disk import takes_no_more


def test_errors_that_caused_one_another_are_looked_at_once() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert not takes_no_more(first)
    second.__cause__ = OSError(errno.ENOSPC, "full")
    assert takes_no_more(first)
