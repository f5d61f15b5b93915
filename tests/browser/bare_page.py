"""A widget's own script in an otherwise empty page, with a model that changes as ipywidgets' models do.

That is, all attributes of an update are set, then `change:NAME` is triggered for each that has changed, in the order of
the update, and an error in a listener ends the update: the listeners after it hear nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardscope_widgets.kit.live_figure import library_code

SCRIPT = """async ([script, state, plotly]) => {
    const listeners = [];
    const widget_manager = { get_model: async () => ({ get: () => plotly }) };
    window.sent = {};
    window.model = {
        widget_manager,
        get: (name) => state[name],
        on: (names, act) => names.split(" ").forEach((name) => listeners.push([name, act])),
        off: (names, act) => listeners.splice(0, Infinity, ...listeners.filter(([, other]) => other !== act)),
        set: (change, value) => {
            const update = typeof change === "string" ? { [change]: value } : change;
            const names = Object.keys(update).filter(
                (name) => JSON.stringify(update[name]) !== JSON.stringify(state[name]));
            Object.assign(state, update);
            if (typeof change === "string") Object.assign(window.sent, update);
            for (const name of names) {
                for (const [other, act] of [...listeners]) if (other === `change:${name}`) act();
            }
            for (const [other, act] of [...listeners]) if (names.length && other === "change") act();
        },
        save_changes: () => {},
    };
    const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
    const { render } = (await import(url)).default;
    window.end?.();
    document.body.innerHTML = "<div class='ss-lab' style='width: 900px'><div id='place'></div></div>";
    window.end = render({ model: window.model, el: document.getElementById("place") });
}"""


class BarePage:
    """One widget in a page; `errors` are those of its scripts."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def show(self, script: str, state: dict[str, Any], *, plotly: bool = False) -> None:
        """Show a widget with this script (its `_esm`) and these traits."""
        is_loaded = self.page.evaluate("() => 'shardscopePlotly' in window")
        self.page.evaluate(SCRIPT, [script, state, library_code() if plotly and not is_loaded else ""])

    def update(self, *changes: dict[str, Any]) -> None:
        """Set traits as the kernel does, one message a dictionary, and let the widget answer."""
        for change in changes:
            self.page.evaluate("(change) => { model.set(change); }", change)

    def sent(self, name: str) -> Any:
        """What the widget last set itself, such as the row that was clicked."""
        return self.page.evaluate("(name) => window.sent[name] ?? null", name)

    def table(self) -> list[list[str]]:
        """The texts of all rows of the table, its head first."""
        return self.page.evaluate(
            "() => [...document.querySelectorAll('table tr')].map(row => [...row.children].map(c => c.textContent))"
        )


@contextmanager
def bare_page(context: Any) -> Iterator[BarePage]:
    """Open a page for one widget after another, and fail on an error of a script."""
    page = context.new_page()
    opened = BarePage(page)
    try:
        yield opened
        assert opened.errors == []
    finally:
        page.close()
