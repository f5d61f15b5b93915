"""Storage of studies: a private folder below the runs' root, or any storage that Optuna supports.

<runs>/studies/<name>/journal.log     the study, unless another storage is given
<runs>/studies/<name>/trials/         the run directories of the trials that this machine ran

The journal is Optuna's, made robust against a writer that is killed at any byte. Optuna's own lock is a symbolic link,
which remains if its holder is killed. A killed writer may also leave a partial line, to which the next writer would
append. `SafeJournal` adds a second lock, which the kernel releases when its holder dies, and each writer first
removes a partial line. No data is lost: a line that was not written completely was never acknowledged. Readers share
the lock, so no line is removed while they read. A full disk is treated as an outage. Optuna's dashboard can still open
the file and write to it.
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
from shardscope.runtime.record.rundir import runs_root
from shardscope.tuning.definition import Definition

_BLOCK = 1 << 16
_LEFT_BEHIND_S = 5
"""Age in seconds from which Optuna's lock file counts as left by a killed holder; a write takes milliseconds."""


class SafeJournal(JournalFileBackend):
    """Optuna's journal file at `path`; a new file is readable and writable by the user only."""

    def __init__(self, path: Path) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._journal = path
        super().__init__(str(path), lock_obj=JournalFileSymlinkLock(str(path), grace_period=_LEFT_BEHIND_S))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append complete lines after the last complete line."""
        try:
            with self._locked(fcntl.LOCK_EX):
                _cut_torn_line(self._journal)
                super().append_logs(logs)
        except OSError as error:
            raise StorageInternalError(f"{self._journal} cannot be written: {error.strerror}") from error

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yield the log entries from a line number on; all entries are read before the first is yielded."""
        with self._locked(fcntl.LOCK_SH):
            logs = list(super().read_logs(log_number_from))
        yield from logs

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        try:
            file = os.open(
                self._journal.with_name(f".{self._journal.name}.alone"), os.O_RDWR | os.O_CREAT, 0o600
            )
        except FileNotFoundError:  # unlike on a full disk, retrying cannot help
            raise StudyError(
                f"the study's folder {self._journal.parent} no longer exists; restore it or create the study again"
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
"""Attribute of the study that holds its `Definition`: a system attribute, which dashboards do not show."""
_JOURNAL = "journal.log"
_RETRY_S = 0.5
STATED_WITHIN_S = 5.0
_CONNECT_WITHIN_S = 10
_PASSWORD = re.compile(r"(://[^:/@\s]*):\S*@")
_SECRET = re.compile(r"(?i)([?&][^=&\s]*(?:pass|pwd|secret|token|key)[^=&\s]*=)[^&\s'\"]*")


def checked_name(name: str) -> str:
    """Return the name if it is valid for a study; the study's folder has the same name.

    Raises:
        SpecError: The name is invalid.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name):
        raise SpecError(
            f"name={name[:80]!r} is not a valid name for a study; use letters, digits, '.', '_' and '-', at most 80"
        )
    return name


def place_of(name: str, root: str | Path | None = None) -> Path:
    """Return the path of a study's folder on this machine, whether it exists or not.

    Raises:
        SpecError: The name is invalid.
    """
    return runs_root(root) / "studies" / checked_name(name)


def folder_of(name: str, root: str | Path | None = None) -> Path:
    """Return the folder of a study on this machine; it is created if missing, accessible to this user only.

    Raises:
        StudyError: The folder cannot be created.
    """
    folder = place_of(name, root)
    try:
        for path in (folder, folder / "trials"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(
            f"study {name!r} cannot be stored in {folder}: {error.strerror}; use a writable folder, given by "
            "root=... or $SHARDSCOPE_RUNS"
        ) from error
    return folder


def journal_of(folder: Path) -> Path:
    """Return the path of the journal in a study's folder."""
    return folder / _JOURNAL


def journals_of(root: str | Path | None = None) -> list[str]:
    """Return the names of the studies that have a journal below a root, sorted."""
    return sorted(path.parent.name for path in (runs_root(root) / "studies").glob(f"*/{_JOURNAL}"))


def open_storage(storage: str | BaseStorage | None, name: str, root: str | Path | None = None) -> BaseStorage:
    """Return the storage of a study.

    Args:
        storage: A storage, which is returned unchanged, or its URL; None uses the study's journal file.
        name: Name of the study.
        root: Folder for runs and studies; None uses the default folder.

    Raises:
        StudyError: The storage is unreachable or corrupt, its URL is invalid, or its driver is not installed.
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
        raise StudyError(f"storage={shown!r} is unreachable: {_without(storage, _cause(error))}") from error
    except (UnicodeDecodeError, _sql_errors().DatabaseError) as error:
        text = _without(storage, _cause(error))
        if not _is_damage(error):
            raise StudyError(f"storage={shown!r} rejects the call: {text}") from error
        raise StudyError(
            f"storage={shown!r} is damaged, or not a database: {text}; restore a copy of it, or give another storage"
        ) from error
    except (ValueError, LookupError, _sql_errors().ArgumentError) as error:
        text = _without(storage, _first_line(error))
        raise StudyError(f"storage={shown!r} is not the URL of a storage: {text}") from error


def without_password(text: str) -> str:
    """Return a URL, or a text that quotes one, with passwords masked, because notebooks with messages are shared.

    Example:
        >>> without_password("postgresql://me:p@ss@host/db?password=hunter2&sslmode=require")
        'postgresql://me:***@host/db?password=***&sslmode=require'
    """
    return _SECRET.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))


def _without(url: str, text: str) -> str:
    """Return a message about a URL with the password masked, including parts of it that were parsed as the host."""
    found = re.search(r"://[^:/@\s]*:(\S*)@", url)
    for part in [] if found is None else found[1].split("@"):
        text = text.replace(part, "***") if part else text
    return text


def _connected(url: str) -> str | RDBStorage:
    """Return the storage for a URL, with PostgreSQL connections that detect a restarted or unreachable server."""
    if not url.startswith("postgresql"):
        return url
    options = {"connect_timeout": _CONNECT_WITHIN_S, "keepalives_idle": 30, "tcp_user_timeout": 30_000}
    return RDBStorage(url, engine_kwargs={"pool_pre_ping": True, "connect_args": options})


@contextmanager
def answering(name: str) -> Iterator[None]:
    """Raise an error at once if the storage is unreachable or corrupt while a study is opened.

    Raises:
        StudyError: The storage is unreachable, or corrupt.
    """
    try:
        yield
    except outages() as error:
        if _is_damage(error) or _is_damage(error.__cause__):
            raise StudyError(
                f"the storage of study {name!r} is damaged: {_cause(error)}; restore a copy of it"
            ) from error
        raise StudyError(f"the storage of study {name!r} is unreachable: {_cause(error)}") from error


def create_or_load(
    storage: BaseStorage, name: str, definition: Definition, sampler: optuna.samplers.BaseSampler | None
) -> tuple[optuna.Study, bool]:
    """Return the study with this name, and whether it is new.

    If several drivers create a study at the same time, the batch range chosen by the first applies to all.

    Raises:
        StudyError: A study with this name has a different definition.
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
        )  # only dashboards read these names; everything else uses those in `Definition`
        study.set_metric_names(list(definition.objectives))
    storage.set_study_system_attr(
        storage.get_study_id_from_name(name), DEFINITION, definition.model_dump_json()
    )
    for about, text in definition.in_words().items():
        study.set_user_attr(about, text)
    _compare(storage, name, definition)  # another driver may have stored its own at the same time
    return study, True


def _was_left_blank(storage: BaseStorage, study: optuna.Study, definition: Definition) -> bool:
    """Return whether the study's creator was killed before it stored a definition, so that one may be stored now."""
    deadline = time.monotonic() + STATED_WITHIN_S
    while _stated(storage, study.study_name) is None and not (
        study.user_attrs or study.get_trials(deepcopy=False)
    ):
        if len(study.directions) != len(definition.objectives):
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(_RETRY_S)  # its creator is about to store the definition
    return False


def definition_of(storage: BaseStorage, name: str) -> Definition:
    """Return the definition of the study with this name.

    Raises:
        KeyError: There is no such study.
        StudyError: Another program created the study, or its definition is corrupt.
    """
    text = _stated(storage, name)
    if text is None:
        raise StudyError(
            f"study {name!r} in this storage has no job, because another program created it; "
            "give your study another name"
        )
    try:
        return Definition.from_json(text)
    except SpecError as error:
        raise StudyError(
            f"study {name!r} in this storage is damaged or from a different version: {error}; "
            "give your study another name"
        ) from error


def begun_as(storage: BaseStorage, name: str) -> Definition | None:
    """Return the definition of the study with this name; None if it does not exist or has no definition yet.

    Raises:
        StudyError: Another program created the study, or its definition is corrupt.
    """
    try:
        study = storage.get_study_id_from_name(name)
    except KeyError:
        return None
    is_blank = not storage.get_study_user_attrs(study) and not storage.get_all_trials(study, deepcopy=False)
    return None if is_blank and _stated(storage, name) is None else definition_of(storage, name)


def _stated(storage: BaseStorage, name: str) -> str | None:
    return storage.get_study_system_attrs(storage.get_study_id_from_name(name)).get(DEFINITION)


def _compare(storage: BaseStorage, name: str, definition: Definition) -> None:
    begun = definition_of(storage, name)
    difference = begun.difference(definition.with_batches_of(begun))
    if difference is not None:
        raise StudyError(
            f"study {name!r} was created with other arguments: {difference}; resume with the original arguments, or "
            "give the study another name"
        )


class StorageRetry:
    """Retry policy, which repeats storage calls while the storage is unreachable.

    Args:
        seconds: Time limit of each call, in seconds.

    Attributes:
        waiting: Error message of the current outage; None while the storage is reachable.
        given_up: Event that ends all waiting.
    """

    def __init__(self, seconds: float = 600.0) -> None:
        self.seconds = seconds
        self.waiting: str | None = None
        self.given_up = threading.Event()

    def __call__(self, call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call `call` until the storage is reachable, and return its result.

        Raises:
            StudyError: The storage was unreachable for too long, rejected the call, or `given_up` was set.
        """
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                result = call(*args, **kwargs)
            except outages() as error:
                if _is_refusal(error):
                    raise StudyError(f"the study's storage rejects the call: {_cause(error)}") from error
                self.waiting = _cause(error)
                if time.monotonic() > deadline or self.given_up.wait(_RETRY_S):
                    raise StudyError(
                        f"the study's storage is unreachable ({self.waiting}); all recorded results are kept: restart "
                        "the storage and resume the study"
                    ) from error
            else:
                self.waiting = None
                return result


def within(seconds: float, call: Callable[..., object], *args: Any) -> bool:
    """Return whether a storage call succeeded within `seconds`; a call that hangs is abandoned in its thread."""
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
    """Return the exception types that are raised while a storage is unreachable."""
    errors = _sql_errors()
    lost = (errors.OperationalError, errors.InterfaceError, errors.PendingRollbackError, errors.TimeoutError)
    return (StorageInternalError, *lost, ConnectionError)


def _is_damage(error: BaseException | None) -> bool:
    """Return whether an error is of the type that sqlite3 raises for a file that is corrupt or not a database.

    Subclasses of this type are rejections of one call, such as a missing permission, or outages.
    """
    return isinstance(error, UnicodeDecodeError) or type(error) is _sql_errors().DatabaseError


def _is_refusal(error: BaseException) -> bool:
    """Return whether a reachable storage rejected the call; Optuna wraps every database error in the same class."""
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
    """Return the first line of the error, or of the database error that Optuna's error wraps."""
    origin = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
    return _first_line(error if isinstance(origin, OSError) else origin)


def _first_line(error: BaseException) -> str:
    return without_password((str(error).strip().splitlines() or [type(error).__name__])[0])
