"""Built-in methods, one folder each, which contains everything specific to the method.

A folder's `__init__` does not import torch. `shardscope.spec.registry` discovers methods by scanning the folders, so
there is no list to update.
"""
