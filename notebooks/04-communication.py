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
# # 4 · Who sends what to whom, and how long does it take?
#
# [← Memory](03-memory.ipynb) · [Index](00-index.ipynb) · next: [Pipelines →](05-pipelines.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/04-communication.html)
#
# Workers that train one model together must sum their gradients in every step. Which algorithm is the fastest depends
# on the size of the gradients, the number of workers and the network. Everything here is computed from formulas.
#
# Time goes into the **latency** α of messages that wait for one another, into the **bytes** that pass the busiest link
# at bandwidth B, and into **summing** at a rate γ. A good algorithm has few consecutive steps or little traffic per
# link; hardly any has both.

# %%
from shardscope_widgets import CommunicationCalculator, figures, say

WORKERS, GRADIENTS = 64, 1e8  # bytes: the gradients of a ResNet-50 in fp32
LINK = {"bandwidth": 12.5e9, "latency": 5e-6}  # bytes per second and seconds

evolution = ("parameter-server", "ring", "tree", "double-binary-tree", "halving-doubling")
question = figures.CommunicationQuestion(algorithms=evolution, num_bytes=GRADIENTS, workers=WORKERS, **LINK)
say(figures.caption(figures.by_size, question))
calculator = CommunicationCalculator(
    algorithms=list(evolution),
    workers=WORKERS,
    num_bytes=GRADIENTS,
    bandwidth=8e-9 * LINK["bandwidth"],
    bandwidth_unit="Gbit/s",
)
calculator

# %% [markdown]
# Drag the message size and watch the diamonds, which mark where the fastest algorithm changes. Hover over a curve for
# its formula, its inputs and its source. *Who sends to whom* plays each algorithm round by round.
#
# The rest of this notebook meets the same algorithms in the order in which they were invented.

# %%
import pandas as pd

from shardscope.analytic import communication as comm


def took(algorithm, num_bytes=GRADIENTS, workers=WORKERS, **options):
    """Milliseconds of an all-reduce."""
    return 1e3 * comm.collective_time(
        op="all_reduce", algorithm=algorithm, num_bytes=num_bytes, workers=workers, **LINK, **options
    )


def table(name, rows):
    """A table of milliseconds."""
    return pd.DataFrame(rows).rename_axis(name).map("{:.2f} ms".format)


# %% [markdown]
# ## The star: one server
#
# *About 2010.* A server receives the gradients of all W workers and sends each a copy of the parameters. That takes few
# steps, but all of it passes through one link.
#
# If the parameters are divided among k servers, each link carries one k-th of the traffic. With a server on every
# worker's machine, no link carries more than 2(W-1)/W of the tensor, which is the volume of a ring.

# %%
table(
    "workers", {"one server": {workers: took("parameter-server", workers=workers) for workers in (2, 8, 64)}}
)

# %%
counts = (1, 4, 16, 64)
table(
    "servers",
    {
        "parameter servers": {count: took("parameter-server", servers=count) for count in counts},
        "ring": took("ring"),
    },
)

# %% [markdown]
# ### BytePS: servers on machines without GPUs
#
# *2020.* Links are full duplex, and machines with CPUs only are cheap. BytePS divides the summation among GPU machines
# and k CPU machines so that all links are equally busy.

# %%
byteps = {count: took("byteps", servers=count) for count in (0, 8, 32, 64)}
say(
    f"{WORKERS} CPU machines bring an all-reduce down to {byteps[64] / byteps[0]:.0%} of the time without them."
)
table("CPU machines", {"BytePS": byteps})

# %% [markdown]
# ## The ring: as little traffic as possible
#
# *2009, in training since 2017.* Each worker passes a W-th of the tensor to its neighbour, W - 1 times to sum and W - 1
# times to distribute the sums. In any algorithm in which only the workers send, at least one of them sends as much.

# %%
workers = [2, 8, 64, 4096]
volumes = comm.collective_volume(op="all_reduce", algorithm="ring", num_bytes=1, workers=workers)
sent = ", ".join(f"{volume:.3f} among {count:,}" for count, volume in zip(workers, volumes, strict=True))
say(f"Bytes that a worker sends for each byte of the tensor: {sent} workers.")

# %% [markdown]
# But the ring's 2(W - 1) steps follow one another, and each costs a latency.
#
# ## The tree: few steps
#
# A tree takes about 2 log W steps and sends the whole tensor in each. When is it faster than a ring?

# %%
for crossing in comm.crossover("tree", "ring", over="num_bytes", workers=WORKERS, **LINK):
    kilobytes = crossing.value / 1e3
    say(f"- Among {WORKERS} workers, {crossing.above} overtakes {crossing.below} from {kilobytes:.0f} kB on.")
for crossing in comm.crossover("tree", "ring", over="workers", num_bytes=1e6, **LINK):
    count = crossing.value
    say(f"- With 1 MB to sum, {crossing.above} overtakes {crossing.below} from {count:.0f} workers on.")

# %% [markdown]
# *Halving and doubling* (2004) takes as few steps as a tree and has the volume of a ring, if W is a power of two and
# the network is equally fast between all pairs of workers. *A double binary tree* (2009, in NCCL since 2019) comes
# close for any W. Which wins here?

# %%
say(figures.caption(figures.by_size, question))
figures.by_size(question)

# %% [markdown]
# ## Hierarchies: not all links are equal
#
# Links inside a node are much faster than links between nodes. If gradients are first reduce-scattered inside each
# node, a worker exchanges only its share with other nodes.

# %%
nvlink = {"per_node": 8, "inner_bandwidth": 300e9, "inner_latency": 3e-6}
levels = {
    "flat ring": {count: took("ring", workers=count) for count in (16, 64, 1024)},
    "in two levels": {count: took("hierarchical", workers=count, **nvlink) for count in (16, 64, 1024)},
}
say(
    f"Links inside a node are {nvlink['inner_bandwidth'] / LINK['bandwidth']:.0f} times as fast here. Among "
    f"{WORKERS} workers, two levels are {levels['flat ring'][64] / levels['in two levels'][64]:.1f} times as fast "
    f"as a flat ring."
)
table("workers", levels)

# %% [markdown]
# Every time is a sum of terms. Here, `S` bytes are summed among `W` workers in `n` nodes of `g`; `α` and `B` are the
# latency and the bandwidth between nodes, and `αᵢ` and `Bᵢ` those inside a node. Summing, at a rate `γ`, takes no time
# unless a rate is given.

# %%
term = comm.collective_term(
    op="all_reduce", algorithm="hierarchical", num_bytes=GRADIENTS, workers=WORKERS, **LINK, **nvlink
)
parts = [(part.name, f"{1e3 * part.value:.3f} ms", part.formula) for part in term.walk()]
pd.DataFrame(parts, columns=["term", "time", "formula"]).style.hide(axis="index")

# %% [markdown]
# ## Switches that sum, and optical links
#
# Switches that sum what passes through them (SHARP, 2016) halve the volume: each worker sends its tensor once and
# receives the sum once. In an optical ring with w wavelengths per fibre (WRHT, 2022), 2w + 1 workers send to the one in
# their middle in a single step. But optical switches take time to reconfigure, and one wavelength carries the whole
# tensor.

# %%
optical = {"wavelengths": 64, "reconfiguration": 25e-6}
for name in ("ring", "tree", "hierarchical", "in-network"):
    for crossing in comm.crossover(("optical-ring", optical), name, over="num_bytes", workers=1024, **LINK):
        say(
            f"- Among 1,024 workers, {crossing.above} overtakes {crossing.below} from {crossing.value / 1e6:.3g} MB on."
        )

# %%
options = {"hierarchical": nvlink, "optical-ring": optical}
modern = ("ring", "tree", "hierarchical", "optical-ring")
question = figures.CommunicationQuestion(
    algorithms=modern, num_bytes=1e6, workers=1024, options=options, **LINK
)
say(figures.caption(figures.by_workers, question))
figures.by_workers(question)

# %% [markdown]
# ## How far does adding workers pay off?
#
# Let a worker compute for a while (`compute_s`) and then wait for the sum; its efficiency is the share of time in which
# it computes. Under weak scaling the batch of each worker is constant; under strong scaling one batch is divided among
# all workers.

# %%
question = figures.CommunicationQuestion(
    algorithms=evolution, num_bytes=GRADIENTS, workers=WORKERS, compute_s=0.1, **LINK
)
say(figures.caption(figures.efficiency, question))
figures.efficiency(question)

# %% [markdown]
# ## Is compression worth it?
#
# Packing takes time, and most packed gradients cannot be summed directly: integers are packed again on the way, and
# sparse gradients are gathered, so that their volume grows with W. Each method pays off below a certain bandwidth only,
# which depends on the memory that compression reads and writes (`codec_bandwidth`).

# %%
for place, codec in (("CPU", 5e9), ("GPU", 1e12)):
    question = figures.CommunicationQuestion(
        num_bytes=GRADIENTS, workers=WORKERS, compute_s=0.1, codec_bandwidth=codec, **LINK
    )
    say(f"Packed on a {place}: {figures.caption(figures.compression_speedup, question)}")
figures.compression_speedup(question)

# %% [markdown]
# ## Try next
#
# - Set the bandwidth of your own network in the calculator, and the size of your own gradients.
# - `comm.crossover("tree", "ring", over="bandwidth", ...)` finds crossings over other quantities.
# - [Compression](06-compression.ipynb) measures on real ranks what the last figure computes.
#
# [← Memory](03-memory.ipynb) · [Index](00-index.ipynb) · next: [Pipelines →](05-pipelines.ipynb)
