"""Seconds from a panel's address on the static page to its first picture, with an empty and with a full cache.

    python notebooks/web/build.py --out build/web
    python tests/benchmarks/first_panel.py build/web [loads]

The page is served on loopback. "Cold" and "live" are of a new browser, "warm" is of a second visit with the same one.
A panel is live once Python in the browser answers its controls.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.chromium import chromium

PANELS = ("memory", "communication", "pipeline", "planner")
MARK = "name => performance.getEntriesByName(name)[0]?.startTime"
WATCH = """(() => {
    const isDrawn = node => node?.checkVisibility() && node.getBoundingClientRect().height > 100;
    const look = () => {
        const id = location.hash.slice(1);
        const places = [`.picture[data-panel="${id}"]`, `#panel-${id} .main-svg`];
        if (id && places.some(each => isDrawn(document.querySelector(each)))) performance.mark("drawn");
        else requestAnimationFrame(look);
    };
    look();
})()"""
MOST_MS = 120_000


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_args: object) -> None:
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder on a free port of loopback, and give its address."""
    handler = functools.partial(_Quiet, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def seconds_until(page: Page, mark: str) -> float:
    """Return the seconds from the page's address to a mark that the page sets."""
    return page.wait_for_function(MARK, arg=mark, timeout=MOST_MS).json_value() / 1000


def main(site: str, loads: int = 5) -> None:
    """Print the median and the worst load for each panel."""
    taken = defaultdict[tuple[str, str], list[float]](list)
    with sync_playwright() as playwright, served(Path(site)) as address:
        for _ in range(loads):
            for panel in PANELS:
                with (
                    tempfile.TemporaryDirectory() as profile,
                    chromium(playwright, Path(profile)) as context,
                ):
                    page = context.new_page()
                    page.add_init_script(WATCH)
                    page.goto(f"{address}#{panel}")
                    taken[panel, "cold"].append(seconds_until(page, "drawn"))
                    taken[panel, "live"].append(seconds_until(page, f"live-{panel}"))
                    page.goto("about:blank")
                    page.goto(f"{address}#{panel}")
                    taken[panel, "warm"].append(seconds_until(page, "drawn"))
    for (panel, kind), times in sorted(taken.items()):
        print(
            f"{panel:<14} {kind}  median {median(times):.3f} s, worst {max(times):.3f} s, {len(times)} loads"
        )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
