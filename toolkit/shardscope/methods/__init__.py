"""The built-in methods, one folder each: everything specific to a method is in its folder.

A folder's `__init__` does not import torch. `shardscope.spec.registry` finds methods by folder; no list exists.
"""
