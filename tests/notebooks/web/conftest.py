"""The web page, with the reference, built once for all workers, served on loopback and opened in Chromium."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from browser.chromium import chromium as chromium_in
from browser.chromium import needs_chromium
from notebooks.running import shared_folder

REPOSITORY = Path(__file__).parents[3]
BUILD, NOTEBOOK = REPOSITORY / "notebooks/web/build.py", REPOSITORY / "notebooks/03-memory.ipynb"
PATIENCE_MS = 120_000


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args):
        pass


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder of the page with one rendered notebook."""
    shared = shared_folder(tmp_path_factory, "web")
    out = Path(os.environ.get("SHARDSCOPE_PAGE") or shared / "page")
    with FileLock(shared / "page.lock"):
        if not out.exists():
            command = [
                BUILD,
                "--out",
                out,
                "--pyodide",
                REPOSITORY / "build/pyodide",
                "--notebooks",
                NOTEBOOK,
            ]
            done = subprocess.run(
                [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=280
            )
            if "cannot download Pyodide" in done.stderr:
                pytest.skip(done.stderr)
            if done.returncode:
                shutil.rmtree(
                    out, ignore_errors=True
                )  # so that no other worker takes half a page for a whole one
            assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def site(built):
    """The page, at an address on loopback."""
    needs_chromium()
    handler = functools.partial(_Quiet, directory=built)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def chromium(playwright_api, tmp_path_factory):
    profile = tmp_path_factory.mktemp("profile")
    with chromium_in(playwright_api, profile, {"width": 1400, "height": 1000}) as context:
        yield context


def _left(site, url):
    """What was asked of other places than the page's own."""
    return [] if url.startswith((site, "data:", "blob:")) else [f"left loopback: {url}"]


def _failed(request):
    """What failed, unless the page was left while it was still loading that."""
    return [] if request.failure == "net::ERR_ABORTED" else [f"failed: {request.url}: {request.failure}"]


@pytest.fixture(scope="module")
def page(site, chromium):
    """A browser page; a request that leaves loopback fails the test, and so does an error in the console."""
    opened, wrong = chromium.new_page(), []
    opened.set_default_timeout(PATIENCE_MS)
    opened.on("request", lambda request: wrong.extend(_left(site, request.url)))
    opened.on("requestfailed", lambda request: wrong.extend(_failed(request)))
    opened.on("pageerror", lambda error: wrong.append(error.stack or str(error)))
    opened.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    yield opened
    opened.close()
    assert wrong == []
