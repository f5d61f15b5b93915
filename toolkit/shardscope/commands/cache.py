"""`shardscope cache`: list the caches of data sets on disk, and delete the least recently used caches."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.commands._output import aligned, as_json
from shardscope.disk_cache import LIMIT
from shardscope.errors import DataError, SpecError
from shardscope.spec.units import bytes_text, plural, quantity

if TYPE_CHECKING:
    from shardscope.storage.caches import DataCache


HELP = "list and limit the caches of data sets on disk"
ABOUT = (
    "List the caches of data sets on disk (Shards(cache=...)), the least recently used first. "
    f"Set {LIMIT} to limit all of them together, such as {LIMIT}='100 GB'."
)
JSON = "print the caches as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of the caches, as cache_folder (default: ~/.cache/shardscope/shards)",
    )
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        help="delete unused caches, least recently used first, until the total size is at most this, such as '20 GB'",
    )
    parser.add_argument("--clear", action="store_true", help="delete all caches that are not in use")


def carry_out(arguments: argparse.Namespace) -> int:
    """Delete caches if requested, and print one row per remaining cache."""
    if arguments.clear and arguments.limit is not None:
        raise SpecError("--clear and --limit both say what to delete; give one of them")
    from shardscope.storage.caches import caches_in, default_root, evict, limit_here

    if arguments.folder is not None and not arguments.folder.is_dir():
        raise SpecError(
            f"--folder={str(arguments.folder)!r} does not exist or is not a folder; give the cache_folder of your "
            "shards, or leave it out"
        )
    limit = None if arguments.limit is None else quantity(arguments.limit, "bytes", field="--limit")
    root = arguments.folder or default_root()  # which does not exist before the first cache
    deleted: list[DataCache] = []
    try:
        if arguments.clear or limit is not None:
            deleted = evict(root, limit)
        found = caches_in(root)
    except OSError as error:
        raise DataError(
            f"the caches in {str(root)!r} cannot be read or deleted ({error.strerror}); give a --folder that you may "
            "read and write"
        ) from None
    if arguments.json:
        print(as_json({"folder": str(root), "limit_bytes": limit_here(), "deleted": [*map(_described, deleted)],
                       "caches": [*map(_described, found)]}))  # fmt: skip
        return 0
    for cache in deleted:
        print(f"deleted: {cache.label}", file=sys.stderr)
    if found:
        print(aligned(["data", "size", "used", "state"], [_cells(cache) for cache in found]))
    total, limit_text = sum(cache.num_bytes for cache in found), limit_here()
    told = "" if limit_text is None else f" of {bytes_text(limit_text)} ({LIMIT})"
    print(f"{plural(len(found), 'cache')} in {root}: {bytes_text(total)}{told}")
    return 0


def _described(cache: DataCache) -> dict[str, Any]:
    return {
        "folder": str(cache.folder), "source": cache.source, "num_bytes": cache.num_bytes, "used_t": cache.used_t,
        "is_in_use": cache.is_in_use,
    }  # fmt: skip


def _cells(cache: DataCache) -> list[str]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(cache.used_t))
    state = "in use" if cache.is_in_use else ""
    return [cache.source or cache.folder.name, bytes_text(cache.num_bytes), used, state]
