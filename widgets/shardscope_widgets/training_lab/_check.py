"""The correctness check in the lab: it runs in its own thread, shows its progress and displays the verdict."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import ipywidgets as widgets

from shardscope.errors import ShardscopeError
from shardscope_widgets.kit.guard import problem_html
from shardscope_widgets.kit.markup import classed, status_html
from shardscope_widgets.kit.threads import panel_thread
from shardscope_widgets.training_lab._words import error_html
from shardscope_widgets.words import plural, safe

if TYPE_CHECKING:
    from pathlib import Path

    from shardscope.runtime import Run
    from shardscope.runtime.tools.check_report import CheckReport
    from shardscope.spec import Job

STEPS = 8


class _Cancelled(Exception):
    """The user cancelled the check."""


class CheckPanel:
    """Runs one check at a time and stores the result in `report`; calls `on_change` when a check starts and ends."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.box = classed(widgets.HTML(), "ss-check")
        self.report: CheckReport | None = None
        self._on_change = on_change
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()

    @property
    def is_running(self) -> bool:
        """Whether a check is running."""
        return self._thread is not None

    def start(self, job: Job, root: Path | None) -> None:
        """Start checking `job` and return at once; do nothing if a check is already running.

        Args:
            job: The job to check.
            root: Folder of the runs; None uses the default folder.
        """
        if self.is_running:
            return
        self._cancelled.clear()
        self.report = None
        self._say(f"Checking {job.strategy.label}: starting {plural(job.world_size, 'rank')} …")
        self._thread = panel_thread(self._work, job, root, name="check")
        self._thread.start()
        self._on_change()

    def cancel(self) -> None:
        """Cancel the check: its current run stops after the next step."""
        self._cancelled.set()

    def wait(self, timeout: float | None = None) -> CheckReport | None:
        """Wait for the current check to end and return its report; None if it failed or was cancelled.

        Raises:
            TimeoutError: The check is still running after `timeout` seconds.
        """
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                raise TimeoutError(
                    f"the check has not ended within {timeout:g} s; call lab.check.cancel() to end it"
                )
        return self.report

    def clear(self) -> None:
        """Clear the last verdict, unless a check is running."""
        if not self.is_running:
            self.box.value = ""

    def _work(self, job: Job, root: Path | None) -> None:
        try:
            self._check(job, root)
        finally:
            self._thread = None
            self._on_change()

    def _check(self, job: Job, root: Path | None) -> None:
        from shardscope.runtime.tools.check import check

        try:
            self.report = check(job, STEPS, root=root, on_step=self._on_step)
        except _Cancelled:
            self._say("The check was cancelled.")
        except ShardscopeError as error:
            self.box.value = error_html("<b>The check could not be run</b>", error)
        except Exception as error:  # noqa: BLE001 - shown in the panel
            self.box.value = problem_html(f"The check failed. {safe(type(error).__name__)}: {safe(error)}")
        else:
            self.box.value = f'<div class="ss-verdict">{self.report._repr_html_()}</div>'

    def _on_step(self, run: Run, step: int) -> None:
        if self._cancelled.is_set():
            raise _Cancelled
        job = run.job
        who = "one process" if job.world_size == 1 else f"{job.strategy.label} on {job.world_size} ranks"
        whole = job.world_size == 1 and job.batch.micro_batch is None
        part = 1 if job.world_size > 1 else 3 if whole else 2
        what = ", the whole batch at once" if whole else ""
        self._say(f"Checking, run {part} of 3: {who}{what}, step {step} of {job.steps}.")

    def _say(self, text: str) -> None:
        self.box.value = status_html(text, "running")
