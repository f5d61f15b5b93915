"""Files that stand in for the memory of a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


class Files:
    """Memory in files of one folder, which every process can map."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._paths = folder, rank, {}

    def allocate(self, num_bytes: int) -> Tensor:
        path = self._folder / f"{self._rank}-{len(self._paths)}"
        segment = self.open(f"{num_bytes} {path}")
        self._paths[segment.data_ptr()] = path
        return segment

    def export(self, segment: Tensor) -> str:
        return f"{segment.numel()} {self._paths[segment.data_ptr()]}"

    def open(self, exported: str) -> Tensor:
        size, path = exported.split(maxsplit=1)
        return torch.from_file(path, shared=True, size=int(size), dtype=torch.uint8)

    def synchronize(self, *, all_streams: bool = False) -> None:
        pass
