"""Built-in methods, each in its own folder that contains all code specific to the method.

The `__init__` of each folder works without torch. `shardscope.spec.registry` discovers methods by scanning the folders,
so a new method needs no entry in a list.
"""
