"""Real-browser tests: JupyterLab on loopback, Playwright, the system's Chromium.

One server and one browser serve the session; each test, or a module's tests together, get a fresh page, notebook and
kernel. A request that leaves loopback is aborted and fails the test, and so does an error in the browser's console or a
process that stays behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time

import pytest

from browser.chromium import chromium, needs_chromium
from browser.lab_server import jupyter_server
from browser.notebook_page import MODULES_MAY_TAKE_LONG, NotebookPage


@pytest.hookimpl(tryfirst=True)  # before slow ones are left out
def pytest_collection_modifyitems(items):
    for item in items:
        if "browser" in item.path.parts:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    needs_chromium()
    with jupyter_server(tmp_path_factory.mktemp("jupyter")) as running:
        yield running


@pytest.fixture(scope="session")
def browser_context(playwright_api, tmp_path_factory):
    needs_chromium()
    with chromium(playwright_api, tmp_path_factory.mktemp("profile")) as context:
        context.add_init_script(MODULES_MAY_TAKE_LONG)
        yield context


@contextlib.contextmanager
def _page(server, browser_context, picture):
    opened = NotebookPage(browser_context.new_page(), server)
    try:
        yield opened
        assert opened.left_loopback == [], "the page asked for something outside loopback"
        assert opened.console_errors == []
    finally:
        opened.page.screenshot(path=str(picture))
        opened.shut_down()
        left = _left_behind(server)
        for pid in left:  # of a test that failed, too: it would disturb the next one
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(
            server.runs, ignore_errors=True
        )  # a lab shows the newest runs: those of its own test only
    assert left == {}


@pytest.fixture
def notebook(server, browser_context, tmp_path, request):
    with _page(server, browser_context, tmp_path / f"{request.node.name}.png") as opened:
        yield opened


@pytest.fixture(scope="module")
def shared_notebook(server, browser_context, tmp_path_factory):
    """One page and one kernel for all tests of a module: what the one has done, the next one finds."""
    with _page(server, browser_context, tmp_path_factory.mktemp("shared") / "last.png") as opened:
        yield opened


def _left_behind(server, timeout_s=60):
    """Processes that still work on the runs of this session, once they have had time to end."""
    end = time.monotonic() + timeout_s
    while (left := server.working_on_runs()) and time.monotonic() < end:
        time.sleep(0.2)
    return left
