"""A package that brings one method of each kind, as somebody would publish it; two of them it exports from here."""

from __future__ import annotations

from tidewater.optimizer import Lion
from tidewater.strategy import Gathered

__all__ = ["Gathered", "Lion"]
