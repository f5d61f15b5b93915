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
# # 12 · Faults
#
# [← The twin](11-twin.ipynb) · [Index](00-index.ipynb) · [Data →](13-data.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/12-faults.html)
#
# A job on many devices fails before it ends. What does a failure cost, how often should a checkpoint be saved, and what
# does one slow rank do to all the others? Here ranks are really killed and slowed down, and the runs go on.

# %%
import numpy as np

import shardscope as ss
from shardscope.analytic import reliability
from shardscope_widgets import FaultLab, Trace, figures, say

GPUS = 16384
mtbf_s = float(reliability.job_mtbf_s(reliability.LLAMA_3_DEVICE_MTBF_S, devices=GPUS))
large = reliability.expected(mtbf_s=mtbf_s, save_s=20, restart_s=600)
say(
    f"A job on {GPUS:,} GPUs as reliable as Llama 3's is interrupted every {mtbf_s / 3600:.1f} hours (about one "
    f"interruption per {round(reliability.LLAMA_3_DEVICE_MTBF_S / 3600, -4):,.0f} device-hours, computed from the 419 "
    f"that Meta reported). With checkpoints that take 20 s and restarts that take 10 minutes, the best interval "
    f"between checkpoints is {float(large.interval_s) / 60:.0f} minutes, and {float(large.goodput):.0%} of the "
    f"time is useful."
)

# %% [markdown]
# ## Kill a rank
#
# A fault plan is separate from the job: it says which rank fails, and before which step. The process really gets
# `SIGKILL`. With `recovery`, the agent starts all ranks again, and they continue from the newest checkpoint in the same
# run.

# %%
job = ss.Job(
    model="mlp",
    data="digits",
    strategy="zero-2",
    world_size=3,
    batch=48,
    steps=40,
    link=ss.Link(bandwidth="200 Mbit/s", latency="0.2 ms"),
    checkpoint=ss.Checkpoint(every=8),
    recovery=ss.Recovery(3),
)
run = ss.launch(job, faults=ss.Faults().kill(rank=1, step=22)).wait(timeout=120)
broken = Trace.read(run)
say(figures.caption(figures.faults, broken))
figures.faults(broken)

# %% [markdown]
# The failure leaves no trace in the result: a checkpoint holds weights, optimizer state, random states and the position
# in the data.

# %%
undisturbed = ss.launch(job).wait(timeout=120)
loss, same = run.summary().loss, undisturbed.summary().loss
say(
    f"The last loss is {loss:.6f} with the failure and {same:.6f} without it: "
    + ("they agree." if abs(loss - same) <= 1e-6 * abs(same) else "they differ.")
)

# %% [markdown]
# ## How often to save a checkpoint
#
# Saving often delays training, saving rarely makes failures expensive. If a checkpoint takes the time `δ`, and failures
# are a mean time `M` apart, the best training time between checkpoints is about `sqrt(2 δ M)` (Young 1974).
# `ss.goodput` measures in the first run above what steps, checkpoints and a restart take, and predicts the goodput with
# the kills of a random plan. Then ranks are killed by this plan in a run that saves often, one that saves at about the
# best interval, and one that saves rarely. The curve is for endless runs; these are short, so
# expect several points of difference. Expect them from the predictions too, whose costs come from a single restart.

# %%
STEPS, MTBF_STEPS = 48, 60
plan = ss.Faults.random(world_size=job.world_size, steps=STEPS, mtbf_steps=MTBF_STEPS, seed=9)
costs = ss.goodput(run, faults=plan).costs
step_s = costs.step_s + costs.between_s
between_s = MTBF_STEPS * step_s / job.world_size
best = round(float(reliability.daly_interval_s(save_s=costs.save_s, mtbf_s=between_s)) / step_s)
measured, apart = [], []
for every in sorted({2, min(max(best, 3), 15), 16}):
    expected = ss.goodput(run, faults=plan, steps=STEPS, every=every)
    often = job.replace(steps=STEPS, checkpoint=ss.Checkpoint(every=every), recovery=ss.Recovery(10))
    found = ss.launch(often, faults=plan).wait(timeout=120).summary()
    say(
        f"Saved every {every} steps: with these kills, predicted goodput {expected.mean:.0%}, measured "
        f"{found.goodput:.0%}; lost steps: {found.lost_steps}."
    )
    apart.append(found.wall_s / found.restarts)
    told = f"every {every} steps", every * step_s, found.goodput, f"lost steps: {found.lost_steps}"
    measured.append(figures.MeasuredGoodput(*told))
times = {"mtbf_s": float(np.mean(apart)), "save_s": costs.save_s, "restart_s": costs.restart_s}
say(figures.caption(figures.goodput, **times, measured=measured))
figures.goodput(**times, measured=measured)

# %% [markdown]
# ## One slow rank
#
# A rank that computes slowly is not a failure, and nothing restarts. But in a ring, every step takes as long as its
# slowest rank. It helps to divide the batch by speed: each rank then computes about equally long, and the trained
# weights stay the same.

# %%
FACTOR, COUNTED = 4.0, 6
cluster = None if ss.why_not_emulated() else ss.Cluster.emulated(1, per_node=3, flops=2e8)
usual = ss.Job(model="mlp", data="digits", strategy="ring", world_size=3, batch=48, steps=14)
by_speed = usual.replace(batch=ss.Batch(48, shares="measured"))
slow = ss.Faults().slow(rank=1, factor=FACTOR)
cases = {
    "equal ranks": (usual, None),
    "one slow rank": (usual, slow),
    "batch by speed": (by_speed, slow),
}
slowed = {
    name: ss.launch(each, cluster, faults=faults).wait(timeout=120) for name, (each, faults) in cases.items()
}
fast, late, shared = (float(run.metrics().step_time_s[-COUNTED:].median()) for run in slowed.values())
recovers = (
    f"which recovers {(late - shared) / (late - fast):.0%} of the lost time."
    if late > 1.2 * fast
    else "but other work on this machine hides most of the difference: run this cell again."
)
say(
    f"With rank 1 computing {FACTOR:g} times slower, a step takes {late / fast:.1f} times as long. With the batch "
    f"divided by the measured speeds, it takes {shared / fast:.1f} times as long, {recovers}"
)
figures.step_times(
    [
        figures.StepTimesRow(name, None, None, each)
        for name, each in zip(cases, (fast, late, shared), strict=True)
    ]
)

# %% [markdown]
# ## Break it yourself
#
# The Fault Lab follows a run while it trains, and its buttons break it. So do those in the tab Faults of the Training
# Lab. Kill a rank here while the run trains. The next cell stops it, so if you ran all cells at once, run this one
# again.

# %%
alive = ss.launch(job.replace(steps=2000, recovery=ss.Recovery(10)))
FaultLab(alive)

# %%
say(f"The run is {alive.stop().state_text}.")

# %% [markdown]
# ## Try next
#
# - Save checkpoints in the background, `ss.Checkpoint(every=8, asynchronous=True)`, and compare the goodput.
# - Launch `job.replace(link=None)` on `ss.Cluster.emulated(nodes=3)`, and kill a node or drop a link.
#
# [← The twin](11-twin.ipynb) · [Index](00-index.ipynb) · [Data →](13-data.ipynb)
