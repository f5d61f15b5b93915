"""Advice for the user on errors of the file system."""

from __future__ import annotations

import errno

_FREE_SPACE = "free some space, or set SHARDSCOPE_RUNS to a folder on another disk"
_WRITABLE = "make the folder writable, or set SHARDSCOPE_RUNS to another"
_ADVICE = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
    errno.EOPNOTSUPP: "use another file system, or incremental=False",
}


def advice_on(error: BaseException) -> str:
    """Return advice on how to fix a file-system error; an empty string for any other error."""
    return _ADVICE.get(error.errno or 0, "") if isinstance(error, OSError) else ""


def takes_no_more(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is due to a full disk, a disk quota or a limit on file sizes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # causes can form a cycle
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False
