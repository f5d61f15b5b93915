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
# # How far can the batch be pushed?
#
# More workers mean larger batches, unless each is given less to do. A larger batch makes every step a better one, but
# not for ever: beyond some size twice the samples save no steps any more. Where that is can be measured while a model
# trains; how to move the learning rate on the way there is a rule with exceptions; and which optimizer still arrives
# is an experiment. All three are here, on real processes. It takes about a minute on two cores.

# %%
import numpy as np
from plotly import graph_objects as go

import shardscope as ss
from shardscope.analytic import large_batch
from shardscope_widgets import figures
from shardscope_widgets.figures import theme

job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, batch=64, steps=60)

# %% [markdown]
# ## The gradient noise scale, live
#
# Two averages are at hand in every data-parallel step: each rank's own gradient, over few samples, and the mean of all,
# over many. Noise averages out, the gradient does not, so the two squared norms tell how much of a gradient is which
# (McCandlish et al. 2018, appendix A). Their ratio is a number of samples: the *critical batch*. Up to about there a
# larger batch saves steps in proportion; far beyond, none.

# %%
run = ss.launch(job.replace(record=ss.Record(noise_scale=True))).wait(timeout=60)
noise = run.noise_scale()
low, high = noise.interval
print(f"critical batch {noise.latest:.0f} samples, 95 % between {low:.0f} and {high:.0f}")
figures.noise_scale(run)

# %% [markdown]
# It grows while the model learns: what is left to learn is in the details. Compression does not disturb it, for it is
# measured on the gradients before they are packed; their mean is told by a random sketch of 4,096 numbers, which is
# counted apart from the rest of the traffic.

# %%
packed = ss.launch(job.replace(record=ss.Record(noise_scale=True), compression="int8")).wait(timeout=60)
print(f"uncompressed {noise.latest:.0f}, int8 {packed.noise_scale().latest:.0f} samples")

# %% [markdown]
# ## Layer by layer
#
# LAMB and LARS give each layer a step in proportion to its weights: the *trust ratio*. Every run tells them at every
# tenth step, with what compression still owes of each layer, and says what is wrong. Here a published variant sees at
# most 10 of a weight's norm. The three norm layers begin above that, so they hardly ever have a ratio of their own.

# %%
clamped = ss.Optimizer("lamb", variant="pytorch-optimizer")
run = ss.launch(job.replace(optimizer=clamped, compression="topk")).wait(timeout=60)
for alarm in run.layers().alarms:
    print(alarm)
figures.layers(run)

# %% [markdown]
# ## Steps against samples
#
# From the critical batch follows what a target costs at every other batch: few steps or few samples, not both.

# %%
batches = np.geomspace(4, 4096, 60)
steps = large_batch.steps_to_target(batches, min_steps=100, critical_batch=noise.latest)
figure = go.Figure(
    go.Scatter(x=steps * batches, y=steps, text=[f"batch {b:.0f}" for b in batches], mode="lines")
)
theme.style(
    figure, height=360, title="What reaching a target costs, if the fewest steps are 100",
    xaxis=theme.axis("samples", type="log", dtick=1), yaxis=theme.axis("steps", type="log", dtick=1),
)  # fmt: skip

# %% [markdown]
# ## The rate, by test
#
# One short run whose rate rises until the loss explodes (Smith 2015). Where the loss falls fastest is a rate to begin
# with.

# %%
found = ss.lr_range_test(job.replace(optimizer="lamb"), low=1e-4, high=10.0, steps=60)
print(found)
figures.lr_range(found)

# %% [markdown]
# ## The rate, by rule
#
# For other batches: in proportion for SGD (Goyal et al. 2017), with the root for adaptive methods. The LAMB paper's
# table for BERT is such a line, and its warm-up grows with the batch too:

# %%
for batch in (512, 2048, 8192, 32768):
    rate = large_batch.LAMB_BERT.lr_at(batch)
    warmup = large_batch.LAMB_BERT.warmup_ratio_at(batch)
    print(f"batch {batch:6}: rate {float(rate):.3g}, warm-up {float(warmup):.4f} of all steps")

# %% [markdown]
# ## The experiment
#
# Every batch size gets the same samples, every optimizer the same number of runs; at each batch the rate is looked for
# around the rule's. The question is not which optimizer is best, but where each stops arriving. Here with few epochs
# and two seeds, one to choose the rate and one that counts; `tests/benchmarks/batch_scaling.py` runs it on both tasks
# with more.

# %%
sweep = ss.batch_sweep(
    job.replace(batch=32, steps=112), batches=ss.PowersOfTwo(32, 512), seeds=(0, 1), factors=(1.0, 4.0),
    optimizers=("sgd", "adamw", "lamb"), rates={"sgd": 0.1, "adamw": 3e-3, "lamb": 1e-2},
)  # fmt: skip
print(sweep)
figures.batch_sweep(sweep)

# %% [markdown]
# Whatever it shows here: tuned at every batch, plain methods go further than their names promise, which is what Nado et
# al. (2021) found for much larger models. So every study of this toolkit that chooses optimizers has AdamW and
# Nesterov's SGD in it, with as many trials as any other, and its report says so when they win.
