"""Training data in shards on disk: where they are, how they are read, cached and shuffled. Opens no file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from shardscope.spec._base import Spec
from shardscope.spec.link import LinkOrName
from shardscope.spec.numbers import Count
from shardscope.spec.units import Bytes


class Shards(Spec):
    """Data in several files, read row by row while training, so that it may be larger than memory.

    The order of rows is exact and depends only on the seed and the epoch, not on the number of ranks. Each epoch visits
    the shards in a new order; rows are shuffled within `window` shards at a time, and only these shards need to be
    available. Every tenth shard is held out; with fewer than ten shards, the last tenth of the rows of each shard is
    held out.

    Example:
        >>> Shards("corpus", cache="2 GB").window
        8
    """

    _positional = "path"

    path: str
    """A folder that `write_shards` made; a tar file or a folder of them (as for WebDataset); a Parquet file or a folder
    of them; or a folder that a Hugging Face `Dataset` saved with `save_to_disk`."""
    format: Literal["auto", "npy", "tar", "parquet", "arrow"] = "auto"
    """Format of the files; ``auto`` decides by their suffixes."""
    inputs: str | None = None
    """Column with the inputs: ``x`` if None. In tar files, the suffix of the members, ``x.npy`` if None."""
    targets: str | None = None
    """Column with the targets: ``y`` if None. In tar files, the suffix of the members, ``cls`` if None. If it is the
    same token column as `inputs`, the target of each token is the next token."""
    test: str | None = None
    """Path of shards with test rows, in the same format; None holds out rows of `path`."""
    cache: Bytes | None = None
    """Size limit of a local cache of shards, such as ``"20 GB"``; the least recently used are deleted. The cache is
    shared by the ranks of a machine, and kept for later runs. None reads ``.npy`` shards in place, and limits the cache
    into which other formats are unpacked to 10 GB. ``$SHARDSCOPE_CACHE_LIMIT`` limits the caches of all data sets
    together."""
    cache_folder: str | None = None
    """Folder of the cache, which only you may write to; None for a folder in ``~/.cache/shardscope``."""
    slow: LinkOrName | None = None
    """Emulated connection to the source, as an experiment: each rank reads at most `bandwidth`, and each read takes
    `latency_s` longer. Reads from the cache are not slowed down. None reads at the speed of the disk."""
    window: Count = 8
    """Number of shards whose rows are shuffled together. A larger window shuffles better but reads more shards."""
    prefetch: Count = 2
    """Number of steps whose rows are prefetched. The shards of the next window are also opened, or fetched, early."""

    @property
    def name(self) -> str:
        """Name for messages and plots: the last part of the path."""
        return Path(self.path).name or self.path
