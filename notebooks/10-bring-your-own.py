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
# # 10 · Bring your own model or method
#
# [← Planner](09-planner.ipynb) · [Index](00-index.ipynb) · next: [The twin →](11-twin.ipynb)
# · [with its figures, on the web](https://shardscope.github.io/shardscope/notebooks/10-bring-your-own.html)
#
# How do I train my own `nn.Module`, and can I add a method without touching the toolkit? A learning-rate schedule, a
# compressor, an optimizer, a pipeline schedule or a whole strategy is one class. Defined in a cell, it works like a
# built-in method: real ranks train with it, the bytes that it sends are predicted, studies can choose it, the labs list
# it, and a saved job finds it again.
#
# ## A model
#
# A job takes a built-in name, or your own class, or a function that returns an `nn.Module`, or a module with weights.
# The model is called with the inputs of the data. For `digits`, these are `float32` images of shape `(batch, 1, 8, 8)`;
# the targets are `int64` classes of shape `(batch,)`. Other data: a function, as in [the tour](01-tour.ipynb).

# %%
from math import cos, pi

import pandas as pd
import plotly.express as px

import shardscope as ss
from shardscope_widgets import Trace, bytes_text, figures, say

usual = ss.Job(model="mlp", data="digits")
say(
    f"The built-in `{usual.model}` trains on `{usual.data}`, {usual.steps} steps of {usual.batch.global_batch} "
    f"samples; below, a class of your own takes its place."
)

# %%
from torch import nn


class MyMLP(nn.Module):
    def __init__(self, hidden=512):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )

    def forward(self, images):
        return self.layers(images)


# %% [markdown]
# It trains in one process (`single`), in plain data parallelism (`all-reduce`) and under ZeRO-3:

# %%
job = ss.Job(model=MyMLP, data="digits", world_size=4, steps=10)
runs = []
for name in ("single", "all-reduce", "zero-3"):
    ranks = 1 if name == "single" else job.world_size
    run = ss.launch(job.replace(strategy=name, world_size=ranks)).wait(timeout=120)
    losses = run.metrics()["loss"]
    say(f"- `{name}` trained {len(losses)} steps: loss {losses.iloc[0]:.3f} to {losses.iloc[-1]:.3f}.")
    runs.append(run)

# %% [markdown]
# What does each rank hold, by type of memory? Each type is at its own peak in one step. `buffers` are copies that
# collectives work on.

# %%
traces = [Trace.read(run) for run in runs]
held = pd.DataFrame(
    {
        (trace.strategy, f"rank {rank}"): sizes
        for trace in traces
        for rank, sizes in sorted(trace.held.items())
    }
).T
held["total"] = held.sum(axis=1)
states = held[["parameters", "gradients", "optimizer"]].sum(axis=1).groupby(level=0).max()
say(
    f"**Of parameters, gradients and optimizer state, a rank holds {bytes_text(states['zero-3'])} under ZeRO-3, and "
    f"{bytes_text(states['all-reduce'])} in plain data parallelism.** While a layer computes, ZeRO-3 also holds whole "
    f"parameters: up to {bytes_text(held.loc['zero-3', 'gathered'].max())} (`gathered`)."
)
(held / 1e6).style.format("{:.2f} MB")

# %% [markdown]
# `ss.predict(job)` gives the same figures before a run, and `ss.compare(run)` shows both.
#
# ## A learning-rate schedule
#
# Settings are fields with defaults. `factor_after_warmup` returns the factor by which the learning rate is multiplied
# in a step; the base class already implements warm-up.


# %%
@ss.register
class Restarts(ss.LRSchedule):
    """A cosine that starts again (Loshchilov and Hutter 2017, arXiv:1608.03983)."""

    name = "restarts"

    period: int = 20

    def factor_after_warmup(self, step, steps):
        return (1 + cos(pi * ((step - 1) % self.period) / self.period)) / 2


STEPS = 60
schedule = Restarts(warmup_steps=5)
factors = [schedule.factor(step, STEPS) for step in range(1, STEPS + 1)]
say(f"{schedule.warmup_steps} steps of warm-up, then a restart every {schedule.period} steps.")
px.line(x=range(1, STEPS + 1), y=factors, labels={"x": "step", "y": "factor"}, height=220)

# %% [markdown]
# Did real ranks use it?


# %%
def train(**changes):
    """One short run, to its end."""
    fields = {"model": "mlp", "data": "digits", "batch": 48, "steps": STEPS, "world_size": 2}
    return ss.launch(ss.Job(**{**fields, **changes})).wait(timeout=120)


run = train(lr_schedule=schedule)
rates = run.metrics()["lr"]
off = max(abs(rate - run.job.optimizer.lr * factor) for rate, factor in zip(rates, factors, strict=True))
say(f"In {len(rates)} steps, the recorded learning rate differs from the class's by at most {off:.1g}.")

# %% [markdown]
# ## A compressor
#
# This compressor rounds every value to 8 bits, with one scale per packet. `packet_bytes` returns the size of a packet
# in bytes, and the codec packs and unpacks it. With `feedback`, the rounding error of a step is added to the next
# step's gradient.


# %%
import torch


@ss.register
class OneScale(ss.PackedCompression):
    """Integers of 8 bits with one scale."""

    name = "one-scale"
    codec_passes = 2.0  # for predictions of layouts: one to find the scale, one to convert

    feedback: bool = True

    def packet_bytes(self, num_elements):
        return 4 + num_elements

    def codec(self):
        def pack(values):
            scale = values.abs().max().clamp(min=1e-30) / 127
            return torch.cat([scale.view(1).view(torch.int8), (values / scale).round().to(torch.int8)])

        def unpack(packet, _count):
            return packet[:4].view(torch.float32) * packet[4:].view(torch.int8)

        return ss.SimpleCodec(self.packet_bytes, pack, unpack)


# %% [markdown]
# The bytes of a step are known before anything runs. Do the ranks then count the same?

# %%
plain, packed = train(), train(compression="one-scale")
sent = packed.summary().bytes_per_step
predicted = ss.predict(packed.job).sent_bytes.sum()
say(
    f"**{predicted:,} bytes a step predicted, {sent:,.0f} counted**; {plain.summary().bytes_per_step:,.0f} without "
    f"compression. Loss of the last step: {packed.metrics()['loss'].iloc[-1]:.3f}, and "
    f"{plain.metrics()['loss'].iloc[-1]:.3f} without."
)

# %% [markdown]
# ## An optimizer
#
# `build` returns the `torch.optim.Optimizer`. An update rule that treats every element independently is correct however
# the ranks share the work: with whole parameters, with shards, or with the layers of a pipeline stage.


# %%
class LionStep(torch.optim.Optimizer):
    """What Lion does in a step (Chen et al. 2023, arXiv:2302.06675)."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            blend, decay = group["betas"]
            for weight in group["params"]:
                if weight.grad is not None:
                    momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                    weight.sub_(momentum.lerp(weight.grad, 1 - blend).sign(), alpha=group["lr"])
                    momentum.lerp_(weight.grad, 1 - decay)


@ss.register
class Lion(ss.Optimizer):
    """Moves by the sign of its momentum."""

    name = "lion"

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)

    @property
    def states(self):
        return ss.OptimizerStates(tensors=1)  # for predictions of memory

    def build(self, parameters):
        return LionStep(parameters.groups(), {"lr": self.lr, "betas": self.betas})


# %% [markdown]
# Does it give the same result under ZeRO-3 as on one process? `ss.check` trains both ways and compares
# every parameter.

# %%
ss.check(
    ss.Job(model="mlp", data="digits", batch=48, optimizer="lion", strategy="zero-3", precision="fp64"),
    steps=5,
)

# %% [markdown]
# ## A pipeline schedule
#
# `order` lists the passes of one rank. Each pass is a tuple of its type (`F` for forward, `B` for backward, or `I` and
# `W` for the two parts of a backward pass), its stage and its micro-batch. This schedule is 1F1B, except that every
# rank runs one more forward pass ahead, so that a late neighbour does not stall it at once. The price is memory for the
# activations of one more micro-batch.


# %%
@ss.register
class OneAhead(ss.PipelineSchedule):
    """1F1B with one more forward pass ahead."""

    name = "one-ahead"

    def order(self, rank, ranks, microbatches, held):
        warm_up = min(microbatches, ranks - rank + 1)
        passes = [("F", rank, i) for i in range(warm_up)]
        for i in range(microbatches):
            passes.append(("B", rank, i))
            if warm_up + i < microbatches:
                passes.append(("F", rank, warm_up + i))
        return passes


table = ss.analytic.schedules.build("one-ahead", stages=3, microbatches=6)
timeline = table.timeline({"F": 1.0, "B": 2.0})
say(figures.caption(figures.schedule, timeline, schedule="one-ahead"))
figures.schedule(timeline, schedule="one-ahead")

# %% [markdown]
# The bubble, and the number of micro-batches that each rank holds, are computed from the order. Real ranks then run the
# same order and record their operations in the run's events.

# %%
run = train(
    model="gpt-nano", data="python-source", steps=5, batch=ss.Batch(24, micro_batch=4), world_size=3,
    strategy=ss.Pipeline(schedule="one-ahead"),
)  # fmt: skip
known = ss.analytic.schedules.build("1f1b", stages=3, microbatches=6)
ran = " ".join(f"{kind}{batch}" for kind, _, batch, *_ in run.events("schedule", rank=1)[-1]["ops"])
say(
    f"Micro-batches held, by rank: {table.peak_in_flight}, and under 1F1B {known.peak_in_flight}. Rank 1 ran `{ran}`."
)

# %% [markdown]
# ## A strategy
#
# A strategy defines how the ranks share the work. The shortest way to write one is to implement the all-reduce of the
# gradient buckets that `DistributedDataParallel` fills during the backward pass. In this strategy, every rank sends its
# gradients to every other rank. That takes one round instead of the ring's 2 (W - 1), but W / 2 times as many bytes.


# %%
from shardscope.analytic.communication import packets


class SumOfAll(ss.OwnAllReduce):
    """What one rank does."""

    def prepare(self):
        self.others = [rank for rank in range(self.context.world_size) if rank != self.context.rank]

    def reduce_(self, buffer):
        own = buffer.clone()
        received = [torch.empty_like(buffer) for _ in self.others]
        sent = [torch.distributed.isend(own, rank) for rank in self.others]
        for rank, part in zip(self.others, received, strict=True):
            torch.distributed.recv(part, rank)
        for part in received:
            buffer += part
        for message in sent:
            message.wait()
        return buffer


@ss.register
class EveryoneToEveryone(ss.BucketedStrategy):
    """Each rank sends its gradients to all others."""

    name = "everyone"
    carries = frozenset({"sums"})

    def exchanged_bytes(self, gradient_bytes, world_size, *, micro_batches=1):
        return world_size * (world_size - 1) * gradient_bytes

    def sum_traffic(self, num_elements, element_bytes, step):
        """What each rank sends to sum one bucket: a message to each other rank."""
        return packets("send", num_elements * element_bytes, step.world_size)

    def build(self, job, context):
        return SumOfAll(job, context)


run = train(strategy="everyone", world_size=3)
say(
    f"**{ss.predict(run.job).sent_bytes.sum():,} bytes a step predicted, {run.summary().bytes_per_step:,.0f} "
    f"counted.**"
)
ss.check(run.job, steps=5)

# %% [markdown]
# ## Does it pass the toolkit's tests?
#
# `ss.check_method` runs the tests that the built-in methods pass: names, JSON, studies, runs on 2, 3 and 4 ranks,
# equality with one process, and a resumed run. It returns if all tests pass; otherwise its error names the first test
# that fails.

# %%
mine = (Restarts, OneScale, OneAhead, EveryoneToEveryone)
for method in mine:
    ss.check_method(method)
say(f"{', '.join(method.name for method in mine)}: all tests pass.")

# %% [markdown]
# ## Search over it
#
# A study can choose among your own methods and the built-in ones, and can search their settings. Trials that can no
# longer become the best are pruned and have no value.

# %%
space = {
    "optimizer": ["adamw", "lion"],
    "strategy": ["ring", "everyone"],
    "lr_schedule": ["constant", "restarts"],
    "lr_schedule[restarts].period": (5, 20),
    "optimizer.lr": (1e-4, 1e-2, "log"),
}
job = ss.Job(model="mlp", data="digits", batch=48, steps=30, world_size=2)
study = ss.tune(
    job, space, trials=6, objectives=["loss"], baselines=False, name="bring-your-own", progress=False
)
trials = study.trials_dataframe(attrs=("number", "state", "value", "params")).set_index("number")
trials.rename(columns=lambda name: name.removeprefix("params_")).rename(
    columns={"value": "loss"}
).style.format(precision=4, na_rep="")

# %% [markdown]
# ## Save a job and load it again
#
# `job.json` stores the name of a method, its settings and a digest of its code. If the cell has been run, the class is
# found. In any other process the job can still be read, and an attempt to run it raises an error that says what is
# missing. A run stores the code next to its job, and `ss.load_job(run)` loads that code: directly if this kernel wrote
# it, otherwise only with `trust_code=True`.

# %%
say(f"`{ss.load_job(packed).compression}` was read from\n\n`{packed.job.compression.model_dump_json()}`")

# %% [markdown]
# ## Try next
#
# - Open `TrainingLab()` in a new cell: your methods are in its lists.
# - Turn a method into a package: an entry point in the group `shardscope.methods` names the class, and every notebook
#   has it.
#
# [← Planner](09-planner.ipynb) · [Index](00-index.ipynb) · next: [The twin →](11-twin.ipynb)
