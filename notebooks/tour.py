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
# # A tour of Shardscope
#
# Describe one training job, run it on real processes on this machine, and watch what they do: the loss, every byte they
# send, what each rank is busy with, and a ring all-reduce chunk by chunk. Nothing is
# downloaded and nothing is simulated.
#
# Every cell returns at once or within seconds. Two ranks and tiny models are enough for all of it, so it also fits into
# the memory of a free Binder session.

# %%
import shardscope as ss
from shardscope_widgets import RingView, Trace, TrainingLab, figures, summary

# %% [markdown]
# ## Describe a job
#
# A job is a plain value: model, data, strategy, number of ranks, and so on. It is checked when it is made, so a batch
# that cannot be divided or a name with a typing error is refused in one sentence before any process starts.
#
# This one trains a GPT with 0.2 million parameters on the Python standard library's own source, with the gradients
# summed by a ring. `trace_chunks` asks for one record of every chunk that travels, for later.

# %%
job = ss.Job(
    model="gpt-nano",
    data="python-source",
    strategy=ss.Ring(trace_chunks=True),
    world_size=2,
    batch=16,
    steps=40,
)
print(f"each of {job.world_size} ranks takes {job.batch.per_rank(job.world_size)} samples a step")

# %% [markdown]
# ## Predict it
#
# The formulas know the job already: what each rank will send, by collective, and hold, by kind, both to the byte; and
# about how long a step takes on this machine. Every figure opens into its terms. With a cluster as a second argument,
# as in `ss.predict(job.replace(world_size=8), ss.Cluster.of("h100-80gb"))`, they say the same of that.

# %%
predicted = ss.predict(job)
predicted

# %% [markdown]
# ## Launch it
#
# `launch` starts the ranks in processes of their own and returns at once. They write what happens into a directory, so
# nothing is lost when this page is reloaded or this kernel restarted: `ss.runs()` finds every run again. A run ends
# with its kernel, unless it was launched with `detach=True`.

# %%
run = ss.launch(job)
run.id

# %% [markdown]
# ## Watch it in the Training Lab
#
# The lab finds the run by itself. Choose another job on the left and press **Start**; tick runs to lay them over each
# other; drag in the timeline to zoom. **Stop** ends a run at its next step. Everything that can be clicked is also an
# attribute: `lab.strategy = "all-reduce"; lab.start()`.

# %%
lab = TrainingLab(global_batch=16)
lab

# %% [markdown]
# ## Where the time goes
#
# Figures are ordinary Plotly figures made from what the run has told. Each row is a rank: computing above,
# communicating below, idle in grey.

# %%
run.wait(timeout=120)
trace = Trace.read(run)
print(figures.timeline_text(figures.timeline_info(trace)))
figures.timeline(trace)

# %% [markdown]
# What was predicted stands up to what was counted: bytes exactly, what tensors hold to the byte, and the time of a step
# as well as this machine's cores were free.

# %%
held = run.memory().groupby("rank")[["parameters", "gradients", "optimizer"]].max().loc[0]
states = [int(kind[0]) for kind in predicted.states[:3]]
measured = run.metrics()["step_time_s"].median()
print(f"{predicted.sent_bytes.sum():,} bytes a step predicted, {run.summary().bytes_per_step:,.0f} counted")
print(f"rank 0 holds {states} bytes predicted, {held.astype(int).tolist()} counted")
print(f"a step takes {predicted.step_time_s * 1e3:.0f} ms predicted, {measured * 1e3:.0f} ms measured")

# %% [markdown]
# ## The ring, chunk by chunk
#
# Press play. Each rank cuts its gradients into as many chunks as there are ranks. First the chunks go round and are
# added up, then the finished sums go round once more. Order and times are those of the real run.

# %%
RingView(run, step=3)


# %% [markdown]
# ## Your own model and data
#
# A model is a function that returns an `nn.Module`; data is a function that returns a training and a test set. Both can
# be defined in a cell, as here.


# %%
def make_model():
    from torch import nn

    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


def make_data():
    """Two spirals, to be told apart."""
    import torch

    torch.manual_seed(0)
    angle = 3 * torch.rand(2000) + 0.3
    side = torch.randint(0, 2, (2000,))
    spiral = torch.stack([angle * torch.cos(3 * angle), angle * torch.sin(3 * angle)], dim=1)
    points = spiral * (1 - 2 * side).unsqueeze(1) + 0.1 * torch.randn(2000, 2)
    return (points[:1600], side[:1600]), (points[1600:], side[1600:])


spirals = ss.launch(
    ss.Job(
        model=make_model, data=make_data, strategy="ring", world_size=2, batch=64, steps=60, name="spirals"
    )
)
spirals.wait(timeout=120).metrics()[["step", "loss", "step_time_s", "sent_bytes"]].tail(3)

# %% [markdown]
# ## Compare strategies
#
# The same job by several strategies must learn the same; what differs is the time, the bytes and the memory. Here a
# small classifier reads handwritten digits, on one process and on two ranks.

# %%
jobs = [
    ss.Job(model="mlp", data="digits", strategy=kind, batch=64, steps=40)
    for kind in ("single", "all-reduce", "ring")
]
compared = [ss.launch(job).wait(timeout=120) for job in jobs]
summary(compared)

# %%
figures.overview([Trace.read(run) for run in compared])

# %% [markdown]
# ## Where to go from here
#
# - [Architectures of training](architectures.ipynb) runs every strategy there is, in the order in which they came up.
# - `ss.check(job)` tells whether a job learns the same sharded as on one process.
# - `ss.runs()` lists every run there is, `ss.Run.attach(...)` opens one by its name or path.
# - `shardscope_widgets.write_report(ss.runs(), "report.html")` writes a page to send to someone else.
# - `shardscope doctor` in a terminal says what this machine can do.
