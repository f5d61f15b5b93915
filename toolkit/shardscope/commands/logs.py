"""`shardscope logs`: print the output of a run's processes, by rank."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from shardscope.commands._options import add_run_argument, attach
from shardscope.commands._output import as_json, coloured
from shardscope.errors import SpecError
from shardscope.runlog.files import read_tail
from shardscope.runtime.record.status import printable

_MOST_BYTES = 64 * 2**10
_OF_A_RANK = re.compile(r"^(?:node-(\d+)/)?(?:.*/)?(\d+)/(?:stdout|stderr)\.log$")
"""Pattern of a rank's log files. Groups: the emulated node, if there is one, and the rank on the node or in the run."""


HELP = "print what the processes of a run wrote to their terminals"
ABOUT = (
    "Print what the ranks of a run, and the agent that started them, wrote to stdout and stderr; the "
    "last 64 KiB of each."
)
JSON = "print the output by file as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_run_argument(parser)
    parser.add_argument(
        "--rank", type=int, metavar="N", help="only the output of this rank (default: of all processes)"
    )


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the output of each process that has written any output."""
    run = attach(arguments.run, arguments.root)
    if arguments.rank is not None and not 0 <= arguments.rank < run.job.world_size:
        raise SpecError(
            f"--rank {arguments.rank} is not a rank of {run.id}; use 0 to {run.job.world_size - 1}"
        )
    cluster = run.cluster
    per_node = 0 if cluster is None else cluster.per_node
    found = read_logs(run.path / "logs", arguments.rank, per_node=per_node)
    if arguments.json:
        print(as_json(found))
        return 0
    for name, content in found.items():
        print(f"{coloured(f'== {name}', 'bold')}\n{content}")
    if not found:
        print("the processes wrote nothing; for errors of ranks, use: shardscope show RUN")
    return 0


def read_logs(folder: Path, rank: int | None = None, *, per_node: int = 0) -> dict[str, str]:
    """Return the last part of each log that is not empty, by its path within the folder.

    Control characters other than line breaks and tabs are escaped, because a rank may print anything.

    Args:
        folder: Folder of the logs.
        rank: The rank whose logs are returned; None for the logs of all processes.
        per_node: Ranks per node of the run's emulated cluster; 0 if it has none.
    """
    paths = sorted(path for path in folder.rglob("*.log") if path.is_file() and not path.is_symlink())
    names = {str(path.relative_to(folder)): path for path in paths}
    if rank is not None:
        names = {name: path for name, path in names.items() if _rank_of(name, per_node) == rank}
    logs = {printable(name): read_tail(path, most=_MOST_BYTES) for name, path in names.items()}
    return {name: _safe(content).rstrip() for name, content in logs.items() if content.strip()}


def _rank_of(name: str, per_node: int) -> int | None:
    found = _OF_A_RANK.search(name)
    return None if found is None else int(found[1] or 0) * per_node + int(found[2])


def _safe(content: str) -> str:
    return "".join(each if each in "\n\t" or each.isprintable() else ascii(each)[1:-1] for each in content)
