"""`shardscope show`: print the settings, state and results of one run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardscope.commands._options import add_run_argument, attach
from shardscope.commands._output import OF_STATE, as_json, coloured
from shardscope.commands._progress import table
from shardscope.runtime.record.card import recovery_facts
from shardscope.runtime.record.status import printable
from shardscope.spec.job_parts import label_of

if TYPE_CHECKING:
    from shardscope.runtime import Run


HELP = "show the settings, the state and the results of one run"
ABOUT = "Show the settings, the state and the results of one run, and why it failed if it did."
JSON = "print the job, the state and the results as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_run_argument(parser)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the run; return 0 even for a failed run, because the command itself succeeded."""
    run = attach(arguments.run, arguments.root)
    print(as_json(_plain(run)) if arguments.json else text(run))
    return 0


def text(run: Run) -> str:
    """Return the settings and state of the run, its table of results and, if the run failed, the error."""
    job, summary, error = run.job, run.summary(), run.error
    ranks = f"{summary.world_sizes} ranks" if summary.world_sizes else _ranks(job.world_size)
    facts = {
        "run": run.id,
        "state": coloured(run.state_text, OF_STATE.get(run.state, "dim")),
        "reason": run.reason or "",
        "job": f"{label_of(job.model)} on {label_of(job.data)}, {job.strategy.label}, {ranks}",
        "settings": f"{job.optimizer.label}, batch {job.batch.global_batch}, {job.precision}, seed {job.seed}",
        "steps": f"{summary.last_step} of {job.steps}",
        **recovery_facts(summary),
        "faults": run.faults.text if run.faults else "",
        "made with": str(run.provenance or ""),
        "directory": printable(str(run.path)),
    }
    width = max(map(len, facts))
    lines = [f"{coloured(name.ljust(width), 'dim')}  {value}" for name, value in facts.items() if value]
    results = ["", table(summary)] if summary.steps else []
    failed = ["", coloured(str(error), "red")] if error is not None else []
    return "\n".join([*lines, *results, *failed])


def _ranks(count: int) -> str:
    return "1 process" if count == 1 else f"{count} ranks"


def _plain(run: Run) -> dict[str, Any]:
    error = run.error
    return {
        "id": run.id, "path": str(run.path), "state": run.state, "restarts": run.restarts, "reason": run.reason,
        "faults": str(run.faults),
        "job": json.loads(run.job.to_json()),
        "summary": asdict(run.summary()), "error": None if error is None else str(error),
    }  # fmt: skip
