"""Damaged and hostile run directories, and everything that reads them.

    export PYTHONPATH=toolkit:widgets:tests
    python tests/campaigns/damaged_runs.py                         every case
    python tests/campaigns/damaged_runs.py --first 100 --count 50  the cases 100 to 149

A case damages a run directory once or twice by its seed, plants code in it that leaves a mark when it is run, and asks
every reader: the list of runs, the run with all its figures, reports, the meters of a study, the command line, and now
and then a lab and a run that resumes from it. Each must answer, or refuse in one of Shardscope's own errors, within a
time limit; the good run beside it must stay listed, no planted code run, and nothing be written outside.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _campaign import Outcome, run

import shardscope as ss
from conformance.damage import damage, plant_code, recorded_run
from conformance.runs import small_job
from shardscope import cli
from shardscope.errors import ShardscopeError
from shardscope.runtime.tools.check import both_jobs
from shardscope.tuning.measured import TrialReader
from shardscope_widgets import TrainingLab, html
from shardscope_widgets.report import write_report

CASES = 300
PATIENCE_S = 30.0
IN_A_LAB, RESUMED = 4, 10
"""Every 4th case also shows the runs in a lab; every 10th launches a run that resumes from the damaged one."""


class Hung(BaseException):
    """A reader that took longer than its limit; no handler of `Exception` may hide it."""


def case(number: int, dice: random.Random) -> Outcome:
    """Damage one run directory, and ask all readers."""
    with tempfile.TemporaryDirectory() as folder:
        root, outside, mark = Path(folder, "runs"), Path(folder, "outside"), Path(folder, "mark")
        outside.mkdir()
        good, bad = recorded_run(root), recorded_run(root, name="bad")
        plant_code(bad, mark)
        told = [damage(bad, dice, outside)]
        if dice.random() < 0.3:
            with contextlib.suppress(OSError, ValueError):  # the first may have left nothing for the second
                told.append(damage(bad, dice, outside))
        with _in_folder(outside):
            asked, faults = _ask_all(root, Path(folder), good, number)
        if good.name not in {run.id for run in ss.runs(root)}:
            faults.append("the good run is not listed")
        if mark.exists():
            faults.append("planted code was run")
        if list(outside.iterdir()):
            faults.append(f"written outside: {[path.name for path in outside.iterdir()]}")
    details = {"damage": told, "asked": asked, "faults": faults}
    return Outcome("fault" if faults else "fine", violation=bool(faults), details=details)


def _ask_all(root: Path, folder: Path, good: Path, number: int) -> tuple[int, list[str]]:
    """How many readers were asked, and what was wrong with their answers."""
    asked, faults = 0, []
    for name, ask in _readers(root, folder, good, number):
        asked += 1
        fault = _ask(ask)
        if fault is not None:
            faults.append(f"{name}: {fault}")
    return asked, faults


def _readers(root: Path, folder: Path, good: Path, number: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "runs", lambda: (repr(ss.runs(root)), ss.runs(root).note.encode())
    yield "shardscope runs", lambda: _shell("runs", "--root", str(root))
    yield "shardscope runs --json", lambda: _shell("runs", "--json", "--root", str(root))
    if number % IN_A_LAB == 0:
        yield "lab", lambda: _lab(root)
    for path in sorted(set(root.iterdir()) - {good}):
        yield from _readers_of(path, folder)
        if number % RESUMED == 0:
            yield "resume", lambda path=path: _resume(path, folder)


def _readers_of(path: Path, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    readers: dict[str, Callable[[ss.Run], Any]] = {
        "state": lambda run: (run.state, run.reason, run.is_alive, run.name, run.problems),
        "error": lambda run: str(run.error).encode(),
        "wait": lambda run: run.wait(0.05),
        "events": lambda run: run.events("step", rank=0),
        "metrics": lambda run: run.metrics(),
        "timeline": lambda run: run.timeline(),
        "memory": lambda run: run.memory(),
        "noise scale": lambda run: run.noise_scale(),
        "layers": lambda run: repr(run.layers().alarms),
        "summary": lambda run: run.summary(),
        "repr": lambda run: repr(run).encode(),
        "html": lambda run: _harmless(run._repr_html_()),
        "json": lambda run: run.job.to_json(),
        "logs": lambda run: (run.logs(), run.logs(0)),
        "report": lambda run: _harmless(write_report([run], folder / "report.html").read_text()),
        "comparison": lambda run: _harmless(html.summary([run])._repr_html_()),
        "meter": lambda run: TrialReader(run).poll(),
        "check": lambda run: both_jobs(run.job, 2),
        "stop": lambda run: run.stop(grace_s=0.0),
        "load_job": ss.load_job,
    }
    yield "attach", lambda: ss.Run.attach(path)
    for name, read in readers.items():
        yield name, lambda read=read: read(ss.Run.attach(path))
    yield "shardscope stop", lambda: _shell("stop", str(path), "--grace-s", "0")
    yield "shardscope check --job", lambda: _shell("check", "--job", str(path / "job.json"), "--steps", "0")


def _ask(ask: Callable[[], Any]) -> str | None:
    """What is wrong with the answer of one reader; None where nothing is."""
    signal.signal(signal.SIGALRM, _hang)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        ask()
    except Hung:
        return f"took more than {PATIENCE_S:g} s"
    except ShardscopeError as error:
        str(error).encode()
    except TimeoutError:  # what `wait` says of a run that goes on
        pass
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None:
            frames = frames.tb_next
        place = f"{Path(frames.tb_frame.f_code.co_filename).name}:{frames.tb_lineno}" if frames else ""
        return f"raised {type(error).__name__}: {str(error)[:200]!r} at {place}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _hang(*_signal: object) -> None:
    raise Hung


def _shell(*command: str) -> None:
    """A command in this process; what it prints must be text that any terminal takes."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = cli.main(command)
    printed = out.getvalue() + err.getvalue()
    printed.encode()
    if status not in (0, 1, 2) or any(not char.isprintable() and char != "\n" for char in printed):
        raise AssertionError(f"exit status {status}, printed {printed[:200]!r}")


def _harmless(page: str) -> None:
    """Names from outside stand in a page as text."""
    page.encode()
    raw = [mark for mark in ("<script>alert", "<img src=x") if mark in page]
    if raw:
        raise AssertionError(f"the page holds {raw} as it is")


def _lab(root: Path) -> None:
    lab = TrainingLab(root=root)
    try:
        lab.shown = [run.id for run in lab.runs]
        lab.refresh()
        if "<script" in str(lab.screen.history._note.value) or (
            "Error:" in lab.problem and "failed" not in lab.problem
        ):
            raise AssertionError(lab.problem[:300])
    finally:
        lab.close()


def _resume(path: Path, folder: Path) -> None:
    run = ss.launch(small_job(), resume=path, root=folder / "resumed")
    try:
        run.wait(PATIENCE_S - 5.0)
    finally:
        run.stop(grace_s=0.0)


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    """With this folder as the current one and as home: nothing may be written to either."""
    before, home = Path.cwd(), os.environ.get("HOME", "")
    os.environ |= {"HOME": str(folder), "SHARDSCOPE_CACHE": str(folder.with_name("cache"))}
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ["HOME"] = home


if __name__ == "__main__":
    run(case, cases=CASES, description=__doc__)
