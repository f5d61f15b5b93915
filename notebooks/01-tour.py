# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1 · A tour of Shardscope
#
# [Index](00-index.ipynb) · next: [Architectures →](02-architectures.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/01-tour.html)
#
# What happens when several processes train one model? This is one step of such a training, recorded as it ran:
# each rank computes gradients, and a ring sums them chunk by chunk.
#
# ![One recorded step: chunks of gradients travel round a ring of four ranks and are summed](images/watch-one-step.svg)
#
# Below, the same kind of job is predicted, run in real processes on this machine, and compared with its prediction. At
# the end, you start one yourself: by a press of a chip.

# %%
import shardscope as ss

ss.warm_up()  # imports torch in a separate process meanwhile, so that the first run starts sooner

from shardscope_widgets import Trace, TrainingLab, figures, say

job = ss.Job(
    model="gpt-nano",
    data="python-source",  # the source code of Python's standard library: nothing is downloaded
    strategy="ring",  # sum gradients with a ring all-reduce
    world_size=4,
    batch=16,
    steps=200,
)
say(
    f"**{job.world_size} ranks** will train `{job.model}` on `{job.data}`. In each of {job.steps} steps, a rank takes "
    f"{job.batch.per_rank(job.world_size)} of the {job.batch.global_batch} samples."
)

# %% [markdown]
# ## Could we have known before it ran?
#
# A job can be predicted before it runs: the bytes that each rank will send, the memory that it will hold, and the time
# of a step on this machine, each broken down into terms. With a cluster as a second argument, as in
# `ss.predict(job, ss.Cluster.of("h100-80gb"))`, the same is predicted for that cluster.

# %%
predicted = ss.predict(job)
predicted

# %% [markdown]
# ## Was the prediction right?
#
# `launch` starts the ranks as separate processes and returns at once; `wait` waits for their end. A run is recorded
# in a directory, so nothing recorded is lost, and `ss.runs()` lists all runs. Runs stop when the kernel ends, so that
# no ranks are left behind; `ss.launch(job, detach=True)` starts one that outlives it.

# %%
run = ss.launch(job)
run.wait(timeout=120)
ss.compare(run)

# %% [markdown]
# ## Where does the time go?
#
# Each row is a rank: computation above, communication below, idle time in grey. Drag to zoom in.

# %%
trace = Trace.read(run)
say(figures.caption(figures.timeline, trace))
figures.timeline(trace)

# %% [markdown]
# ## Press a chip
#
# **Watch a ring**, **Shard a GPT**, **Kill a rank**: a press plays the predicted step of that job at once, and starts
# it on real ranks; their measured step appears below it on the same axis. Change the link, the strategy or the number
# of ranks while they run: the prediction moves at once, and the ranks follow. Whatever you press is also a call, as
# in `lab.play("Watch a ring")` and `lab.start()`, and the run above is in the lab's list.
#
# ## Try next
#
# - [Bring your own](10-bring-your-own.ipynb) trains a `nn.Module` of yours under ZeRO-3, and shows each rank's memory.
# - `ss.check(job)` tests whether a job learns the same sharded as on one process.
# - `shardscope_widgets.write_report(ss.runs(), "report.html")` writes a page that you can send to others.
# - `shardscope doctor` in a terminal reports what this machine supports.
#
# [Index](00-index.ipynb) · next: [Architectures →](02-architectures.ipynb)

# %%
lab = TrainingLab(preset="Watch a ring")
lab
