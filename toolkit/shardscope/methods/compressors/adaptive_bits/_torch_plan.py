"""Bits allotted to layers, so that rounding leaves little error within a budget.

Like Markov et al. 2024 (L-GreCo), it looks for the least error over all layers; by greedy marginal gains, which find
it wherever layers are of equal size, as each bit of a layer takes away less than the one before, and come near it
elsewhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardscope.methods.compressors.adaptive_bits import LEAST, MOST

