"""Live studies with conditional settings, driven at random: the table of trials says what the storage says.

    python tests/campaigns/live_studies.py                       50 studies
    python tests/campaigns/live_studies.py --first 10 --count 5

Each case is a Tuning Lab with a random space, whose trials are real runs, and its table in a page of its own, with the
widget's own script. While the study runs, rows and headings are clicked, filters typed, trials pinned, pruned and run
again, and the study is stopped, continued, and left for another one. At each look, every row that is shown must have
the number, state, settings and values of its trial in the storage, each under its heading; a click must choose the
trial of its row. A violation is any difference, and any error of the page or of the lab.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import optuna
from _campaign import Outcome, run
from playwright.sync_api import sync_playwright

import shardscope as ss
from browser.bare_page import BarePage, bare_page
from browser.chromium import chromium
from shardscope.tuning.records import TrialRecord
from shardscope_widgets import TuningLab
from shardscope_widgets.figures._trials import objective_text, short_name, value_text
from shardscope_widgets.tuning_lab._parts import TrialTable

CASES = 50
LIMIT_S = 150.0
RATES = (1e-3, 1e-1, "log")
CONDITIONAL: dict[str, dict[str, Any]] = {
    "compression": {
        "powersgd": {"compression[powersgd].rank": (1, 8)},
        "topk": {"compression[topk].ratio": (0.01, 0.1, "log")},
        "int8": {},
        "none": {},
    },
    "optimizer": {
        "lamb": {"optimizer[lamb].lr": RATES, "optimizer[lamb].weight_decay": (1e-4, 1e-1, "log")},
        "lars": {"optimizer[lars].lr": RATES, "optimizer[lars].trust_coefficient": (1e-4, 1e-2, "log")},
        "nesterov": {
            "optimizer[nesterov].lr": RATES,
            "optimizer[nesterov].weight_decay": (1e-4, 1e-1, "log"),
        },
        "sgd": {"optimizer[sgd].lr": RATES},
    },
}
FILTERS = (
    "", "", "front", "complete", "rank>2", "lr<0.02", "baseline", "state=pruned", "powersgd", "ratio>0.02 lr>0.001",
)  # fmt: skip
ENDED = {"complete", "pruned", "failed", "impossible"}


def _space(source: random.Random) -> dict[str, Any]:
    space: dict[str, Any] = {}
    for owner in source.sample(list(CONDITIONAL), source.randint(1, 2)):
        names = source.sample(list(CONDITIONAL[owner]), source.randint(2, 4))
        space |= {owner: names}
        for name in names:
            space |= CONDITIONAL[owner][name]
    if "optimizer" not in space:
        space["optimizer.lr"] = RATES
    return space | source.choice(({}, {"warmup": (0.0, 0.3)}, {"batch": ss.PowersOfTwo(32, 128)}))


class Drive:
    """One lab and the page of its table."""

    def __init__(self, source: random.Random, page: BarePage, folder: Path) -> None:
        self.source, self.page, self.looks, self.columns = source, page, 0, set[tuple[str, ...]]()
        steps = source.choice((4, 8))
        job = ss.Job(
            model="mlp", data="digits", strategy="ring", world_size=2, steps=steps, eval_every=steps // 2
        )
        self.lab = TuningLab(
            job, _space(source), name="first", root=folder, trials=source.randint(5, 7),
            parallel=source.choice((1, 2)), baselines=source.random() < 0.4,
            objectives=source.choice((["loss", "bytes"], ["loss"], ["loss", "seconds", "bytes"])),
            sampler=optuna.samplers.RandomSampler(seed=source.randrange(10_000)),
        )  # fmt: skip
        self.told: dict[str, Any] = {}
        page.show(TrialTable._esm, self._state() | {"query": ""})

    def _state(self) -> dict[str, Any]:
        table = self.lab.screen.table
        return {
            "header": table.header,
            "texts": table.texts,
            "rows": list(table.rows),
            "chosen": table.chosen,
        }

    def send(self) -> None:
        """Send what has changed, as the kernel does: in one message, in the order of a set."""
        state = self._state()
        changed = [name for name in state if state[name] != self.told.get(name)]
        self.source.shuffle(changed)
        self.told = state
        if changed:
            self.page.update({name: state[name] for name in changed})

    def act(self) -> None:
        """Do something that a person might do."""
        lab, page, source = self.lab, self.page.page, self.source
        act = source.choice(
            ("row", "row", "sort", "filter", "key", "pin", "prune", "again", "stop", "wait", "wait")
        )
        rows, heads = page.locator("tbody tr"), page.locator("thead button")
        if act == "row" and rows.count():
            row = rows.nth(source.randrange(rows.count()))
            number = int(row.get_attribute("data-number"))
            row.locator("td").first.click()
            assert self.page.sent("chosen") == number, "a click chose another trial"
            lab.screen.table.chosen = number
            assert lab.chosen == number, lab.problem
            assert f"Trial {number}" in lab.screen.chosen.head.value, "the panel shows another trial"
        elif act == "sort" and heads.count():
            heads.nth(source.randrange(heads.count())).click()
        elif act == "filter":
            page.locator("input").fill(source.choice(FILTERS))
        elif act == "key":
            page.keyboard.press(source.choice(("ArrowDown", "ArrowUp")))
            chosen = self.page.sent("chosen")
            if chosen is not None:
                lab.screen.table.chosen = chosen
        elif act == "pin" and any(trial.number == lab.chosen for trial in lab._trials):
            lab.pin()
        elif act == "prune" and lab.chosen >= 0:
            lab._prune_chosen()
        elif act == "again" and lab.trials < 9:
            if any(trial.number == lab.chosen and trial.state in ENDED for trial in lab._trials):
                lab.again()
        elif act == "stop" and source.random() < 0.3 and lab.is_running:
            lab.stop()
            lab.wait(60)
            self.look()
            lab.start()
        time.sleep(source.random() * 0.4)

    def look(self) -> None:
        """Compare the page with the storage."""
        lab = self.lab
        before = {r.number: r for r in lab.session.records()} if lab.session else {}
        with lab._guard.lock:
            lab.refresh()
            records = dict(lab._shown.records) if lab._shown else {}
            self.send()
            header, *rows = self.page.table()
        numbers = self.page.page.evaluate(
            "() => [...document.querySelectorAll('tbody tr')].map((row) => Number(row.dataset.number))"
        )
        self.looks += 1
        self.columns.add(tuple(header))
        is_filtered = bool(self.page.page.locator("input").input_value())
        assert is_filtered or set(numbers) == set(records), f"rows {numbers} of trials {sorted(records)}"
        assert len(set(numbers)) == len(numbers), "a trial is shown twice"
        for number, cells in zip(numbers, rows, strict=True):
            assert len(cells) == len(header), f"{len(cells)} cells under {len(header)} headings"
            self._compare(records[number], dict(zip(header, cells, strict=True)))
            old = before.get(number)
            if old is not None and old.state in ENDED:
                self._compare(old, dict(zip(header, cells, strict=True)), has_state=not lab.is_running)
        assert self.page.errors == []
        assert lab.problem == "", lab.problem

    def _compare(self, record: TrialRecord, cells: dict[str, str], *, has_state: bool = True) -> None:
        """Compare the cells of a row, by their headings, with a trial in the storage."""
        assert cells["trial"].rstrip(" ★") == str(record.number), f"row of {record.number} is {cells}"
        wanted: dict[str, list[str]] = {}
        for name, value in record.params.items():
            wanted.setdefault(short_name(name), []).append(value_text(value))
        for name in set(cells) - {"trial", "state", "why", *self.lab.objectives}:
            assert cells[name] == ", ".join(wanted.get(name, [])), f"{name} of trial {record.number}: {cells}"
        if record.values is not None:
            for name, value in record.values.items():
                assert cells[name] == objective_text(name, value), f"{name} of trial {record.number}: {cells}"
        if record.state == "complete" and has_state:
            assert cells["state"].split()[0] in {"complete", "front"}, cells
        if record.state in {"pruned", "impossible"}:
            assert cells["state"].startswith(record.state), cells
        assert ("baseline" in cells["state"]) == (record.origin == "baseline" or self._is_other(record)), (
            cells
        )

    def _is_other(self, record: TrialRecord) -> bool:
        return self.lab.session is not None and self.lab.session.definition.is_baseline(record.params)

    def study(self) -> None:
        """Run one study to its end, looking again and again."""
        self.lab.start()
        until = time.monotonic() + LIMIT_S
        while self.lab.is_running:
            self.look()
            self.act()
            assert time.monotonic() < until, f"no end: {self.lab.status}"
        self.page.page.locator("input").fill("")
        self.look()


def _case(number: int, source: random.Random) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="studies-"))
    with (
        sync_playwright() as playwright,
        chromium(playwright, folder / "profile") as context,
        bare_page(context) as page,
    ):
        drive = Drive(source, page, folder / "runs")
        try:
            drive.study()
            if source.random() < 0.3:
                drive.lab.name, drive.lab.trials = "second", 3
                page.page.evaluate("() => { window.sent = {}; }")
                drive.look()
                drive.study()
            trials = len(drive.lab.session.records())
        finally:
            drive.lab.stop()
            drive.lab.wait(60)
            drive.lab.close()
    shutil.rmtree(folder, ignore_errors=True)
    grew = "grew" if len({len(each) for each in drive.columns}) > 1 else "did not grow"
    return Outcome(grew, details={"looks": drive.looks, "trials": trials, "headers": len(drive.columns)})


if __name__ == "__main__":
    run(_case, cases=CASES, description=__doc__)
