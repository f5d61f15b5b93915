"""The tour fits into a Binder session: server, kernel and the ranks of its runs hold at most 900 MB at any time."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest

from browser.lab_server import jupyter_server
from browser.notebook_page import NotebookPage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")

TOUR = Path(__file__).parents[2] / "notebooks/01-tour.ipynb"
MOST_MB = 900
LEAST_RANKS = 4
MAPPING = re.compile(
    r"^[0-9a-f]+-\S+ \S+ (\w+) \S+ \d+ *(\S*)\n.*?^Rss: *(\d+).*?^Anonymous: *(\d+)", re.MULTILINE | re.DOTALL
)


def held_mb(pids):
    """Memory of processes, as if there were no others: a page that several of them share counts once.

    Plain PSS would count pages of torch's libraries only in part while other processes of the machine map them too.
    """
    total_kb, of_files = 0, Counter()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            rollup = dict(
                re.findall(r"^(\w+): *(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            )
            own = Counter()
            for offset, name, resident, anonymous in MAPPING.findall(Path(f"/proc/{pid}/smaps").read_text()):
                if name.startswith("/"):
                    own[name, offset] += int(resident) - int(anonymous)
            total_kb += int(rollup["Pss_Anon"]) + int(rollup["Pss_Shmem"])
            of_files |= own  # the larger count of each
    return (total_kb + of_files.total()) * 1024 / 1e6


def watch(server, found, ended):
    """Note the memory and the number of ranks' processes, until `ended`."""
    while not ended.wait(0.3):
        started = psutil.Process(server.process.pid).children(recursive=True)
        pids = {server.process.pid, *(child.pid for child in started), *server.working_on_runs()}
        found.append((held_mb(pids), len(pids)))


def test_the_tour_fits_into_a_binder_session(browser_context, tmp_path):
    found, ended, tour = [], threading.Event(), tmp_path / TOUR.name
    tour.write_text(TOUR.read_text().replace("steps=200", "steps=60"))  # more steps take no more memory
    with jupyter_server(tmp_path / "jupyter") as server:
        opened = NotebookPage(browser_context.new_page(), server)
        watching = threading.Thread(target=watch, args=(server, found, ended))
        watching.start()
        try:
            opened.open(tour).run_all()
        finally:
            ended.set()
            watching.join()
            opened.shut_down()
    assert max(pids for _, pids in found) >= LEAST_RANKS + 2  # ranks, server and kernel were seen
    assert max(held for held, _ in found) <= MOST_MB
    print(f"{max(held for held, _ in found):.0f} MB in {len(found)} looks")
