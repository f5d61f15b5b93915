"""One notebook open in one browser page, driven by Playwright."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser.lab_server import Server

_PATIENCE_MS = 90_000
_IMAGES = Path(__file__).parents[2] / "notebooks" / "images"
KERNEL_IDLE = "() => jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
CELL_ERRORS = """() => jupyterapp.shell.currentWidget.content.widgets.flatMap(
    (c, i) => c.model.type !== 'code' ? [] : c.model.sharedModel.outputs
        .filter(o => o.output_type === 'error').map(o => `cell ${i}: ${o.ename}: ${o.evalue}`))"""
RUN_UNTIL = """async (text) => {
    const notebook = jupyterapp.shell.currentWidget.content;
    const last = notebook.widgets.findIndex(
        c => c.model.type === 'code' && c.model.sharedModel.getSource().includes(text));
    for (let i = 0; i <= last; i++) {
        notebook.deselectAll();
        notebook.activeCellIndex = i;
        await jupyterapp.commands.execute('notebook:run-cell');
    }
}"""
EVALUATE = """async (code) => {
    const future = jupyterapp.shell.currentWidget.sessionContext.session.kernel
        .requestExecute({code, store_history: false});
    let text = '', error = '';
    future.onIOPub = m => {
        if (m.header.msg_type === 'stream' && m.content.name === 'stdout') text += m.content.text;
        if (m.header.msg_type === 'error') error = m.content.traceback.join('\\n');
    };
    await future.done;
    if (error) throw new Error(error);
    return text;
}"""
RESTART = "() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
NO_SPLASH = "() => !document.getElementById('jupyterlab-splash')"
SHUT_DOWN = (
    "async () => { const k = jupyterapp?.shell.currentWidget?.sessionContext; if (k) await k.shutdown(); }"
)


CONTRAST = """(selector) => {
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map(Number)
            .map(v => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = light(getComputedStyle(document.body).getPropertyValue('--jp-layout-color0').trim()
        .replace(/^#(.)(.)(.)$/, '#$1$1$2$2$3$3').replace(/^#(..)(..)(..)$/, (_, ...c) =>
            'rgb(' + c.slice(0, 3).map(x => parseInt(x, 16)).join(',') + ')').replace(/^white$/,
            'rgb(255,255,255)'));
    return [...document.querySelectorAll(selector)].map(node => {
        const style = getComputedStyle(node);
        const ink = light(node instanceof SVGElement ? style.fill : style.color);
        return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    });
}"""
MODULES_MAY_TAKE_LONG = """(() => {
    const timeout = AbortSignal.timeout.bind(AbortSignal);
    AbortSignal.timeout = ms => timeout(30 * ms);
})()"""
"""Run before a page's own scripts: anywidget gives up a model whose module has not loaded within 2 seconds."""


def eventually(page: Any, check: Callable[[], None], *, timeout_s: float = 60.0) -> None:
    """Repeat `check` until it raises no AssertionError: what is asked of a page is answered a little later."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            check()
        except AssertionError:
            if time.monotonic() > end:
                raise
            page.wait_for_timeout(100)
        else:
            return


class NotebookPage:
    def __init__(self, page: Any, server: Server) -> None:
        self.page, self._server = page, server
        page.set_default_timeout(_PATIENCE_MS)
        page.set_default_navigation_timeout(_PATIENCE_MS)
        self.left_loopback: list[str] = []
        self.console_errors: list[str] = []
        page.on("request", self._note_where)
        page.on("console", self._note)
        page.on("pageerror", lambda e: self.console_errors.append(e.stack or str(e)))

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.console_errors.append(
                f"{message.text} {[str(arg) for arg in message.args]} {message.location}"
            )

    def _note_where(self, request: Any) -> None:
        if not request.url.startswith((self._server.base, "data:", "blob:")):
            self.left_loopback.append(request.url)

    def open(self, notebook: Path, *, timeout_ms: int = 120_000) -> NotebookPage:
        name = f"{notebook.stem}-{secrets.token_hex(4)}.ipynb"
        shutil.copy(notebook, self._server.root / name)
        shutil.copytree(_IMAGES, self._server.root / "images", dirs_exist_ok=True)
        self.page.goto(f"{self._server.base}/lab/tree/{name}?token={self._server.token}&reset")
        self._wait_for_kernel(timeout_ms)
        self.page.evaluate("() => jupyterapp.shell.collapseLeft?.()")
        return self

    def _wait_for_kernel(self, timeout_ms: int) -> None:
        self.page.wait_for_selector(".jp-Notebook", timeout=timeout_ms)
        self.page.wait_for_function(KERNEL_IDLE, timeout=timeout_ms)

    def reload(self, *, timeout_ms: int = 120_000) -> None:
        self.page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")
        self.page.wait_for_function("() => !jupyterapp.shell.currentWidget.context.model.dirty")
        self.page.reload()
        self._wait_for_kernel(timeout_ms)

    def restart_kernel(self, *, timeout_ms: int = 120_000) -> None:
        """As the button with the arrow does; nothing is run again."""
        self.page.evaluate(RESTART)
        self.page.wait_for_function(KERNEL_IDLE, timeout=timeout_ms)

    def use_theme(self, theme: str) -> None:
        """Change the theme, once JupyterLab's own splash screen is gone: it trips over a second one."""
        self.page.wait_for_function(NO_SPLASH)
        self.page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
        light = str("Light" in theme).lower()
        self.page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{light}'")
        self.page.wait_for_timeout(500)  # the splash fades for 200 ms after it was let go
        self.page.wait_for_function(NO_SPLASH)

    def run_all(self) -> None:
        """Run every cell and raise the first error that a cell shows."""
        self.page.evaluate("() => jupyterapp.commands.execute('notebook:run-all-cells')")
        errors = self.page.evaluate(CELL_ERRORS)
        assert not errors, errors

    def run_until(self, text: str) -> None:
        """Run the cells from the top to the first code cell that contains `text`; raise the first error
        shown.
        """
        self.page.evaluate(RUN_UNTIL, text)
        errors = self.page.evaluate(CELL_ERRORS)
        assert not errors, errors

    def kernel(self, expression: str) -> Any:
        """Evaluate a Python expression in the notebook's kernel and return it, by way of JSON."""
        text = self.page.evaluate(EVALUATE, f"import json as _json; print(_json.dumps({expression}))")
        return json.loads(text.strip().splitlines()[-1])

    def until(self, expression: str, expected: Any) -> None:
        """Wait until a Python expression has this value in the kernel, which answers the page in another thread."""

        def has_it() -> None:
            assert self.kernel(expression) == expected

        eventually(self.page, has_it)

    def can_be_read(self, selector: str) -> None:
        """Wait until all that matches has a contrast of 4.5 to the ground, as it has once it is drawn anew."""

        def has_contrast() -> None:
            ratios = self.page.evaluate(CONTRAST, selector)
            assert ratios
            assert min(ratios) >= 4.5

        eventually(self.page, has_contrast)

    def shut_down(self) -> None:
        self.page.evaluate(SHUT_DOWN)
        self.page.close()
