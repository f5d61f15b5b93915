"""Where studies live: a private folder below the runs' root, or any storage that Optuna knows.

<runs>/studies/<name>/journal.log     the study, where no other storage is named
<runs>/studies/<name>/trials/         the run directories of the trials that this machine ran

The journal is Optuna's, safe against a writer that is killed at any byte. Optuna's own lock is a link that a killed
holder leaves behind, and its file may end in half a line, which the next writer would continue. Here the kernel holds a
second lock, which ends with its holder, and whoever writes next cuts a torn line off first. Nothing is lost by that: a
line that was not written whole was never acknowledged. Readers hold it too, together, so that no line is cut under
their eyes. A disk that is full is an outage like another. The file stays one that Optuna's dashboard opens and writes
to.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import optuna
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from shardscope.errors import SpecError, StudyError
from shardscope.runtime.rundir import runs_root
from shardscope.tuning.definition import Definition

_BLOCK = 1 << 16
_LEFT_BEHIND_S = 5
"""How old Optuna's link is when it counts as left by a killed holder: writing takes milliseconds."""


class SafeJournal(JournalFileBackend):
    """The journal file at `path`, made private to the user if it is new."""

    def __init__(self, path: Path) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._journal = path
        super().__init__(str(path), lock_obj=JournalFileSymlinkLock(str(path), grace_period=_LEFT_BEHIND_S))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write whole lines behind the last whole line."""
        try:
            with self._locked(fcntl.LOCK_EX):
                _cut_torn_line(self._journal)
                super().append_logs(logs)
        except OSError as error:
            raise StorageInternalError(f"{self._journal} cannot be written: {error.strerror}") from error

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """What was written behind a line of this number, all of it before the first is given."""
        with self._locked(fcntl.LOCK_SH):
            logs = list(super().read_logs(log_number_from))
        yield from logs

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        try:
            file = os.open(
                self._journal.with_name(f".{self._journal.name}.alone"), os.O_RDWR | os.O_CREAT, 0o600
            )
        except FileNotFoundError:  # waiting, as for a disk that is full, would bring nothing back
            raise StudyError(
                f"the folder {self._journal.parent} is gone, and with it its study; put it back or begin the study anew"
            ) from None
        try:
            fcntl.flock(file, how)
            yield
        finally:
            os.close(file)


def _cut_torn_line(path: Path) -> None:
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        whole = _end_of_last_line(file, size)
        if whole < size:
            file.truncate(whole)


def _end_of_last_line(file: BinaryIO, end: int) -> int:
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


Result = TypeVar("Result")
DEFINITION = "shardscope"
"""The study's attribute that holds its `Definition`: one of the system's, which dashboards do not show."""
_JOURNAL = "journal.log"
_AGAIN_S = 0.5
STATED_WITHIN_S = 5.0
_CONNECT_WITHIN_S = 10
_PASSWORD = re.compile(r"(://[^:/@\s]*):\S*@")
_SECRET = re.compile(r"(?i)([?&][^=&\s]*(?:pass|pwd|secret|token|key)[^=&\s]*=)[^&\s'\"]*")


def checked_name(name: str) -> str:
    """The name, if a study can have it: it is also that of a folder.

    Raises:
        SpecError: It cannot.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name):
        raise SpecError(
            f"name={name[:80]!r} is not a name for a study; use letters, digits, '.', '_' and '-', at most 80"
        )
    return name


def place_of(name: str, root: str | Path | None = None) -> Path:
    """Where the folder of a study on this machine is, or would be.

    Raises:
        SpecError: No study can have this name.
    """
    return runs_root(root) / "studies" / checked_name(name)


def folder_of(name: str, root: str | Path | None = None) -> Path:
    """The folder of a study on this machine; made if need be, for this user alone.

    Raises:
        StudyError: It cannot be made.
    """
    folder = place_of(name, root)
    try:
        for path in (folder, folder / "trials"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(
            f"study {name!r} cannot be kept in {folder}: {error.strerror}; name a folder that you can write to with "
            "root=... or $SHARDSCOPE_RUNS"
        ) from error
    return folder


def journal_of(folder: Path) -> Path:
    """The journal of the study that lives in a folder."""
    return folder / _JOURNAL


def journals_of(root: str | Path | None = None) -> list[str]:
    """The studies that have a journal below a root."""
    return sorted(path.parent.name for path in (runs_root(root) / "studies").glob(f"*/{_JOURNAL}"))


def open_storage(storage: str | BaseStorage | None, name: str, root: str | Path | None = None) -> BaseStorage:
    """The storage at a URL, the one given, or the journal of the study of this name.

    Raises:
        StudyError: It does not answer, or needs a driver that is not installed.
    """
    if isinstance(storage, BaseStorage):
        return storage
    if storage is None:
        return JournalStorage(SafeJournal(journal_of(folder_of(name, root))))
    shown = without_password(storage)
    try:
        return get_storage(_connected(storage))
    except ImportError as error:
        raise StudyError(f"storage={shown!r} needs a driver that is not installed: {error}") from error
    except outages() as error:
        raise StudyError(f"storage={shown!r} does not answer: {_without(storage, _cause(error))}") from error
    except (ValueError, _sql_errors().ArgumentError) as error:
        text = _without(storage, _first_line(error))
        raise StudyError(f"storage={shown!r} is not the URL of a storage: {text}") from error


def without_password(text: str) -> str:
    """A URL, or a text that quotes one, as it may be shown: messages end up in notebooks that others read.

    Example:
        >>> without_password("postgresql://me:p@ss@host/db?password=hunter2&sslmode=require")
        'postgresql://me:***@host/db?password=***&sslmode=require'
    """
    return _SECRET.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))


def _without(url: str, text: str) -> str:
    """A message about a URL without its password, nor a part of it that was taken for the host."""
    found = re.search(r"://[^:/@\s]*:(\S*)@", url)
    for part in [] if found is None else found[1].split("@"):
        text = text.replace(part, "***") if part else text
    return text


def _connected(url: str) -> str | RDBStorage:
    """Connections that notice when the server at their other end has been started anew, or cannot be reached."""
    if not url.startswith("postgresql"):
        return url
    options = {"connect_timeout": _CONNECT_WITHIN_S, "keepalives_idle": 30, "tcp_user_timeout": 30_000}
    return RDBStorage(url, engine_kwargs={"pool_pre_ping": True, "connect_args": options})


@contextmanager
def answering(name: str) -> Iterator[None]:
    """Opening a study, which does not wait for a storage that is away.

    Raises:
        StudyError: The storage does not answer.
    """
    try:
        yield
    except outages() as error:
        raise StudyError(f"the storage of study {name!r} does not answer: {_cause(error)}") from error


def create_or_load(
    storage: BaseStorage, name: str, definition: Definition, sampler: optuna.samplers.BaseSampler | None
) -> tuple[optuna.Study, bool]:
    """The study of this name, and whether it is new.

    Of drivers that begin a study together one is first, and the batches that it left to the study are those of all.

    Raises:
        StudyError: It is about something else.
    """
    directions = [optuna.study.StudyDirection.MINIMIZE] * len(definition.objectives)
    try:
        study = optuna.create_study(storage=storage, study_name=name, directions=directions, sampler=sampler)
    except DuplicatedStudyError:
        study = optuna.load_study(storage=storage, study_name=name, sampler=sampler)
        if not _was_left_blank(storage, study, definition):
            _compare(storage, name, definition)
            return study, False
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ExperimentalWarning
        )  # only dashboards read the names; ours are in `Definition`
        study.set_metric_names(list(definition.objectives))
    storage.set_study_system_attr(
        storage.get_study_id_from_name(name), DEFINITION, definition.model_dump_json()
    )
    for about, text in definition.in_words().items():
        study.set_user_attr(about, text)
    _compare(storage, name, definition)  # another driver may have found it blank too
    return study, True


def _was_left_blank(storage: BaseStorage, study: optuna.Study, definition: Definition) -> bool:
    """Whether whoever made a study was killed before saying what it is about: then it may be said now."""
    deadline = time.monotonic() + STATED_WITHIN_S
    while _stated(storage, study.study_name) is None and not (
        study.user_attrs or study.get_trials(deepcopy=False)
    ):
        if len(study.directions) != len(definition.objectives):
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(_AGAIN_S)  # whoever has just made it is about to say so
    return False


def definition_of(storage: BaseStorage, name: str) -> Definition:
    """What the study of this name is about.

    Raises:
        KeyError: There is no such study.
        StudyError: Something else began it, or what it says is damaged.
    """
    text = _stated(storage, name)
    if text is None:
        raise StudyError(
            f"study {name!r} in this storage does not say what job it is about: something else began it; "
            "give yours another name"
        )
    try:
        return Definition.from_json(text)
    except SpecError as error:
        raise StudyError(
            f"study {name!r} in this storage is damaged, or of another version: {error}; give yours another name"
        ) from error


def begun_as(storage: BaseStorage, name: str) -> Definition | None:
    """What the study of this name is about; None where there is none, or one with nothing in it yet.

    Raises:
        StudyError: Something else began it.
    """
    try:
        study = storage.get_study_id_from_name(name)
    except KeyError:
        return None
    is_blank = not storage.get_study_user_attrs(study) and not storage.get_all_trials(study, deepcopy=False)
    return None if is_blank and _stated(storage, name) is None else definition_of(storage, name)


def _stated(storage: BaseStorage, name: str) -> str | None:
    study = storage.get_study_id_from_name(name)
    held = storage.get_study_system_attrs(study).get(DEFINITION)
    return held or storage.get_study_user_attrs(study).get(DEFINITION)  # where studies used to have it


def _compare(storage: BaseStorage, name: str, definition: Definition) -> None:
    begun = definition_of(storage, name)
    difference = begun.difference(definition.with_batches_of(begun))
    if difference is not None:
        raise StudyError(
            f"study {name!r} was begun otherwise: {difference}; go on with what it was begun with, or "
            "give the study another name"
        )


class Patience:
    """Calls a storage again while it is away.

    Attributes:
        waiting: What the storage's absence looks like; None while it answers.
    """

    def __init__(self, seconds: float = 600.0) -> None:
        self.seconds = seconds
        self.waiting: str | None = None
        self.given_up = threading.Event()

    def __call__(self, call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """`call`'s result, once the storage has answered.

        Raises:
            StudyError: It has not within the time, or waiting was given up.
        """
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                result = call(*args, **kwargs)
            except outages() as error:
                if _is_refusal(error):
                    raise StudyError(
                        f"the study's storage refuses what it is told: {_cause(error)}"
                    ) from error
                self.waiting = _cause(error)
                if time.monotonic() > deadline or self.given_up.wait(_AGAIN_S):
                    raise StudyError(
                        f"the study's storage does not answer ({self.waiting}); nothing that was told is lost: start "
                        "the storage again and go on with the study"
                    ) from error
            else:
                self.waiting = None
                return result


def within(seconds: float, call: Callable[..., object], *args: Any) -> bool:
    """Whether a call of the storage was done in time; one that hangs is left to itself, one that fails is not done."""
    done = threading.Event()

    def run() -> None:
        with suppress(StudyError):
            call(*args)
            done.set()

    thread = threading.Thread(target=run, name="last words", daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()


def outages() -> tuple[type[Exception], ...]:
    """What is raised while a storage is away."""
    errors = _sql_errors()
    lost = (errors.OperationalError, errors.InterfaceError, errors.PendingRollbackError, errors.TimeoutError)
    return (StorageInternalError, *lost, ConnectionError)


def _is_refusal(error: BaseException) -> bool:
    """Whether the storage is there, and would say the same again: Optuna wraps all that a database raises alike."""
    cause = error.__cause__
    is_wrapped = isinstance(error, StorageInternalError) and isinstance(cause, _sql_errors().SQLAlchemyError)
    return (
        is_wrapped
        and not isinstance(cause, outages())
        and not getattr(cause, "connection_invalidated", False)
    )


def _sql_errors() -> Any:
    from sqlalchemy import exc

    return exc


def _cause(error: BaseException) -> str:
    """What the database said, where Optuna's own error only says that something was."""
    origin = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
    return _first_line(error if isinstance(origin, OSError) else origin)


def _first_line(error: BaseException) -> str:
    return without_password((str(error).strip().splitlines() or [type(error).__name__])[0])
