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
# # 6 · When do compressed gradients pay off?
#
# [← Pipelines](05-pipelines.ipynb) · [Index](00-index.ipynb) · next: [Large batches →](07-large-batch.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/06-compression.html)
#
# Workers that train one model together spend part of every step sending gradients. These can be sent in fewer bytes:
# rounded, reduced to their signs or to their largest elements, or factorised. Each method saves bytes, takes time to
# compress and decompress, and loses information.

# %%
import pandas as pd

import shardscope as ss
from shardscope.analytic import communication as comm
from shardscope_widgets import Trace, TrainingLab, figures, say

MODEL = "gpt-nano"
LINK = ss.Link(bandwidth="100 Mbit/s", latency="1 ms")  # the link between your own machines
job = ss.Job(model=MODEL, data="python-source", strategy="ring", batch=16, world_size=2, link=LINK)
say(
    f"Without compression, each of {job.world_size} workers sends {ss.predict(job).sent_bytes.max():,} bytes per step."
)

# %% [markdown]
# ## On which link does compression pay off, and with which method?
#
# `compression_speedup` predicts the whole step with each method, as `ss.predict` does, with compression times measured
# here. Move “my link” with the slider. Grey methods raise the loss by more than their tolerance.

# %%
whole = ss.compression_speedup(job)
whole

# %% [markdown]
# ## Is the prediction right?
#
# Real processes pack and send every byte, over the link: uncompressed, with the method that is recommended, and with
# others. The same call now marks them on the curve, and says what they took.


# %%
def train(compression="none", **changes):
    """One run of the common job, to its end."""
    fields = {"steps": 20, **changes}
    return ss.launch(job.replace(compression=compression, **fields)).wait(timeout=120)


best = whole.recommended.compression.label
runs = [train(method) for method in dict.fromkeys(("none", best, "int8", "topk", "powersgd"))]
ss.compression_speedup(job)

# %% [markdown]
# Where does the time go? Hover over the bars for the times of computing, compressing, and waiting for the network.

# %%
traces = [Trace.read(run) for run in runs]
for sentence in figures.caption(figures.compression, traces).splitlines():
    say(f"- {sentence}")
figures.compression(traces)

# %% [markdown]
# And the times that were predicted, with the bytes:

# %%
frame = whole.to_frame().set_index("method")
sent = frame["sent_bytes"] * job.world_size / 1e3  # by all ranks, as the runs above count it
times = frame[["step_s", "compute_s", "codec_s", "communication_s"]].mul(1e3)
times = times.rename(columns=lambda name: name.removesuffix("_s"))
times.map("{:.1f} ms".format).assign(**{"sent (all ranks)": sent.map("{:,.0f} kB".format)})

# %% [markdown]
# What is not sent need not be lost. With *error feedback* it is kept, as the residual, and added to the next step's
# gradient. The losses show what remains of the damage.

# %%
figures.loss(traces, by_method=True)

# %% [markdown]
# ## What does it cost in loss?
#
# The table is too long to compute here; it is the output of `tests/benchmarks/convergence.py`, which trains gpt-nano on
# two ranks with three seeds for each pair, at the learning rate of the uncompressed run. An empty cell means that the
# method does not support the optimizer, or that the pair was not run.

# %%
costs = whole.losses
tolerance, increase = costs["tolerance"], costs.drop(columns="tolerance")
over = increase.gt(tolerance, axis=0)
everywhere = increase.index[~over.any(axis=1) & increase.notna().all(axis=1)]
nowhere = increase.index[(over | increase.isna()).all(axis=1)]
limits = pd.Series({name: f"{name} ({percent:g}%)" for name, percent in tolerance.items()})
say(
    f"**Within its tolerance under every optimizer:** {'; '.join(limits[everywhere])}. "
    f"**Under none:** {'; '.join(limits[nowhere])}. "
    f"Methods within it, of {len(increase)}: "
    + ", ".join(f"{name} {(~over[name] & increase[name].notna()).sum()}" for name in increase)
    + ". Percent that the loss is higher than without compression (**bold** above the tolerance, which was fixed "
    "before the first run; `inf`: diverged):"
)
bold = over.map(lambda above: "font-weight: bold" if above else "").assign(tolerance="")
costs.style.format(precision=1, na_rep="").apply(lambda _: bold, axis=None)

# %% [markdown]
# Optimizers that divide by the size of gradients suffer most: to them, the values that error feedback adds later look
# like a large gradient. Under AdamW and LAMB, runs that differ only in rounding drift apart too, so a small bold number
# may be chance. Much of the difference arises in the first steps, in which gradients turn quickly and second moments
# rest on few gradients: hence the rows with a warm-up, in which the first fifth of the steps is not compressed.
#
# ## How small are the packets?

# %%
SHAPE = (1000, 1000)
methods = ("bf16", "int8", "int4", "qsgd", "terngrad", "sign", "topk", "randomblock", "powersgd")
packets = {method: ss.Compression(method).bucket_bytes([SHAPE], 2).max() for method in methods}
elements = SHAPE[0] * SHAPE[1]
smallest = min(packets, key=packets.get)
say(
    f"The gradient of a matrix with {elements:,} elements takes {4 * elements / 1e3:,.0f} kB in fp32, and "
    f"{packets[smallest] / 1e3:.0f} kB with {smallest}:"
)
pd.DataFrame(
    {
        method: {
            "packet": f"{size / 1e3:,.1f} kB",
            "per element": f"{8 * size / elements:.3f} bits",
            "less than fp32": f"{4 * elements / size:.1f} times",
        }
        for method, size in packets.items()
    }
).T

# %% [markdown]
# ## How are packets summed?
#
# Rounded floats and PowerSGD's factors can be summed as they travel round a ring; other packets cannot. With `gather`,
# every worker sends its packet to all others, so the bytes grow with the number of workers. With `two-phase`, each
# worker receives one share of everybody's gradient, sums it, packs the mean again and sends it to all others: 2(W-1)/W
# of a packet for any W.

# %%
saved = {}
for exchange in ("gather", "two-phase"):
    saved[exchange] = {}
    for workers in (2, 4, 8, 16):
        sent = ss.Compression("int8", exchange=exchange).bucket_bytes([(1024, 1024)], workers).max()
        saved[exchange][workers] = comm.ring_all_reduce_bytes(1024 * 1024, 4, workers).max() / sent
table = pd.DataFrame(saved).rename_axis("workers")
useless = ", ".join(str(workers) for workers in table.index[table["gather"] <= 1])
say(f"Among {useless} workers, gathering int8 saves nothing. Times fewer bytes than the ring in fp32:")
table.round(2)

# %% [markdown]
# ## Where does it fail?
#
# Plain SGD at one learning rate trains a classifier of digits. A majority vote of signs discards the size of a
# gradient; a few of its elements, chosen at random and without error feedback, may retain too little.


# %%
def accuracy(compression):
    """On the held-out digits, after 60 steps."""
    sgd = ss.Optimizer("sgd", lr=0.1)
    run = train(compression, model="mlp", data="digits", batch=64, steps=60, link=None, optimizer=sgd)
    return run.summary().test_accuracy


correct = pd.Series(
    {
        "none": accuracy("none"),
        "int4": accuracy("int4"),
        "randomk, 1%": accuracy(ss.Compression("randomk", ratio=0.01)),
        "randomk, 1%, without feedback": accuracy(ss.Compression("randomk", ratio=0.01, feedback=False)),
        "sign-vote": accuracy("sign-vote"),
    }
).sort_values(ascending=False)
say(f"{correct.index[-1]} does worst. Digits classified correctly:")
correct.map("{:.1%}".format).to_frame("held-out digits")

# %% [markdown]
# ## And under ZeRO?
#
# If each rank holds a shard of every tensor, gradients are reduce-scattered: ranks exchange packets of shards, and the
# second phase is not needed. LAMB's trust ratios use norms of whole tensors, summed over the shards, and stay exact.

# %%
sharded = {
    name: train(name, strategy="zero-3", optimizer="lamb", link=None, steps=12).summary()
    for name in ("none", "int8", "int4")
}
rest = sharded["int4"].bytes_per_step / sharded["none"].bytes_per_step
say(
    f"With int4, {rest:.0%} of the bytes remain: ZeRO-3 also gathers its parameters, which are sent uncompressed."
)
pd.DataFrame(
    {
        name: {"loss": f"{run.loss:.4f}", "sent per step": f"{run.bytes_per_step / 1e6:.2f} MB"}
        for name, run in sharded.items()
    }
).T

# %% [markdown]
# ## The lab
#
# Choose a compression and a link, start a run, and compare it with the runs above.

# %%
lab = TrainingLab(model=MODEL, strategy="ring", world_size=2, steps=30, compression="int8")
lab.bandwidth = LINK.label.partition(",")[0]
lab

# %% [markdown]
# ## Try next
#
# - Set `LINK` in the first cell to the link between your own machines, or `MODEL` to another model of text, and run
#   all cells again.
# - Search compression and learning rate together: [Tuning](08-tuning.ipynb).
# - Write a compressor in a cell: [Bring your own](10-bring-your-own.ipynb).
#
# [← Pipelines](05-pipelines.ipynb) · [Index](00-index.ipynb) · next: [Large batches →](07-large-batch.ipynb)
