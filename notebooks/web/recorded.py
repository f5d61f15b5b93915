"""The first view of each panel, recorded when the page is built, so that the page shows it before Python has started.

A picture of each panel is in the page itself, so that it is there before any script has run. What is recorded are the
messages that a panel's widgets send when it is opened, by the code and through the bridge of the page. The page creates
its models and views from them, and later compares them with what its own Python sends.

    python notebooks/web/recorded.py BUNDLE FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from bundle import folder_of

PANELS = {
    "memory": "MemoryCalculator",
    "communication": "CommunicationCalculator",
    "pipeline": "PipelineExplorer",
    "planner": "Planner",
}
"""Class of each panel, by its name in addresses."""


def write_recorded(bundle: Path, folder: Path) -> None:
    """Record the panels to `folder`, a JSON file each, in a process that runs the code of the page's `bundle`.

    Their pictures become part of the page, which is `index.html` beside `folder`.
    """
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, __file__, bundle, folder], check=True)
    style = (folder_of("shardscope_widgets") / "kit/lab.css").read_text(encoding="utf-8")
    page, pictures = folder.parent / "index.html", f"<style>{style}</style>"
    for panel, name in PANELS.items():
        file = folder / f"{name}.json"
        written = json.loads(file.read_text(encoding="utf-8"))
        pictures += f'<section data-panel="{panel}" hidden {written.pop("picture")}</section>'
        file.write_text(json.dumps(written), encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<!-- pictures -->", pictures), encoding="utf-8")


def record(bundle: Path, folder: Path) -> None:
    """Open each panel with its default settings, and write the messages of its widgets."""
    with tempfile.TemporaryDirectory() as unpacked:
        zipfile.ZipFile(bundle).extractall(unpacked)
        sys.path.insert(0, unpacked)
        import page_bridge

        messages: list[str] = []

        def post(text: str, buffers: list[Any]) -> None:
            assert not buffers, "a record holds text alone"
            messages.append(text)

        page_bridge.connect(post)
        for name in PANELS.values():
            model = page_bridge.open_panel(name, "{}")
            own = [text for text in messages if json.loads(text)["comm_id"].startswith(("page-", f"{name}-"))]
            written = {"model": model, "messages": own, "picture": page_bridge.picture()}
            (folder / f"{name}.json").write_text(json.dumps(written), encoding="utf-8")


if __name__ == "__main__":
    record(*map(Path, sys.argv[1:]))
