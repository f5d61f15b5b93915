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
# # 2 · Architectures of training
#
# [← A tour](01-tour.ipynb) · [Index](00-index.ipynb) · next: [Memory →](03-memory.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/02-architectures.html)
#
# How can one model be trained by several processes, and what does each way cost? Every architecture below trains the
# same small GPT on the same batches, in real processes on this machine. Each was invented to remove a limit of an
# earlier one, and the sections follow that order.

# %%
import pandas as pd

import shardscope as ss
from shardscope.analytic.schedules import build
from shardscope_widgets import StepPlayer, Trace, bytes_text, duration_text, figures, say, summary

RANKS = 4
# "model" may also be your own nn.Module class; see notebook 10.
COMMON = {"model": "gpt-nano", "data": "python-source", "batch": 24, "steps": 12}


def train(strategy, **changes):
    """One run of the common job, to its end; prints a line."""
    job = ss.Job(strategy=strategy, **{"world_size": RANKS, **COMMON, **changes})
    run = ss.launch(job).wait(timeout=120)
    print(f"{run.name}: {job.steps} steps of {duration_text(run.summary().step_time_s)}")
    return run


first = ss.Job(strategy="single", **COMMON)
say(
    f"The common job: `{first.model}` on `{first.data}`, {first.steps} steps of {first.batch.global_batch} samples, on "
    f"{RANKS} ranks that share the cores of this machine."
)

# %% [markdown]
# ## One process
#
# The reference: however the work is split below, the loss must match that of this run.

# %%
single = train("single", world_size=1)
single

# %% [markdown]
# ## A server, or a ring?
#
# *From 2010.* With a **parameter server**, one rank holds the parameters; the workers send it their gradients and fetch
# the updated parameters. That is simple, but all traffic passes through one link.
#
# *From 2017.* A **ring all-reduce** has no centre. Each rank talks to its neighbours only.

# %%
server, ring = train(ss.ParameterServer(dedicated=True)), train("ring")
both = [Trace.read(run) for run in (server, ring)]
info = figures.info(figures.links, both)
times = info.runs[0].most / info.runs[1].most
say(
    f"{figures.caption(figures.links, both)} The server's link carries **{times:.1f} times** as much as the busiest "
    f"link of the ring."
)
figures.links(both)

# %% [markdown]
# ## Why wait for the slowest worker?
#
# A server that waits for all workers runs at the pace of the slowest. One that does not wait applies gradients that
# were computed with outdated parameters. A staleness bound limits how outdated they may be (*stale synchronous
# parallel*).

# %%
stale = Trace.read(train(ss.ParameterServer(mode="ssp", staleness=2)))
say(figures.caption(figures.staleness, stale))
figures.staleness(stale)

# %% [markdown]
# ## Trees and rings of rings
#
# A ring of W ranks takes 2(W-1) steps, one after another; a tree takes about 2 log W, but its inner ranks send more.
# Where links between nodes are slower than links inside a node, a ring of rings keeps most traffic inside.

# %%
tree, rings = train("tree"), train("hierarchical:2")
levels = [Trace.read(run) for run in (tree, rings)]
info = figures.info(figures.links, levels)
uneven = [max(bar.total for bar in run.bars) / min(bar.total for bar in run.bars) for run in info.runs]
say(
    f"{figures.caption(figures.links, levels)} The busiest rank carries {uneven[0]:.1f} times the traffic of the "
    f"quietest in the tree, and {uneven[1]:.1f} times in the ring of rings."
)
figures.links(levels)

# %% [markdown]
# ## Can training do without a sum over all ranks?
#
# With **gossip**, each rank takes its own step and averages its parameters with its neighbours only. The ranks are
# never exactly equal, but what one rank learns reaches the others within a few steps.

# %%
gossip = Trace.read(train("gossip", steps=30))
say(figures.caption(figures.consensus, [gossip]))
figures.consensus([gossip])

# %% [markdown]
# ## What if the model does not fit on one device?
#
# *From 2018.* A **pipeline** splits the layers into stages, and the batch into micro-batches that follow each other
# through the stages. While the first micro-batch enters and the last one leaves, some stages are idle: the *bubble*.
#
# First the ideal: every stage has a core of its own, and sending takes no time. The bubble is the empty space at both
# ends.

# %%
micro = ss.Batch(global_batch=24, micro_batch=3)
ideal = build("1f1b", RANKS, micro.global_batch // 3).timeline({"F": 10.0, "B": 20.0})
say(figures.caption(figures.schedule, ideal, schedule="1f1b"))
figures.schedule(ideal, schedule="1f1b")

# %% [markdown]
# Now the same schedule on this machine, and GPipe, which runs all forward passes before the first backward pass.

# %%
pipelines = [train(f"pipeline:{schedule}", batch=micro) for schedule in ("gpipe", "1f1b")]
gpipe, one_f_one_b = map(Trace.read, pipelines)
info = figures.info(figures.gantt, one_f_one_b)
extra = round(info.bubble, 2) - round(info.ideal, 2)
cores = f"The other {extra:.0%} is time that ranks wait for a message or for a core." if extra > 0.005 else ""
say(f"{figures.caption(figures.gantt, one_f_one_b)} {cores}")
figures.gantt(one_f_one_b)

# %%
say(figures.caption(figures.gantt, gpipe))
figures.gantt(gpipe)

# %% [markdown]
# ## Why does every rank hold everything?
#
# *From 2020.* In the data-parallel runs above, each rank holds all parameters, gradients and optimizer state. **ZeRO**
# shards the optimizer state (stage 1), also the gradients (stage 2), also the parameters (stage 3), which are then
# gathered layer by layer while they are needed.
#
# Both stage 2 and stage 3 are PyTorch's `fully_shard` here, which keeps only a shard of the parameters between steps.
# In stage 2, a rank gathers a copy of all parameters in the forward pass and keeps it to the end of the backward pass
# (`reshard_after_forward=False`), so it holds whole parameters while it computes, as in stage 1. In stage 3, it frees
# the copy of each layer after use. These copies are the type *gathered*.

# %%
kinds = ("all-reduce", "zero-1", "zero-2", "zero-3")
# One sample per rank, so that activations do not hide the rest.
sharded = {kind: train(kind, batch=RANKS) for kind in kinds}
stages = {kind: Trace.read(run) for kind, run in sharded.items()}
alone = Trace.read(train("single", world_size=1, batch=RANKS))
say(figures.caption(figures.memory_kinds, list(stages.values()), alone=alone))
figures.memory_kinds(list(stages.values()), alone=alone)


# %% [markdown]
# What does rank 0 hold of each type of memory, in bytes and compared with `all-reduce`? Gathered parameters are
# compared with its parameters. The states that ZeRO shards grow with the whole model, but the buffers in which ranks
# exchange shards have a fixed limit, so they take a large share of a model as small as this one.

# %%
types = ["optimizer", "gradients", "parameters", "gathered"]
rank_0 = pd.DataFrame({kind: trace.held[0] for kind, trace in stages.items()}).T
held, buffers = rank_0[types], rank_0["buffers"]
states = held[["optimizer", "gradients", "parameters"]].sum(axis=1)
whole = held.loc["all-reduce"].copy()
whole["gathered"] = whole["parameters"]
say(
    f"Parameters: `zero-2` keeps {bytes_text(held.loc['zero-2', 'parameters'])} and gathers up to "
    f"{bytes_text(held.loc['zero-2', 'gathered'])} in a step, `zero-3` up to "
    f"{bytes_text(held.loc['zero-3', 'gathered'])}; `all-reduce` keeps {bytes_text(whole['parameters'])}. All states: "
    f"{bytes_text(states['all-reduce'])} in `all-reduce`, and {bytes_text(states['zero-2'])} in `zero-2` and `zero-3`, "
    f"which also take {bytes_text(buffers['zero-2'])} and {bytes_text(buffers['zero-3'])} for buffers."
)
held.map(bytes_text) + (held / whole).map(" ({:.0%})".format)

# %% [markdown]
# One step of `zero-3`: watch parameters being gathered for a layer, used, and freed.

# %%
StepPlayer(sharded["zero-3"])

# %% [markdown]
# ## Do they really learn the same?
#
# `check` trains a job both sharded and on one process, and compares every loss and every parameter. For a strategy that
# is not equivalent by design, such as gossip, it reports the reason.

# %%
ss.check(ss.Job(strategy="zero-3", world_size=RANKS, **COMMON), steps=4)

# %% [markdown]
# ## Side by side
#
# The runs of the common job, all with the same batch.

# %%
summary([single, server, ring, tree, rings, *pipelines])

# %% [markdown]
# ## Try next
#
# - Raise `RANKS`, and see which busiest link grows and which does not.
# - Train one strategy over a slow network: `train("ring", link=ss.Link(bandwidth="100 Mbit/s", latency="1 ms"))`.
# - `ss.predict(ss.Job(strategy="zero-3", world_size=64, **COMMON), ss.Cluster.of("h100-80gb", nodes=8, per_node=8))`
#   predicts what you cannot run here.
#
# [← A tour](01-tour.ipynb) · [Index](00-index.ipynb) · next: [Memory →](03-memory.ipynb)
