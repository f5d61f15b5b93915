"""A study in a real PostgreSQL: two drivers, one killed; then the database itself, and the study goes on."""

from __future__ import annotations

import math
import os
import pwd
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import shardscope as ss
from conformance.ports import free_port
from conformance.runs import all_gone, family, wait_for
from conformance.studies import JOB, LONG, SPACE, faults_of, instant, running, start_driver
from shardscope.errors import StudyError
from shardscope.tuning import recovery
from shardscope.tuning.session import StudySession

pytestmark = pytest.mark.slow


@dataclass
class Server:
    """A database server of this test alone, on a port of the loopback; run by a user without rights, as it insists."""

    programs: Path
    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://tests@127.0.0.1:{self.port}/postgres"

    def make(self) -> None:
        options = ["-U", "tests", "-A", "trust", "--no-sync", "-E", "UTF8"]
        self.call("initdb", "-D", str(self.folder), *options)

    def start(self) -> None:
        options = f"-p {self.port} -h 127.0.0.1 -k '' -c fsync=off -c shared_buffers=16MB"
        log = str(self.folder / "log")
        self.call("pg_ctl", "-D", str(self.folder), "-l", log, "-w", "-t", "200", "-o", options, "start")

    def kill(self) -> None:
        """The postmaster at once, which asks nobody; its children end when they notice."""
        try:
            postmaster = psutil.Process(int((self.folder / "postmaster.pid").read_text().split()[0]))
            family = [postmaster, *postmaster.children(recursive=True)]
        except (FileNotFoundError, psutil.NoSuchProcess):
            return  # it does not run
        for process in family:
            process.kill()
        _, left = psutil.wait_procs(family, timeout=60)
        assert not left

    def call(self, program: str, *arguments: str) -> None:
        command = [str(self.programs / program), *arguments]
        if os.getuid() == 0:
            user = pwd.getpwnam("nobody")
            command = [
                "setpriv",
                f"--reuid={user.pw_uid}",
                f"--regid={user.pw_gid}",
                "--clear-groups",
                *command,
            ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, cwd="/", stdin=subprocess.DEVNULL, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install 'psycopg[binary]')")
    port = free_port()
    # Not below pytest's own folders, which are for this user alone.
    folder = Path(tempfile.gettempdir(), f"shardscope-postgres-{os.getpid()}-{port}")
    folder.mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(folder, pwd.getpwnam("nobody").pw_uid, pwd.getpwnam("nobody").pw_gid)
    server = Server(programs, folder / "data", port)
    try:
        server.make()
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.weekly
def test_a_driver_is_killed_and_then_the_database(server: Server) -> None:
    other = start_driver("long", server.url)
    _, run = running(other)
    session = StudySession.open(LONG, SPACE, trials=2, name="long", storage=server.url, baselines=False)
    wait_for(lambda: session.driver.tick() and 1 in session.driver.live)
    processes = family(run)
    other.kill()
    other.wait()
    assert all_gone(processes)
    session.driver.parallel = 2
    wait_for(lambda: session.driver.tick() and 2 in session.driver.live)
    records = session.records()
    assert [(r.state, r.counted) for r in records] == [
        ("failed", False),
        ("running", True),
        ("running", True),
    ]
    assert (records[2].retry_of, records[2].params) == (0, records[0].params)

    server.kill()
    with pytest.raises(StudyError, match="is unreachable"):
        StudySession.open(name="long", storage=server.url, baselines=False)
    runs = [live.run for live in session.driver.live.values()]
    assert all(run.is_alive for run in runs)  # what trains needs no database
    threading.Timer(1.0, server.start).start()
    session.driver._recovered_at = -math.inf
    assert session.driver.tick()  # waits until it answers
    assert [r.state for r in session.records()] == ["failed", "running", "running"]

    server.kill()
    asked = time.monotonic()
    session.driver.stop()  # while it is away
    assert time.monotonic() - asked < 20.0
    assert not any(run.is_alive for run in runs)
    server.start()
    again = StudySession.open(name="long", storage=server.url, trials=2, parallel=2, baselines=False)
    wait_for(lambda: again.driver.tick() and len(again.driver.live) == 2)
    records = again.records()
    assert sorted(str(r.retry_of) for r in records[3:]) == ["1", "2"]
    for record in records[3:]:
        assert record.retry_of is not None
        assert record.params == records[record.retry_of].params
    again.driver.stop()


def test_two_drivers_share_the_trials_and_the_database_is_killed_meanwhile(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between any two of the drivers' steps, with connections open and transactions under way."""
    monkeypatch.setattr("shardscope.tuning.driver.launch", instant(ss.launch(JOB).wait(100).path))
    monkeypatch.setenv(recovery.SILENCE_VARIABLE, "2")
    drivers = [
        StudySession.open(JOB, SPACE, trials=12, name="two", storage=server.url, seed=i) for i in range(2)
    ]

    def kill_and_start() -> None:
        for _ in range(2):
            time.sleep(0.3)
            server.kill()
            server.start()

    threads = [threading.Thread(target=session.run) for session in drivers]
    killer = threading.Thread(target=kill_and_start)
    for thread in (*threads, killer):
        thread.start()
    for thread in (*threads, killer):
        thread.join(120)
        assert not thread.is_alive()
    records = drivers[0].records()
    assert faults_of(records, 12) == []
