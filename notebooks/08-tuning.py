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
# # 8 · Which settings are the best?
#
# [← Large batches](07-large-batch.ipynb) · [Index](00-index.ipynb) · next: [Planner →](09-planner.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/08-tuning.html)
#
# The best learning rate depends on the optimizer, the batch size and the compression of gradients, so these are
# searched together. Every trial is a real training run on several processes: quality is measured on validation data,
# time by the clock, and bytes as they are sent.
#
# A search space is data. Each name is a path into the job; a setting that belongs to one of several choices has that
# choice in brackets, and is sampled only if that choice is made.

# %%
import shardscope as ss
from shardscope_widgets import TuningLab, figures, say

job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, batch=64, steps=24)
space = {
    "optimizer": ["adamw", "lamb"],
    "optimizer[adamw].lr": (3e-4, 3e-2, "log"),
    "optimizer[lamb].lr": (1e-3, 1e-1, "log"),
    "batch": ss.PowersOfTwo(32, 128),
    "compression": ["none", "int8", "topk"],
    "compression[topk].ratio": (0.01, 0.3, "log"),
}
say(
    f"**{len(space)} settings** are searched together. Every trial trains `{job.model}` on `{job.data}` with as many "
    f"samples as {job.steps} steps of {job.batch.global_batch}."
)

# %% [markdown]
# ## A study
#
# AdamW and SGD with Nesterov momentum are in every study that chooses among optimizers: with as many trials as others
# if the space names them, else with a trial each. The first trials are baselines: the job itself, usual learning rates,
# compressors that save time on the link or (as here) bytes, and LAMB with its rate and warm-up scaled with the batch
# size. Optuna's sampler chooses the rest. A trial is stopped once a finished trial would beat it in every objective.

# %%
study = ss.tune(job, space, trials=16, name="notebook")
session = ss.StudySession.open(name="notebook", trials=16)
print(session.report())

# %% [markdown]
# `study` is an Optuna study, so everything made for Optuna works with it: `study.trials_dataframe()`, importances, and
# the dashboard on the study's `journal.log`.

# %%
trials = study.trials_dataframe().set_index("number")
trials["loss"] = trials["values_loss"].map("{:.3f}".format)
trials["time"] = trials["values_seconds"].map("{:.2f} s".format)
trials["sent"] = (trials["values_bytes"] / 1e6).map("{:.1f} MB".format)
trials[["state", "loss", "time", "sent"]].replace({"nan": "", "nan s": "", "nan MB": ""})

# %% [markdown]
# ## The Pareto front, live
#
# The same study in a widget: trials as they train, the front of quality against time, and bytes as colour. Click a
# point to open its run, pin it or use its settings. The sliders below the front project the times onto another link:
# bytes, messages and computing were recorded separately, so no new run is needed.

# %%
lab = TuningLab(job, space, name="notebook", trials=16)
lab

# %% [markdown]
# ## What if I interrupt it?
#
# Everything is in the study's storage and in run directories. Interrupt a study, or kill this kernel, and make the same
# call again: it first reruns the trials that were interrupted. If you ask for more trials, it runs those that are
# missing.

# %%
before = len(study.trials)
more = ss.tune(name="notebook", trials=18)
say(
    f"{before} trials before, **{len(more.trials)}** now; {len(ss.StudySession.open(name='notebook').front())} "
    f"of them are on the front."
)

# %% [markdown]
# ## Settings that change while a model trains
#
# In population based training, the worst members copy weights, optimizer moments and residuals from better ones, and
# change their settings a little. The result is a schedule of settings. The tree shows which member copied which.

# %%
found = ss.train_population(
    job.replace(steps=32),
    {"optimizer.lr": (3e-4, 3e-2, "log"), "compression": ["none", "int8"]},
    members=4,
    intervals=4,
    interval_steps=8,
    seed=1,
)
say(figures.caption(figures.lineage, found))
figures.lineage(found)

# %% [markdown]
# With equal compute, population based training need not win: `tests/benchmarks/population.py` compares it with random
# search. What it gains is a schedule, which a search of fixed settings cannot find.
#
# ## Try next
#
# - Drag the link slider of the lab down to the network between your machines, and see which trials remain on the front.
# - `StudySession.open(name="notebook").job(7)` is the job of a trial, ready for `ss.launch`.
# - Leave out the space: `ss.tune(job)` searches a default one, around the critical batch size.
# - Raise the upper bound of the ratio above one: the study is refused before any trial starts.
#
# [← Large batches](07-large-batch.ipynb) · [Index](00-index.ipynb) · next: [Planner →](09-planner.ipynb)
