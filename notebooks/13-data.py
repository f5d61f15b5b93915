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
# # 13 · Data that does not fit in memory
#
# [← Faults](12-faults.ipynb) · [Index](00-index.ipynb) · [Several axes at once →](14-hybrid.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/13-data.html)
#
# How do ranks read data that is larger than memory, from a source that is slower than training, without repeating a
# sample within an epoch? Data in *shards*, files of a few megabytes, is read row by row. Ranks fetch shards ahead
# of their use, share a cache on disk, and continue at the right row after a failure, on any number of ranks.
#
# `ss.write_shards` writes arrays, or the parts that a generator yields, which may be more than fits in memory.

# %%
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import shardscope as ss
from shardscope_widgets import bytes_text, figures, say

FOLDER = Path(tempfile.mkdtemp())
digits = load_digits()
mixed = np.random.default_rng(0).permutation(
    len(digits.target)
)  # shards of a sorted source would hold only a few classes each
images = (digits.images[mixed, None] / 16).astype("float32")


def parts(size=100):
    """Images and classes, a few at a time."""
    for start in range(0, len(images), size):
        yield images[start : start + size], digits.target[mixed[start : start + size]]


shards = ss.write_shards(FOLDER / "digits", parts(), shard_size="24 kB")
files = sorted(Path(shards.path).iterdir())
say(
    f"{len(images):,} images are in {len(files)} shards of up to {bytes_text(max(f.stat().st_size for f in files))}, "
    f"from `{files[0].name}` to `{files[-1].name}`."
)

# %% [markdown]
# ## The order of the samples
#
# A rank cannot jump to random rows of a large data set without waiting for each. So the shuffle has two levels: the
# shards in random order, and then all rows of a few shards, a *window*, at a time. The order depends on the seed and
# the epoch alone. Ranks divide each global batch among them, so the order does not depend on their number. No sample
# is repeated within an epoch; if the batch does not divide the samples, those left over differ in each epoch.

# %%
BATCH = 80
train = len(images) * 9 // 10  # one shard in ten is held out for the validation and the test
EPOCH = train // BATCH
say(f"An epoch of about {train:,} training samples has {EPOCH} steps of {BATCH}.")

# %% [markdown]
# ## A slow source, before and after the cache
#
# `slow` emulates a source with limited bandwidth, such as an object store far away: each rank reads at most this fast.
# With a `cache`, each shard is fetched once by one of the ranks and then read from disk, also in later epochs and in
# later runs. The prediction comes first: batches are read ahead while ranks compute, so ranks wait only for reads
# that computation does not hide.

# %%
slow = shards.replace(
    slow=ss.Link(bandwidth="80 kB/s", latency="10 ms"),
    cache="50 MB", cache_folder=str(FOLDER / "cache"), window=4,
)  # fmt: skip
job = ss.Job(model="mlp", data=slow, world_size=2, batch=BATCH, steps=3 * EPOCH)
expected = ss.predict(job)
waiting_s = expected.filling_s / EPOCH
say(
    f"Predicted: {1e3 * (expected.step_time_s + waiting_s):.0f} ms a step in the first epoch, of which "
    f"{1e3 * waiting_s:.0f} ms waiting for data, and {1e3 * expected.step_time_s:.1f} ms once the cache is full."
)
expected

# %%
run = ss.launch(job).wait(timeout=120)
epochs = run.reduced().epochs
say(
    figures.caption(figures.epochs, epochs)
    + " In the first epoch, a hit is a shard that the other rank has fetched."
)
figures.epochs(epochs)

# %%
again = ss.launch(job.replace(steps=EPOCH)).wait(timeout=120)
say(
    f"The next run finds {again.summary().cache_hit_rate:.0%} of its shards in the cache and fetches "
    f"{bytes_text(again.summary().fetched_bytes)}: its epoch takes {again.reduced().epochs[0].time_s:.1f} s, where the "
    f"first took {epochs[0].time_s:.1f} s."
)

# %% [markdown]
# ## Stopped in mid-epoch, resumed on another number of ranks
#
# A checkpoint stores the position in the order of the samples. The resumed run continues at the next sample, whatever
# its number of ranks. The same samples in the same order give the same losses, so the two parts must end as a run does
# that was never stopped.

# %%
whole = job.replace(steps=EPOCH, world_size=4, data=shards)
undisturbed = ss.launch(whole).wait(timeout=120)
first = ss.launch(whole.replace(until=whole.steps // 3)).wait(timeout=120)
rest = ss.launch(whole.replace(world_size=2), resume=first).wait(timeout=120)
loss, same = rest.summary().loss, undisturbed.summary().loss
say(
    f"{first.job.world_size} ranks trained {first.summary().steps} steps, then {rest.job.world_size} ranks "
    f"{rest.summary().steps}. The last loss is {loss:.5f}, and {same:.5f} without the stop: "
    + ("they agree." if abs(loss - same) <= 1e-4 * abs(same) else "they differ.")
)

# %% [markdown]
# ## Other formats
#
# Tar files in the layout of WebDataset, Parquet files, and what a Hugging Face `Dataset` writes with `save_to_disk` are
# read as shards too. They are unpacked into the cache, from where rows are mapped into memory.

# %%
import io
import tarfile

for number in range(4):
    with tarfile.open(FOLDER / f"digits-{number}.tar", "w") as tar:
        for row in range(number, len(images), 4):
            array = io.BytesIO()
            np.save(array, images[row])
            label = str(digits.target[mixed[row]]).encode()
            for suffix, content in (("x.npy", array.getvalue()), ("cls", label)):
                member = tarfile.TarInfo(f"{row:06d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))

packed = ss.Shards(str(FOLDER), format="tar", cache="50 MB", cache_folder=str(FOLDER / "unpacked"))
trained = ss.launch(job.replace(data=packed, steps=10)).wait(timeout=120)
say(
    f"From tar files, the loss went from {trained.metrics()['loss'].iloc[0]:.2f} to {trained.summary().loss:.2f} in "
    f"{trained.summary().steps} steps."
)

# %% [markdown]
# ## A stream of your own
#
# A function may return a PyTorch `IterableDataset` to train on. A stream has no row numbers, so each rank reads all of
# it and keeps its own samples; a resumed run skips what was used. Its order is its own, and test data must not be a
# stream.

# %%
import torch
from torch.utils.data import IterableDataset


class Stream(IterableDataset):
    """Yields the images one by one, as a service would."""

    def __iter__(self):
        for row in range(len(images)):
            yield torch.from_numpy(images[row]), int(digits.target[mixed[row]])


def from_a_stream():
    return Stream(), (torch.from_numpy(images[:100]), torch.from_numpy(digits.target[mixed[:100]]))


streamed = ss.launch(job.replace(data=from_a_stream, steps=10)).wait(timeout=120)
seen = sum(event["samples"] for event in streamed.events("step"))
say(
    f"{streamed.job.world_size} ranks shared {seen} samples of the stream; the loss ended at "
    f"{streamed.summary().loss:.2f}."
)

# %% [markdown]
# ## Try next
#
# - Make the cache smaller than the data, and draw `figures.epochs` again: how does the hit rate change?
# - Train a GPT on shards of tokens: `ss.write_shards` takes one-dimensional arrays of integers too.
# - Kill a rank in mid-epoch with the [notebook on faults](12-faults.ipynb), and let it recover.
#
# [← Faults](12-faults.ipynb) · [Index](00-index.ipynb) · [Several axes at once →](14-hybrid.ipynb)
