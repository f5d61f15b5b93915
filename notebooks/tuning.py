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
# # Tuning by real runs
#
# The best learning rate depends on the optimizer, on the batch, and on how gradients are compressed. So they are
# searched together, and every trial is a real training on several processes: its quality on validation data,
# its time by the clock, its bytes on the wire. A trial starts in a fraction of a second, because the launch server is
# warm. It takes about a minute on two cores.

# %%
import shardscope as ss
from shardscope.tuning.session import StudySession
from shardscope_widgets import TuningLab, figures

job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, batch=64, steps=24)

# %% [markdown]
# ## A space is data
#
# A name is a path into the job. What belongs to one choice among several has that choice in brackets, and is drawn only
# when it is chosen. Whatever no trial could run is refused here, in one sentence, before anything starts.

# %%
space = {
    "optimizer": ["adamw", "lamb"],
    "optimizer[adamw].lr": (3e-4, 3e-2, "log"),
    "optimizer[lamb].lr": (1e-3, 1e-1, "log"),
    "batch": ss.PowersOfTwo(32, 128),
    "compression": ["none", "int8", "topk"],
    "compression[topk].ratio": (0.01, 0.3, "log"),
}
try:
    ss.tune(job, {**space, "compression[topk].ratio": (0.01, 3.0)}, trials=1)
except ss.SpecError as error:
    print(error)

# %% [markdown]
# ## A study
#
# AdamW and Nesterov's SGD are in every study that chooses optimizers, with as many trials as the others. The first
# trials are the job as it is, the baselines at usual rates, compressors that save time on the link or, as here, bytes,
# and LAMB's line of rate and warm-up over the batch; the others are drawn by Optuna's sampler. Trials that a finished
# one would beat in everything, even if they improved more than the best so far did, are stopped.

# %%
study = ss.tune(job, space, trials=16, name="notebook")
session = StudySession.open(name="notebook", trials=16)
print(session.report())

# %% [markdown]
# What `ss.tune` returns is an Optuna study, so everything made for those works on it: `study.trials_dataframe()`,
# importances, the dashboard on the study's `journal.log`.

# %%
study.trials_dataframe()[["number", "state", "values_loss", "values_seconds", "values_bytes"]].head()

# %% [markdown]
# ## The front, live
#
# The same in a widget, on the same study: trials as they train, the front of quality against time, bytes as colour.
# Click a point to open its run, pin it or take its settings. The slider below the front shows it as it would be on
# another link: bytes, messages and computing were counted apart, so no run is needed.

# %%
lab = TuningLab(job, space, name="notebook", trials=16)
lab

# %% [markdown]
# ## Going on
#
# Everything is in the study's storage and in run directories. Interrupt a study, or kill this kernel, and call it
# again: it goes on, trials that were cut short first. Ask for more trials and it runs the rest.

# %%
study = ss.tune(name="notebook", trials=18)
print(len(study.trials), "trials;", len(StudySession.open(name="notebook").front()), "on the front")

# %% [markdown]
# ## Settings that change while a model trains
#
# In population based training the worst members take over weights, moments and residuals from better ones,
# and move their settings a little. What is found is a schedule. The tree shows who came from whom.

# %%
found = ss.train_population(
    job.replace(steps=32),
    {"optimizer.lr": (3e-4, 3e-2, "log"), "compression": ["none", "int8"]},
    members=4,
    intervals=4,
    interval_steps=8,
    seed=1,
)
print(found.best)
figures.lineage(found)

# %% [markdown]
# At equal compute it need not win: `tests/benchmarks/population.py` holds it against random search on both tasks, and
# on short trainings random search is as good. Its gain is a schedule, which no fixed setting is.
