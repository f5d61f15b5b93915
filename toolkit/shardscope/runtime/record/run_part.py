"""What the parts of a `Run`, each in a file of its own, know of the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from shardscope.errors import RunFailed
    from shardscope.runlog.reducer import RunLog
    from shardscope.runlog.tail import Event
    from shardscope.runtime.record.rundir import RunDir
    from shardscope.spec import Job


class RunPart:
    """Base class of the parts of a `Run`; it declares the members of `Run` that they use."""

    _dir: RunDir

    if TYPE_CHECKING:

        @property
        def job(self) -> Job: ...
        @property
        def resized_job(self) -> Job: ...
        @property
        def path(self) -> Path: ...
        @property
        def id(self) -> str: ...
        @property
        def state(self) -> str: ...
        @property
        def is_alive(self) -> bool: ...
        @property
        def error(self) -> RunFailed | None: ...
        def reduced(self) -> RunLog: ...
        def events(self, kind: str | None = None, rank: int | None = None) -> list[Event]: ...
