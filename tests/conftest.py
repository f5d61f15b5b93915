"""What holds for every test: runs of its own, one compute thread a process, no process left behind."""

from __future__ import annotations

import gc
import re
import socket
import sys
import time
import uuid
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from conformance.processes import marked
from conformance.ranks import WORLD_SIZES, RankPool, RankPools
from conformance.runs import end_all
from conformance.thinning import at_their_ranks, thin, without_most_of_tcp
from shardscope.calibration.this_machine import CoreSpeed
from shardscope.machine import Place, can_share_memory

# No deadlines for examples, nor for drawing them: they would be by the clock of a machine that others use too.
settings.register_profile(
    "unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")

MARK = "SHARDSCOPE_TEST_SESSION"
"""Set for this session and inherited by every process it starts, however detached."""
FAILED = pytest.StashKey[bool]()
GRACE_S = 60.0
_FOLDERS = count()
BOOKKEEPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # end with pytest itself


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="also run slow tests, and more cases of those that are sampled, as each change must pass",
    )
    parser.addoption(
        "--every-case", action="store_true", help="run all cases, weekly tests, and notebooks as they are"
    )


@pytest.fixture(scope="session")
def playwright_api() -> Iterator[object]:
    """Playwright's one instance of this process: a second one that overlaps it is refused."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    with api.sync_playwright() as playwright:
        yield playwright


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have pytest-rerunfailures send its messages at once.

    For each test, a worker asks the main process something, and then sends it what has no answer. The kernel would hold
    back the next test's question until the other end acknowledges that, after 40 ms: ten times as long as most tests.
    """
    connection = getattr(getattr(session.config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests: millions of objects that stay, through which no search for garbage needs to look."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], left_out = at_their_ranks(items)
    if not _names_a_test(config):
        if config.getoption("--every-case"):
            items[:], more = without_most_of_tcp(items)
        else:
            items[:], more = thin(items, quick=not config.getoption("--full"))
        left_out += more
    config.hook.pytest_deselected(items=left_out)


def _names_a_test(config: pytest.Config) -> bool:
    """Whether somebody asks for single tests, who then gets them."""
    return any("::" in argument for argument in config.args)


@pytest.fixture(scope="session", autouse=True)
def _session_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    variables = {
        MARK: uuid.uuid4().hex,
        "OMP_NUM_THREADS": "1",
        "SHARDSCOPE_CACHE": str(tmp_path_factory.mktemp("cache")),
        "SHARDSCOPE_RUNS": str(tmp_path_factory.mktemp("runs")),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
        if "shardscope.runtime.launcher.driver_server" in sys.modules:
            sys.modules["shardscope.runtime.launcher.driver_server"].driver.close()
        leftover = _wait_for_no_survivors(variables[MARK])
    assert not leftover, "processes outlived the tests:\n" + "\n".join(leftover)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder of this test's own, numbered through.

    Pytest's own fixture looks for a free name among the folders of all earlier tests, which after thousands of them
    takes longer than most tests.
    """
    name = re.sub(r"\W", "_", request.node.name)[:26]
    return tmp_path_factory.mktemp(f"{next(_FOLDERS)}-{name}", numbered=False)


@pytest.fixture(autouse=True)
def runs_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """The folder of this test's runs; nothing of another test is in it.

    A test that passes has ended its runs. What one that fails has left running would slow the next ones down.
    """
    root = tmp_path / "runs"
    monkeypatch.setenv("SHARDSCOPE_RUNS", str(root))
    yield root
    if request.node.stash.get(FAILED, False):
        end_all(root)


@pytest.fixture
def two_known_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict for a machine of two cores of known speed, whatever this one is and is busy with."""
    monkeypatch.setattr("shardscope.prediction.rates.core_speed", lambda: CoreSpeed(1.05e11, 9.5e10))
    monkeypatch.setattr(Place, "here", lambda: Place(2.0, can_share_memory()))


def _wait_for_no_survivors(mark: str) -> list[str]:
    deadline = time.monotonic() + GRACE_S
    while (survivors := _survivors(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return survivors


def _survivors(mark: str) -> list[str]:
    """Living processes with this session's mark, other than pytest and multiprocessing's own bookkeeper."""
    found = []
    for process in marked(MARK, mark):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if not any(helper in command for helper in BOOKKEEPERS):
            found.append(f"{process.pid} {command}")
    return found


@pytest.fixture(scope="session", params=WORLD_SIZES, ids="{0} ranks".format)
def pools(request: pytest.FixtureRequest) -> Iterator[RankPools]:
    """Holds the pools of this world size."""
    pools = RankPools(request.param)
    yield pools
    pools.close()


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """What carries the messages of `pool`: what a job gets by default, unless a test class is run over several."""
    name: str = getattr(request, "param", "auto")
    return name


@pytest.fixture
def pool(pools: RankPools, transport: str) -> RankPool:
    """Two, three and four real ranks in one group."""
    return pools.over(transport)


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    """Eight real ranks in one group, for the tests of one module."""
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.fixture
def tcp_pool(pools: RankPools) -> RankPool:
    """Like `pool`, over TCP."""
    return pools.over("tcp")
