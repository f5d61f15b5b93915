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
# # Who sends what to whom, and how long it takes
#
# Workers that train one model together must add up their gradients, step after step. There are many ways to do that,
# and which is the fastest depends on how much there is to send, among how many, and over what. Everything below is a
# formula and answers at once; [architectures](architectures.ipynb) runs some of the same algorithms for real.
#
# Three things cost time: a **latency** α for every message that must wait for another, the **bytes** that pass the
# busiest link at a bandwidth B, and the **adding** at a rate γ. An algorithm is good if it has few steps, or if no link
# carries much. Hardly any is both.

# %%
from shardscope_widgets import CommunicationCalculator

calculator = CommunicationCalculator(workers=64, num_bytes=1e8, bandwidth=100, bandwidth_unit="Gbit/s")
calculator

# %% [markdown]
# **To try:** drag the message and watch the diamonds, where the fastest changes hands. Hover over a curve for its
# formula, what went in and where it comes from. *Who sends to whom* plays each algorithm round by round.
#
# The rest of this notebook walks through the same in the order in which it was invented.

# %%
import numpy as np

from shardscope.analytic import communication as comm
from shardscope_widgets import figures

LINK = {"bandwidth": 12.5e9, "latency": 5e-6}  # 100 Gbit/s and 5 µs
GRADIENTS = 1e8  # bytes: 25 million parameters in fp32, a ResNet-50


def took(algorithm, num_bytes=GRADIENTS, workers=64, **options):
    """Milliseconds of an all-reduce."""
    return 1e3 * comm.collective_time(
        op="all_reduce", algorithm=algorithm, num_bytes=num_bytes, workers=workers, **LINK, **options
    )


# %% [markdown]
# ## The star: one server
#
# *About 2010.* A server takes in W - 1 gradients and hands out W - 1 copies of the parameters through its one link. Two
# steps only; but the time grows with every worker that joins.

# %%
for workers in (2, 8, 64):
    print(f"{workers:3} workers: {took('parameter-server', workers=workers):8.1f} ms")

# %% [markdown]
# Cut the parameters among k servers and each link carries a k-th. With as many servers as workers, each beside a
# worker, no link carries more than 2(W-1)/W of the tensor. That is exactly what the ring will do.

# %%
for servers in (1, 4, 16, 64):
    print(f"{servers:3} servers: {took('parameter-server', servers=servers):8.1f} ms")
print(f"       ring: {took('ring'):8.1f} ms")

# %% [markdown]
# ### Machines with CPUs only: BytePS
#
# *2020.* Links are full duplex, and CPU machines cost little. Let n GPU machines and k CPU machines share the adding so
# that all links are equally busy: between the ring (k = 0) and servers of their own (k = n), the time falls to half.

# %%
for servers in (0, 8, 32, 64):
    print(f"{servers:3} CPU machines: {took('byteps', servers=servers):6.2f} ms")

# %% [markdown]
# ## The ring: no link carries more than it must
#
# *2009, in training since 2017.* Each worker passes a W-th on to its neighbour, W - 1 times to add up and W - 1 times
# to spread. Its volume hardly depends on W. It is optimal: whatever workers do among themselves, one of them sends at
# least 2(W-1)/W of the tensor.

# %%
volumes = comm.collective_volume(
    op="all_reduce", algorithm="ring", num_bytes=1, workers=np.array([2, 8, 64, 4096])
)
print("bytes sent for each byte of the tensor:", volumes.round(3))

# %% [markdown]
# But 2(W - 1) steps follow each other, and each costs a latency. That is where trees come in.
#
# ## The tree: few steps
#
# A tree has 2 log W steps but sends the whole tensor in each. For small messages that is better.

# %%
for crossing in comm.crossover("tree", "ring", over="num_bytes", workers=64, **LINK):
    print(f"{crossing.above} overtakes {crossing.below} at {crossing.value / 1e3:.0f} kB")
for crossing in comm.crossover("tree", "ring", over="workers", num_bytes=1e6, **LINK):
    print(f"{crossing.above} overtakes {crossing.below} at {crossing.value:.0f} workers, if 1 MB is sent")

# %% [markdown]
# The second line tells the other way around: many workers make the ring's steps add up, and the tree comes back.
#
# Halving and doubling (2004) has the tree's steps *and* the ring's volume, as long as W is a power of two and the
# network does not mind who talks to whom. Two trees at once (2009, in NCCL since 2019) come close for any W.

# %%
evolution = ("parameter-server", "ring", "tree", "halving-doubling", "double-binary-tree")
question = figures.CommunicationQuestion(algorithms=evolution, num_bytes=GRADIENTS, workers=64, **LINK)
print(figures.curves_text(figures.by_size_info(question)))
figures.by_size(question)

# %% [markdown]
# ## Hierarchies: not all links are equal
#
# Inside a node, links are ten times as fast as between nodes, or more. Add up inside first, and only an eighth of the
# tensor needs to cross.

# %%
nvlink = {"per_node": 8, "inner_bandwidth": 300e9, "inner_latency": 3e-6}
for workers in (16, 64, 1024):
    flat, levels = took("ring", workers=workers), took("hierarchical", workers=workers, **nvlink)
    print(f"{workers:5} workers: flat ring {flat:6.2f} ms, in two levels {levels:6.2f} ms")

# %% [markdown]
# Every figure opens into what it is made of:

# %%
term = comm.collective_term(
    op="all_reduce", algorithm="hierarchical", num_bytes=GRADIENTS, workers=64, **LINK, **nvlink
)
for part in term.walk():
    print(f"{1e3 * part.value:8.3f} ms  {part.name:28} {part.formula}")

# %% [markdown]
# ## Switches that add, and light
#
# Switches that add what passes through them (SHARP, 2016) halve the volume: each worker sends its tensor once and
# receives the sum once. Over fibres with w wavelengths (WRHT, 2022), 2w + 1 workers reach the one in their middle in a
# single step, so that a thousand workers need three steps. But the optical switches take their time to turn, and one
# wavelength carries the whole tensor in each step: light suits many workers and messages that are not too long.

# %%
for name in ("ring", "tree", "hierarchical", "in-network"):
    for crossing in comm.crossover(
        ("optical-ring", {"wavelengths": 64}), name, over="num_bytes", workers=1024, **LINK
    ):
        print(f"{crossing.above} overtakes {crossing.below} at {crossing.value / 1e6:.3g} MB")

modern = ("ring", "tree", "hierarchical", "optical-ring")
options = {"hierarchical": nvlink, "optical-ring": {"wavelengths": 64, "reconfiguration": 25e-6}}
question = figures.CommunicationQuestion(
    algorithms=modern, num_bytes=1e6, workers=1024, options=options, **LINK
)
print(figures.curves_text(figures.by_workers_info(question)))
figures.by_workers(question)

# %% [markdown]
# ## How far does adding workers pay?
#
# If a worker computes for 100 ms and then waits for the sum, its efficiency is the share of the time in which it
# computes. Keep the batch of each worker (weak scaling) and a good algorithm holds on; divide one batch among ever more
# workers (strong scaling) and every algorithm fails in the end.

# %%
question = figures.CommunicationQuestion(
    algorithms=evolution, num_bytes=GRADIENTS, workers=64, compute_s=0.1, **LINK
)
print(figures.efficiency_text(figures.efficiency_info(question)))
figures.efficiency(question)

# %% [markdown]
# ## Is compressing worth it?
#
# Compressing takes time, and most compressed gradients cannot be added: integers are packed a second time on the way,
# and what is sparse must be gathered, and so grows with W. There is a bandwidth below which it pays, and for some
# methods a number of workers from which it never does.

# %%
for method in ("fp16", "int8", "int4", "topk", "powersgd"):
    for place, codec in (("on a CPU", 5e9), ("on a GPU", 1e12)):
        even = comm.break_even_bandwidth(method, 25e6, [4, 16, 64, 256], latency=5e-6, codec_bandwidth=codec)
        below = "  ".join(f"{rate * 8 / 1e9:7.1f}" if rate else "  never" for rate in even)
        print(f"{method:10} packed {place}: {below}  Gbit/s, among 4, 16, 64 and 256 workers")
