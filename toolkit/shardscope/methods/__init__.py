"""The built-in methods, a folder each: all that the toolkit knows of one stands in its folder.

A folder's `__init__` imports no torch. `shardscope.spec.registry` finds methods by folder; nothing lists them.
"""
