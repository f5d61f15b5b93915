"""Immutable, JSON-serialisable descriptions of jobs, and of models, clusters and layouts that are too large to run.

Imports no torch. Names are imported when first used (PEP 562), so looking up a model does not import the code for jobs.
"""

from shardscope._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
