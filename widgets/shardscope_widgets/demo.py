"""The demo: a small GPT and a classifier, each trained on one process and on 4 ranks with every strategy.

Unless a calibration of this machine is saved, the demo first measures its processors for about 20 seconds.
Processes, data (the standard library's source, scikit-learn's digits), bytes and times are all real. A progress
bar is shown for each run, and a table and an HTML report at the end. Ctrl-C stops the current run and reports the
results so far.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, TextIO

from shardscope.calibration.host_calibration import check_can_save, chosen, save
from shardscope.errors import DataError, ShardscopeError
from shardscope.machine import num_gpus
from shardscope.measure.compare.comparison import OVERVIEW, Comparison, overview
from shardscope.measure.compare.of_run import comparison_or_reason
from shardscope.runlog.figures import loss_text
from shardscope.show import padded
from shardscope.spec import Batch, Job, Strategy
from shardscope.spec.strategy import strategies
from shardscope_widgets.figures._comparison import HEADERS, RunRow
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import duration_text

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction
    from shardscope.runtime import Run

    Predictions = dict[str, JobPrediction]
    """Predictions made before the runs, by the runs' ids."""

RANKS = 4
WORKLOADS = (("gpt-nano", "python-source", 32, 40), ("mlp", "digits", 64, 100))
"""Model, data, global batch in samples and number of steps of each workload."""
_LOOK_EVERY_S = 0.1
_BAR = 28


def jobs(*, ranks: int = RANKS, steps: int | None = None) -> list[Job]:
    """Return one job for each pair of a workload and a strategy in the catalogue.

    Args:
        ranks: Number of ranks, reduced to the maximum that a strategy allows.
        steps: Steps of each job; None uses the default of the workload.
    """
    return [_job(name, workload, ranks=ranks, steps=steps) for workload in WORKLOADS for name in strategies()]


def _job(name: str, workload: tuple[str, str, int, int], *, ranks: int, steps: int | None) -> Job:
    model, data, batch, usual = workload
    strategy = Strategy(name)
    world_size = min(ranks, strategy.max_ranks or ranks)
    micro = strategy.suggested_micro_batch(batch, world_size)
    return Job(
        model=model, data=data, strategy=strategy, world_size=world_size,
        batch=Batch(global_batch=batch, micro_batch=micro), steps=steps or usual, name=f"{name} {model}",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status: 0, 1 if a run failed, or 130 after Ctrl-C."""
    arguments = _parse(argv)
    started = time.monotonic()
    todo = jobs(ranks=arguments.ranks, steps=arguments.steps)
    print(
        f"Shardscope demo: {len(todo)} runs in real processes. Ctrl-C ends it and reports the results so far.\n"
    )
    done: list[Run] = []
    predictions: Predictions = {}
    status = 0
    try:
        calibrate_once(arguments.ranks)
        for number, job in enumerate(todo, start=1):
            status |= _run(job, f"[{number}/{len(todo)}]", done, predictions, arguments.root)
    except KeyboardInterrupt:
        status = 130
        print("\nStopped. Results so far:")
    _report(done, predictions, arguments.report, time.monotonic() - started)
    return status


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="shardscope demo",
        description="Train on 1 and on 4 ranks with every strategy; print a table and write a report.",
    )
    parser.add_argument(
        "--ranks", type=int, default=RANKS, help="number of ranks of each run (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help="number of steps of each run (default: 40 and 100)")
    parser.add_argument("--root", type=Path, help="folder of the runs (default: $SHARDSCOPE_RUNS or ./runs)")
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("shardscope-demo.html"),
        help="path of the report (default: %(default)s)",
    )
    return parser.parse_args(argv)


def calibrate_once(ranks: int) -> None:
    """Calibrate this machine briefly, unless it has GPUs or a saved calibration covers this number of ranks.

    A full calibration is never replaced, even if its note says that other programs disturbed it. A brief
    calibration is replaced, unless it covers this number of ranks and was measured on a quieter machine. The
    measurement runs its own jobs, not the demo's. GPUs cannot be measured.
    """
    from shardscope.commands.calibrate import shown_on
    from shardscope.measure.calibrate.calibrate import BRIEF_S, calibrate_machine

    known, is_saved, _ = chosen()
    is_enough = is_saved and (not known.is_brief or known.has_measured(ranks))
    if num_gpus() or (is_enough and not (known.is_brief and known.was_busy)):
        if is_saved and known.was_busy:
            print(f"{fill(known.note, 110)}\n")
        return
    try:
        check_can_save(None)
    except DataError:
        print(
            "This machine is not measured, because the result cannot be saved; set SHARDSCOPE_CACHE to a directory "
            "that you can write.",
            file=sys.stderr,
        )
        return
    print(f"Measuring this machine for about {BRIEF_S:.0f} s, to predict the runs.", flush=True)
    try:
        found = calibrate_machine(brief=ranks, save=False, progress=shown_on(sys.stderr))
        if not is_enough or (found.load_average or 0.0) < (known.load_average or 0.0):
            save(found)
            known = found
    except (ShardscopeError, OSError) as error:
        whose = "from an earlier measurement of this machine" if is_saved else "from another machine"
        print(f"Predictions use constants {whose}: {error}", file=sys.stderr)
        return
    if known.was_busy:
        print(fill(known.note, 110))
    print()


def _run(job: Job, count: str, done: list[Run], predictions: Predictions, root: Path | None) -> int:
    """Predict one job, then run it to its end under a progress bar; return 0 on success, 1 on failure."""
    from shardscope.runtime import launch
    from shardscope.runtime.launcher.preflight import preflight

    prediction = preflight(job).prediction
    run = launch(job, root=root)
    done.append(run)
    if prediction is not None:
        predictions[run.id] = prediction
    try:
        watch(run, f"{count} {_title(job)}", sys.stderr)
        run.wait(timeout=30)
    except ShardscopeError as error:
        print(f"\n{error}\n", file=sys.stderr)
        return 1
    finally:
        run.stop()
    return 0


def _title(job: Job) -> str:
    ranks = "1 process" if job.world_size == 1 else f"{job.world_size} ranks"
    return f"{job.model} on {job.data}, {job.strategy.label}, {ranks}"


def watch(run: Run, title: str, stream: TextIO) -> None:
    """Draw a progress bar until `run` has ended: in place on a terminal, otherwise as one line at the end."""
    trace, tail, alive = Trace.of(run), run.tail(), True
    while alive:
        alive = run.is_alive
        trace.feed(tail.poll())
        if stream.isatty():
            stream.write(f"\r\x1b[2K{bar_line(title, trace, run.job.steps)}")
            stream.flush()
        if alive:
            time.sleep(_LOOK_EVERY_S)
    stream.write("\n" if stream.isatty() else f"{bar_line(title, trace, run.job.steps)}\n")


def bar_line(title: str, trace: Trace, steps: int) -> str:
    """Return one line with the title, a progress bar, the step, the loss and the step time."""
    now = trace.steps[-1] if trace.steps else None
    filled = _BAR * now.number // steps if now else 0
    bar = "━" * filled + "╌" * (_BAR - filled)
    if now is None:
        return f"{title:<62} {bar} starting"
    pace = f"{duration_text(now.step_time_s)} per step"
    return f"{title:<62} {bar} {now.number:>4}/{steps}  loss {loss_text(now.loss)}  {pace}"


def _report(done: Sequence[Run], predictions: Predictions, path: Path, took_s: float) -> None:
    """Print the tables and the findings, and write the report."""
    from shardscope_widgets.report import write_report
    from shardscope_widgets.report.entries import groups_of
    from shardscope_widgets.report.findings import headline

    groups, _ = groups_of(done)
    if not groups:
        print("No run has finished a step, so there is nothing to report.")
        return
    entries = [entry for group in groups for entry in group.entries]
    rows = [
        entry.row._replace(label=entry.trace.label, predicted_s=_step_time_s(predictions.get(entry.run.id)))
        for entry in entries
    ]
    print(f"\n{table_text(rows)}")
    print("Speed is relative to one process; it is below 1 × if ranks share cores or steps are short.")
    print(error_text(rows, [*predictions.values()]))
    finished = {entry.run.id for entry in entries}
    comparisons = _compared([run for run in done if run.id in finished], predictions)
    if comparisons:
        print(
            "\nPredicted and measured (*: outside the 90% interval); shardscope compare RUN shows every term."
        )
        print(columns_text(OVERVIEW, overview(comparisons)))
    written = write_report(done, path, title="Shardscope demo", comparisons=comparisons)
    print("\nWhat these runs show:")
    for sentence in headline(groups):
        print(fill(sentence, 110, initial_indent="  • ", subsequent_indent="    "))
    print(f"\nTook {duration_text(took_s)}. Report with plots: {written.resolve()}")


def error_text(rows: Sequence[RunRow], predictions: Sequence[JobPrediction]) -> str:
    """Summarise the errors of the step times that were predicted before the runs."""
    errors = {row.label: abs(row.error) for row in rows if row.error is not None}
    if not errors:
        return "No step time was predicted."
    worst = max(errors, key=lambda label: errors[label])
    hosts = [each.host for each in predictions if each.host is not None and each.is_calibrated]
    how = (
        f"with {hosts[0].label}"
        if hosts
        else "without a calibration of this machine (run: shardscope calibrate)"
    )
    return (
        f"Step times predicted before each run, {how}: median error {median(errors.values()):.1%}, largest "
        f"{errors[worst]:.0%} ({worst}). They assume that no other program uses the cores."
    )


def _step_time_s(prediction: JobPrediction | None) -> float | None:
    return None if prediction is None else prediction.step_time_s


def _compared(runs: Sequence[Run], predictions: Predictions) -> list[Comparison]:
    """Compare each run with the prediction made before it.

    A run that cannot be compared is skipped, and the reason printed to stderr.
    """
    found = []
    for run in runs:
        each = comparison_or_reason(run, predictions.get(run.id))
        if isinstance(each, str):
            print(f"{run.id}: {each}", file=sys.stderr)
        else:
            found.append(each)
    return found


def table_text(rows: Sequence[RunRow]) -> str:
    """Format the rows as aligned columns, with one block per workload."""
    head, rule, *lines = columns_text(HEADERS, [row.cells() for row in rows]).splitlines()
    blocks = [
        [""] * (row.group != before.group) + [line]
        for row, before, line in zip(rows, [rows[0], *rows], lines, strict=False)
    ]
    return "\n".join([head, rule, *(line for block in blocks for line in block)])


def columns_text(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Format a header, a rule and rows as columns, right-aligned except for the first column."""
    first, *rest = padded([header, *cells], num_left=1)
    return "\n".join(map("  ".join, [first, ["─" * len(cell) for cell in first], *rest]))


if __name__ == "__main__":
    raise SystemExit(main())
