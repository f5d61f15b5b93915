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
# What happens when several processes train one model? Describe one training job, run it in real processes on this
# machine, and watch the loss, every byte on the wire, what each rank is doing, and a ring all-reduce chunk by chunk.

# %%
import shardscope as ss

ss.warm_up()  # imports torch in a separate process meanwhile, so that the first run starts sooner

from shardscope_widgets import StepPlayer, Trace, TrainingLab, figures, say, summary

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
# ## Watch it
#
# This is the Training Lab. Choose a job and press **Start**, tick runs to overlay them, and drag in the timeline to
# zoom. Everything that you click is also an attribute: `lab.strategy = "all-reduce"; lab.start()`.

# %%
lab = TrainingLab(world_size=4, global_batch=16, steps=200)  # its form starts with the same job
lab

# %% [markdown]
# `launch` starts the ranks as separate processes and returns at once; the lab above finds the run by itself. A run is
# recorded in a directory, so nothing recorded is lost, and `ss.runs()` lists all runs. Runs go on when you reload the
# page or close the tab. They stop when the kernel ends, so that no ranks are left behind; after a restart, the lab says
# so and offers to resume them. `ss.launch(job, detach=True)` starts one that outlives the kernel.

# %%
run = ss.launch(job)

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
# Now the same figures, measured:

# %%
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
# ## How does a ring sum gradients?
#
# Press play: one step of the run above, with its ranks, messages, memory and timeline. Each rank splits its gradients
# into as many chunks as there are ranks. The chunks travel round the ring and are summed on the way; then the finished
# sums travel round once more. Click an event to have it explained; the arrow keys step from one to the next.

# %%
StepPlayer(run)


# %% [markdown]
# ## Can I train my own model?
#
# A model is a function that returns an `nn.Module`; data is a function that returns a training set and a test set. Both
# can be defined in a cell.


# %%
def make_model():
    from torch import nn

    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def make_data():
    """Two spirals, to be told apart."""
    import torch

    torch.manual_seed(0)
    angle = 3 * torch.rand(2000) + 0.3
    side = torch.randint(0, 2, (2000,))
    spiral = torch.stack([angle * torch.cos(3 * angle), angle * torch.sin(3 * angle)], dim=1)
    points = spiral * (1 - 2 * side).unsqueeze(1) + 0.1 * torch.randn(2000, 2)
    return (points[:1600], side[:1600]), (points[1600:], side[1600:])


mine = ss.Job(
    model=make_model,
    data=make_data,
    strategy="ring",
    world_size=2,
    batch=64,
    steps=300,
    optimizer=ss.Optimizer("adamw", lr=1e-2),
    name="spirals",
)
spirals = ss.launch(mine).wait(timeout=120)
losses = spirals.metrics()["loss"]
say(
    f"The loss goes from {losses.iloc[0]:.3f} to {losses.iloc[-1]:.3f} in {len(losses)} steps, and the model tells "
    f"**{spirals.summary().test_accuracy:.0%}** of the held-out points apart; guessing would get half of them."
)
figures.loss([Trace.read(spirals)])

# %% [markdown]
# ## Does the strategy change what is learned?
#
# It must not: only time, bytes and memory may differ. Here a small classifier of handwritten digits trains in one
# process, and on several ranks that share the work. One process is usually fastest: this model computes for about a
# millisecond in a step, and ranks take longer than that to exchange gradients.

# %%
jobs = [
    ss.Job(model="mlp", data="digits", strategy=kind, batch=64, steps=40)
    for kind in ("single", "all-reduce", "ring")
]
compared = [ss.launch(job).wait(timeout=120) for job in jobs]
reference, *others = (run.metrics()["loss"] for run in compared)
apart = max(float((losses - reference).abs().max()) for losses in others)
say(f"In no step do the losses differ by more than {apart:.1g}, which is rounding.")
summary(compared)

# %%
figures.overview([Trace.read(run) for run in compared])

# %% [markdown]
# ## Try next
#
# - In the lab, start the same job with `all-reduce` or `zero-3`, and tick both runs.
# - [Bring your own](10-bring-your-own.ipynb) trains a `nn.Module` of yours under ZeRO-3, and shows each rank's memory.
# - `ss.check(job)` tests whether a job learns the same sharded as on one process.
# - `shardscope_widgets.write_report(ss.runs(), "report.html")` writes a page that you can send to others.
# - `shardscope doctor` in a terminal reports what this machine supports.
#
# [Index](00-index.ipynb) · next: [Architectures →](02-architectures.ipynb)
