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
# # Architectures of training, for real
#
# How many processes can train one model together has been answered again and again since 2010, each answer a way
# around what limited the one before. Here each of them trains the same small GPT on the same batches, on four real
# processes of this machine, for a few seconds. Nothing is simulated: every byte, span and tensor below was measured.
#
# Run the cells from top to bottom; all of it takes about a minute on two cores. The [tour](tour.ipynb) explains jobs,
# runs and the Training Lab.

# %%
import shardscope as ss
from shardscope_widgets import Trace, figures, summary

RANKS = 4


def train(strategy, **changes):
    """One run of the common job, to its end."""
    fields = {"model": "gpt-nano", "data": "python-source", "batch": 24, "steps": 12, "world_size": RANKS}
    job = ss.Job(strategy=strategy, **{**fields, **changes})
    return ss.launch(job).wait(timeout=120)


# %% [markdown]
# ## One process
#
# The oracle. Whatever is done below to split the work, the loss must come out like this one's.

# %%
single = train("single", world_size=1)
single

# %% [markdown]
# ## The parameter server, and where it chokes
#
# *Around 2010 to 2014.* One rank keeps the parameters. The others send it their gradients and fetch what comes of them.
# Simple, and the workers need not know each other; but everything passes through the server's link.
#
# In a ring, as of 2017 in common use, there is no centre: each rank talks to two neighbours, and each link carries the
# same.

# %%
server = train(ss.ParameterServer(dedicated=True))
ring = train("ring")
both = [Trace.read(run) for run in (server, ring)]
print(figures.links_text(figures.links_info(both)))
figures.links(both)

# %% [markdown]
# **What to see:** the server's bar is as long as those of all workers together and grows with every worker that joins;
# the ring's bars are equal, and stay nearly the same however many ranks there are.

# %% [markdown]
# ## Stale gradients
#
# A server that waits for all workers goes at the pace of the slowest. One that does not wait applies gradients that
# were computed on parameters of a while ago. A bound keeps them from getting too old (*stale synchronous parallel*).

# %%
stale = Trace.read(train(ss.ParameterServer(mode="ssp", staleness=2)))
print(figures.staleness_text(figures.staleness_info(stale)))
figures.staleness(stale)

# %% [markdown]
# **What to see:** most gradients are an update or two behind, and none is to the right of the bound.

# %% [markdown]
# ## Trees, and rings of rings
#
# A ring of many ranks has many steps one after the other: 2(W-1). A tree has only about 2 log W, but ranks in its
# middle send more. Where nodes are joined by slower links than the ranks inside them, rings in two levels send less
# over those.

# %%
levels = [Trace.read(train(strategy)) for strategy in ("tree", "hierarchical:2")]
print(figures.links_text(figures.links_info(levels)))
figures.links(levels)

# %% [markdown]
# **What to see:** the tree's ranks carry unequal loads, while in two levels every link carries the same.

# %% [markdown]
# ## Gossip: no common point at all
#
# Each rank takes its own step and then averages its parameters with its neighbours only. Ranks are never quite equal,
# but what one knows reaches all others within a few steps.

# %%
gossip = Trace.read(train("gossip", steps=30))
print(figures.consensus_text(figures.consensus_info([gossip])))
figures.consensus([gossip])

# %% [markdown]
# **What to see:** the ranks stay within thousandths of each other, though none of them ever sees all gradients.

# %% [markdown]
# ## The pipeline and its bubble
#
# *2018.* If a model does not fit into one device, its layers are cut into stages. To keep more than one stage busy, the
# batch is cut into micro-batches that follow each other. While the first one comes in and the last one goes out, stages
# wait: the bubble. With p equal stages and m micro-batches it is (p-1)/(m+p-1) of the time at least.

# %%
pipelines = [
    Trace.read(train(f"pipeline:{schedule}", batch=ss.Batch(global_batch=24, micro_batch=3)))
    for schedule in ("gpipe", "1f1b")
]
print(figures.gantt_text(figures.gantt_info(pipelines[0])))
figures.gantt(pipelines[0])

# %%
print(figures.gantt_text(figures.gantt_info(pipelines[1])))
figures.gantt(pipelines[1])

# %% [markdown]
# **What to see:** the empty triangles at both ends. 1F1B has the same bubble as GPipe, but starts going back early, so
# that each stage holds the activations of few micro-batches at a time. On a machine with fewer cores than ranks, stages
# also wait for each other's turn on a core, and the measured bubble is larger than the formula's.

# %% [markdown]
# ## ZeRO: nothing is held twice
#
# *2020.* In all data-parallel runs above each rank holds everything: parameters, gradients and the optimizer's state,
# which for Adam is twice as large as the parameters. ZeRO cuts first the state (stage 1), then the gradients, too (2),
# then the parameters (3), and gathers what a layer needs just when it needs it.

# %%
kinds = ("all-reduce", "zero-1", "zero-2", "zero-3")
stages = [
    Trace.read(train(kind, batch=4)) for kind in kinds
]  # one sample a rank, so that activations do not hide it
alone = Trace.read(train("single", world_size=1, batch=4))
print(figures.memory_kinds_text(figures.memory_kinds_info(stages, alone=alone)))
figures.memory_kinds(stages, alone=alone)

# %% [markdown]
# **What to see:** from stage to stage one kind more shrinks to a quarter: green, then orange, then dark blue; what is
# gathered from other ranks comes instead, for a moment.

# %% [markdown]
# ## Do they really learn the same?
#
# `check` runs a job sharded and on one process and compares every loss and every parameter. Strategies that are not
# equal by design, such as gossip, say why.

# %%
ss.check(
    ss.Job(model="gpt-nano", data="python-source", strategy="zero-3", world_size=RANKS, batch=24), steps=4
)

# %% [markdown]
# ## Side by side

# %%
summary(run for run in reversed(ss.runs()) if not run.name.startswith("check"))
