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
# # Bring your own
#
# A learning-rate schedule, a compressor, an optimizer, a pipeline schedule or a whole strategy is one class. Written in
# a cell, it is what the built-in ones are: real ranks train with it, its bytes are predicted, studies choose it, the
# labs list it, and a saved job finds it again. Run the cells from top to bottom; all of it takes about a minute on two
# cores.

# %%
from math import cos, pi

import plotly.express as px
import torch

import shardscope as ss
from shardscope.analytic.communication.traffic import packets
from shardscope_widgets.figures import schedule


def train(**changes):
    """One short run, to its end."""
    fields = {"model": "mlp", "data": "digits", "batch": 48, "steps": 60, "world_size": 2}
    return ss.launch(ss.Job(**{**fields, **changes})).wait(timeout=120)


# %% [markdown]
# ## A learning-rate schedule
#
# Its settings are fields with defaults. `factor_after_warmup` says what the learning rate is multiplied by in a step;
# the warm-up is there already.


# %%
@ss.register
class Restarts(ss.LRSchedule):
    """A cosine that starts again (Loshchilov and Hutter 2017, arXiv:1608.03983)."""

    name = "restarts"

    period: int = 20

    def factor_after_warmup(self, step, steps):
        return (1 + cos(pi * ((step - 1) % self.period) / self.period)) / 2


run = train(lr_schedule=Restarts(warmup_steps=5))
px.line(run.metrics(), y="lr", labels={"lr": "learning rate"}, height=260)

# %% [markdown]
# ## A compressor
#
# This one rounds every value to 8 bits, with one scale per packet. `packet_bytes` returns the size of a packet in
# bytes, and the codec packs and unpacks it. With `feedback`, the rounding error of a step is added to the next
# gradient.


# %%
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
# What a rank sends in a step is known before anything runs, and is what the ranks then count.

# %%
plain, packed = train(), train(compression="one-scale")
sent = packed.summary().bytes_per_step
predicted = ss.Compression("one-scale").bucket_bytes([(packed.events("start")[0]["num_params"],)], 2).sum()
print(
    f"{predicted:,} bytes a step predicted, {sent:,.0f} counted; {plain.summary().bytes_per_step:,.0f} without"
)
print(
    f"loss of the last step: {packed.metrics()['loss'].iloc[-1]:.3f}, without {plain.metrics()['loss'].iloc[-1]:.3f}"
)

# %% [markdown]
# ## An optimizer
#
# `build` makes the `torch.optim.Optimizer`. A rule that moves each number by itself is right however the ranks share
# the work: whole parameters, shards of them, or the layers of a pipeline's stage.


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
# Is it the same under ZeRO-3 on two ranks as on one process? `ss.check` trains both and compares every parameter.

# %%
ss.check(
    ss.Job(model="mlp", data="digits", batch=48, optimizer="lion", strategy="zero-3", precision="fp64"),
    steps=5,
)

# %% [markdown]
# ## A pipeline schedule
#
# `order` lists the passes of one rank: the kind (`F` forward, `B` backward, or its halves `I` and `W`), the stage, and
# the micro-batch. This one is 1F1B in which every rank runs one forward pass further ahead, so that a late neighbour
# does not stop it at once. It pays with the activations of one more micro-batch.


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
schedule(table.timeline({"F": 1.0, "B": 2.0}), schedule="one-ahead")

# %% [markdown]
# Its bubble and what each rank holds are counted from the order. The same order runs on real ranks; what they did is in
# the run's events.

# %%
run = train(
    model="gpt-nano", data="python-source", steps=5, batch=ss.Batch(24, micro_batch=4), world_size=3,
    strategy=ss.Pipeline(schedule="one-ahead"),
)  # fmt: skip
known = ss.analytic.schedules.build("1f1b", stages=3, microbatches=6)
print("micro-batches held, by rank:", table.peak_in_flight, "and under 1F1B", known.peak_in_flight)
print("rank 1 ran", *(f"{kind}{batch}" for kind, _, batch, *_ in run.events("schedule", rank=1)[-1]["ops"]))

# %% [markdown]
# ## A strategy
#
# A strategy says how the ranks share the work. The shortest way to write one is a sum of your own for the buckets of
# gradients that `DistributedDataParallel` fills during the backward pass. In this one every rank sends its gradients to
# every other rank, which takes one round instead of the ring's 2 (W - 1), and W / 2 times its bytes.


# %%
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
said = ss.predict(run.job).sent_bytes.sum()
print(f"{said:,} bytes a step predicted, {run.summary().bytes_per_step:,.0f} counted")
ss.check(run.job, steps=5)

# %% [markdown]
# ## Does it hold in every way that the toolkit needs?
#
# `ss.check_method` runs the tests that the built-in methods pass: names, JSON, studies, 2, 3 and 4 ranks; one process
# that must come to the same; a resumed run. It returns if all of them pass, and names the first that fails.

# %%
for method in (Restarts, OneScale, OneAhead, EveryoneToEveryone):
    ss.check_method(method)

# %% [markdown]
# ## Search over it
#
# Your own methods stand beside the built-in ones in a study, and so do their settings. Trials that cannot win any more
# are pruned, and have no value.

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
study.trials_dataframe(attrs=("number", "state", "value", "params"))

# %% [markdown]
# ## Saved, and found again
#
# `job.json` holds the name, the settings and a digest of the code. Where the cell has been run, the class is found;
# elsewhere the job can be read, and says what it lacks as soon as it is to be run. A run keeps the code beside its job,
# and `ss.load_job(run)` loads it: at once what this kernel wrote, everything else on your word (`trust_code=True`).

# %%
print(ss.load_job(packed).compression)
print(packed.job.compression.model_dump_json())
