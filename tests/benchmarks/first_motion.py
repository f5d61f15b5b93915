"""Seconds from the tour notebook's first text on the page to a picture that moves, as `shardscope lab` opens it.

    python tests/benchmarks/first_motion.py [loads]

Each load is a new browser with an empty cache. Two screenshots of the picture, half a second apart, must differ.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.chromium import chromium
from browser.lab_server import jupyter_server
from browser.notebook_page import NotebookPage

TOUR = Path(__file__).parents[2] / "notebooks" / "01-tour.ipynb"
WATCH = """(() => {
    const seen = window.seen = {};
    const look = () => {
        const title = document.querySelector('.jp-Notebook h1');
        if (title?.checkVisibility()) seen.text ??= performance.now();
        const picture = document.querySelector('.jp-Notebook img');
        if (picture?.complete && picture.naturalWidth && picture.checkVisibility()) seen.picture ??= performance.now();
        if (!seen.picture) requestAnimationFrame(look);
    };
    look();
})()"""
PICTURE = ".jp-Notebook img"
HALF_A_SECOND_MS = 500


def load(page: NotebookPage) -> tuple[float, float]:
    """Open the tour, and return the seconds from its address to its text, and from its text to its picture."""
    page.page.add_init_script(WATCH)
    page.open(TOUR)
    seen = page.page.wait_for_function("() => window.seen.picture && window.seen").json_value()
    picture = page.page.locator(PICTURE).first
    before = picture.screenshot()
    page.page.wait_for_timeout(HALF_A_SECOND_MS)
    if picture.screenshot() == before:
        raise AssertionError("the picture does not move")
    return seen["text"] / 1000, (seen["picture"] - seen["text"]) / 1000


def main(loads: int = 5) -> None:
    """Print each load, and the medians."""
    rows = []
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        with jupyter_server(folder / "jupyter") as server:
            for number in range(loads):
                with chromium(playwright, folder / f"profile-{number}") as context:
                    page = NotebookPage(context.new_page(), server)
                    text, motion = load(page)
                    rows.append((text, motion))
                    print(
                        f"text after {text:.2f} s, moving picture {motion:.2f} s later, load {os.getloadavg()[0]:.1f}"
                    )
                    page.shut_down()
    for label, column in (("text", 0), ("moving picture after it", 1)):
        print(f"{label}: median {median(row[column] for row in rows):.2f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
