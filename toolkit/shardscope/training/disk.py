"""Advice on file-system errors."""

from __future__ import annotations

import errno

_ROOM = "free some space, or set SHARDSCOPE_RUNS to a folder on another disk"
_WRITABLE = "make the folder writable, or set SHARDSCOPE_RUNS to another"
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
}


def advice_on(error: BaseException) -> str:
    """Return advice on how to fix a file-system error; empty for any other error."""
    return _ADVICE.get(error.errno or 0, "") if isinstance(error, OSError) else ""


def takes_no_more(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, comes from a full disk or a limit on file sizes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # causes can form a cycle
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False
