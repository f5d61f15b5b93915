"""Check the links of the built site: each leads to a file and an anchor of it; `--external` asks for the others.

python notebooks/web/links.py build/web              # links inside the site; the build does this, too
python notebooks/web/links.py --external build/web   # also asks every other address for an answer: needs a network
"""

from __future__ import annotations

import argparse
import re
import sys
import urllib.error
import urllib.request
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

PATIENCE_S = 20.0


class _Page(HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.links |= {given[name] for name in ("href", "src", "srcset") if given.get(name)}


@cache
def _page(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    panels = path.with_name("page.js")
    if path.name == "index.html" and panels.exists():  # the calculators, which a script puts into the page
        page.anchors |= set(re.findall(r'\{ id: "(\w+)"', panels.read_text(encoding="utf-8")))
    return page


def broken_links(site: Path) -> list[str]:
    """Return each link to a file or an anchor that the site does not have, with the page that has it."""
    found = []
    for path in sorted(site.rglob("*.html")):
        for link in sorted(_page(path).links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            fragment = unquote(parts.fragment).partition("?")[0]
            anchors = _page(target).anchors if target.suffix == ".html" and target.exists() else set()
            if not target.exists() or (fragment and target.suffix == ".html" and fragment not in anchors):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


def external_links(site: Path) -> list[str]:
    """Return every address outside the site to which it leads, without anchors."""
    links = {link for path in site.rglob("*.html") for link in _page(path).links}
    return sorted({link.partition("#")[0] for link in links if urlsplit(link).scheme in {"http", "https"}})


def _answer(address: str) -> str:
    request = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0"})  # noqa: S310 - http(s) only
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError as error:
        return str(error)


def main() -> int:
    """Print broken links and return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Check the links of the built site.")
    parser.add_argument("site", type=Path, help="folder of the site")
    parser.add_argument("--external", action="store_true", help="also ask the addresses outside the site")
    asked = parser.parse_args()
    broken = broken_links(asked.site)
    if asked.external:
        answers = {address: _answer(address) for address in external_links(asked.site)}
        broken += [f"{address}: {answer}" for address, answer in answers.items() if answer != "200"]
    print("\n".join(broken) or "all links are good")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
