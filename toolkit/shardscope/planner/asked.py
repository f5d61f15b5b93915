"""The arguments of a search, and the software and calibration for each of its layouts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardscope.calibration.choice import calibration_of
from shardscope.calibration.host_calibration import AnyCalibration
from shardscope.calibration.software import assumed_software
from shardscope.planner.candidates import Candidates
from shardscope.planner.setting import SearchSettings
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import OFFLOAD_NAMES, Layout
from shardscope.spec.model import Transformer


class Asked(NamedTuple):
    """Arguments of a search that determine the time and memory of a layout."""

    model: Transformer
    cluster: Cluster
    calibration: AnyCalibration | None = None
    software: str | None = None

    def setting(self, layout: Layout) -> SearchSettings:
        """Return the model, cluster and calibration for a layout, as used by `predict`."""
        known = calibration_of(self.cluster, self.calibration, software=self.software, layout=layout)
        return SearchSettings(self.model, self.cluster, known)

    def parts(self, found: Candidates) -> list[tuple[SearchSettings, Candidates]]:
        """Return the candidates split by software, with the setting of each part.

        Candidates are split only if neither calibration nor software is given: each layout then suggests its software.
        """
        if self.calibration is not None or self.software is not None:
            return [(self.setting(Layout()), found)]
        stored = [
            Layout(zero=int(zero), offload=OFFLOAD_NAMES[offload])
            for zero, offload in zip(found.zero, found.offload, strict=True)
        ]
        names = np.array([assumed_software(layout).software.name for layout in stored])
        return [
            (self.setting(stored[int(np.flatnonzero(names == name)[0])]), found.only(names == name))
            for name in dict.fromkeys(names.tolist())
        ]
