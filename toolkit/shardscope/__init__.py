"""Describe a distributed training job once; then predict it, simulate it and run it, side by side.

In a notebook or a script::

    import shardscope as ss

    job = ss.Job(model="gpt-nano", data="python-source", strategy="ring", world_size=4, steps=50)
    run = ss.launch(job)     # returns at once; the ranks train in separate processes
    run.wait().metrics()     # one row per step
    ss.compare(run)          # measured values next to predicted ones, term by term

Names are imported when first used (see `shardscope._lazy`), so `import shardscope` takes milliseconds and loads neither
torch nor plotly. A notebook kernel that only starts and watches runs never needs torch at all.
"""

from shardscope._lazy import attach
from shardscope._version import __version__

__getattr__, __dir__, __all__ = attach(__name__, __file__)
__all__ += ["__version__"]
