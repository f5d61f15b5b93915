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
# # 7 · How large can the batch be?
#
# [← Compression](06-compression.ipynb) · [Index](00-index.ipynb) · next: [Tuning →](08-tuning.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/07-large-batch.html)
#
# How far can the batch be increased before accuracy suffers, and does LAMB or LARS help? The experiment below trains
# real processes for about a minute on a small machine; the answer then stands in bold below its cell. The rest of this
# notebook explains it: why a larger batch makes every step better only up to a point, how that point is measured, and
# how the learning rate is chosen.

# %%
import pandas as pd

import shardscope as ss
from shardscope.analytic import large_batch
from shardscope_widgets import figures, say

FEWEST, CRITICAL = 100, 256
batches = [16, 64, 256, 1024, 4096]
steps = large_batch.steps_to_target(batches, min_steps=FEWEST, critical_batch=CRITICAL)
say(
    f"An example: assume that {FEWEST} steps are the fewest that reach a target, and that the critical batch size is "
    f"{CRITICAL} samples. Its measured value follows below."
)
pd.DataFrame(
    {
        "steps": [f"{count:,.0f}" for count in steps],
        "samples": [f"{count * batch:,.0f}" for count, batch in zip(steps, batches, strict=True)],
    },
    index=pd.Index(batches, name="batch"),
)

# %% [markdown]
# ## The experiment
#
# Every run trains on the same number of samples, so a larger batch takes fewer steps. At each batch size, one seed
# looks for a learning rate, around the one that the scaling rule gives, until the best lies between two others or
# reaches the target. The other seeds give the result. An optimizer that misses the target is not run at larger batch
# sizes. Most of the time goes into the smallest batch size, because it sets the target.

# %%
job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, batch=64, steps=60)
sweep = ss.batch_sweep(
    job.replace(batch=32, steps=112), batches=ss.PowersOfTwo(32, 512), seeds=(0, 1, 2),
    optimizers=("nesterov", "adamw", "lars", "lamb"),
    rates={"nesterov": 0.03, "adamw": 5e-3, "lars": 3.0, "lamb": 1e-2},
)  # fmt: skip
say(figures.caption(figures.batch_sweep, sweep))
figures.batch_sweep(sweep)

# %% [markdown]
# Every row is a median over the seeds that give the result. *Narrowly* means that the seeds lie on both sides of the
# target.

# %%
sweep.table

# %% [markdown]
# Where learning rates are tuned at every batch size, standard optimizers have reached larger batches than is often
# claimed (Nado et al. 2021). So every study of this toolkit that chooses among optimizers includes `adamw` and
# `nesterov`, which is SGD with Nesterov momentum, with as many trials as any other, and its report says so if one of
# them wins.

# %% [markdown]
# ## How much of a gradient is noise?
#
# Every data-parallel step yields two averages: each rank's own gradient, over few samples, and the mean of all ranks,
# over many. Noise averages out and the true gradient does not, so the squared norms of the two tell them apart
# (McCandlish et al. 2018, appendix A). Their ratio is a number of samples, the *critical batch size*. Up to about this
# size, a larger batch saves steps in proportion; far beyond it, a larger batch saves none.

# %%
run = ss.launch(job.replace(record=ss.Record(noise_scale=True))).wait(timeout=60)
noise = run.noise_scale()
say(figures.caption(figures.noise_scale, run))
figures.noise_scale(run)

# %% [markdown]
# This limit and that of the experiment answer different questions:

# %%
say(figures.batch_limits_text(figures.info(figures.batch_sweep, sweep, critical_batch=noise.latest)))

# %% [markdown]
# Does compression disturb the measurement? It should not: gradients are measured before they are packed.

# %%
packed = ss.launch(job.replace(record=ss.Record(noise_scale=True), compression="int8")).wait(timeout=60)
say(
    f"Critical batch size: {noise.latest:.0f} samples without compression, {packed.noise_scale().latest:.0f} with int8."
)

# %% [markdown]
# ## Few steps, or few samples?
#
# The first table again, as a curve, for the critical batch size that was measured instead of the assumed one.

# %%
target = {"min_steps": FEWEST, "critical_batch": noise.latest, "batches": sweep.batches}
say(figures.caption(figures.target_cost, **target))
figures.target_cost(**target)

# %% [markdown]
# ## Which learning rate? By test
#
# One short run whose learning rate rises until the loss explodes (Smith 2015). The rate at which the loss falls fastest
# is a good first choice. The experiment does not use this test, because it compares whole runs, in which the rate also
# warms up and decays; for your own model, where no rate is known, the test gives the first one.

# %%
BATCH = 64
found = ss.lr_range_test(job.replace(optimizer="lamb", batch=BATCH), low=1e-4, high=10.0, steps=60)
say(
    f"{figures.caption(figures.lr_range, found)} Whole runs in the experiment selected "
    f"{sweep.point('lamb', BATCH).rate:.2g} for LAMB at batch size {BATCH}."
)
figures.lr_range(found)

# %% [markdown]
# ## Which learning rate? By rule
#
# For other batch sizes, the rate is scaled in proportion to the batch size for SGD (Goyal et al. 2017), and with its
# square root for adaptive methods. The LAMB paper's table for BERT follows such a rule, and its warm-up grows with the
# batch size too:

# %%
bert = large_batch.LAMB_BERT
pd.DataFrame(
    {
        batch: {
            "learning rate": f"{float(bert.lr_at(batch)):.3g}",
            "warm-up": f"{float(bert.warmup_ratio_at(batch)):.2%} of all steps",
        }
        for batch in (512, 2048, 8192, 32768)
    }
).T.rename_axis("batch")

# %% [markdown]
# ## Which layers get a smaller step?
#
# LAMB and LARS scale each layer's step in proportion to the norm of its weights; the factor is the *trust ratio*. Every
# run records trust ratios, and compression residuals, layer by layer, and raises alarms. Here a published variant of
# LAMB limits the norm of the weights.

# %%
clamped = ss.Optimizer("lamb", variant="pytorch-optimizer")
layered = ss.launch(job.replace(optimizer=clamped, compression="topk")).wait(timeout=60)
for sentence in figures.caption(figures.layers, layered).splitlines():
    say(f"- {sentence}")
figures.layers(layered)

# %% [markdown]
# ## Try next
#
# - Measure the critical batch size of your own model: `record=ss.Record(noise_scale=True)` works with any job.
# - Add `"sgd"` to the sweep, or more seeds. `tests/benchmarks/batch_scaling.py` trains longer, on two tasks.
#
# [← Compression](06-compression.ipynb) · [Index](00-index.ipynb) · next: [Tuning →](08-tuning.ipynb)
