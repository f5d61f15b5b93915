"""Training software: the assumptions of predictions about the framework that runs a layout.

Kernels, overlap of messages and memory differ more between frameworks than between clusters, so each calibration names
the software that it was measured with. Software of one family shares kernels and overlaps messages in the same way.

DeepSpeed before 0.5.9 is a family of its own: pull request 1453 rewrote how ZeRO 3 fetches parameters, and one model
went from 55 to 92 TFLOP/s. The `caveat` of `deepspeed` says that only three steps were measured with it.
NVIDIA's recipes run Megatron-Core with overlaps and fused kernels that it disables by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.errors import unknown_name
from shardscope.spec.divisors import divisors
from shardscope.spec.layout_rules import recomputes_all, uneven_halves

if TYPE_CHECKING:
    from shardscope.spec.layout import Layout
    from shardscope.spec.model import Transformer

Family = Literal["megatron", "fsdp", "deepspeed", "deepspeed-0.5"]


class Shipped(NamedTuple):
    """Features of a framework; each field up to `has_context` contains the supported values of an axis of `Layout`."""

    schedule: tuple[str, ...]
    """Pipeline schedules; empty if it has no pipelines."""
    zero: tuple[int, ...]
    zero_in_pipelines: tuple[int, ...]
    """ZeRO stages that it combines with a pipeline."""
    offload: tuple[str, ...]
    shard: tuple[str, ...]
    """Where ZeRO can shard: over ``all`` replicas, or over those of each ``node``, with copies on other nodes."""
    has_context: bool
    """Whether it splits sequences over ranks that exchange keys and values."""
    source: str
    """Documentation or code that is the source of these values."""
    zero_of: str = ""
    """Part of the framework that has these ZeRO stages, if other parts have more, such as `` in its optimizer``."""
    zero_for_offload: tuple[tuple[str, int], ...] = ()
    """Pairs of an offload setting and the lowest ZeRO stage with which it can be used."""
    full_for_offload: tuple[str, ...] = ()
    """Offload settings that move only the inputs of recomputed layers, so that all layers have to be recomputed."""
    has_parts_of_heads: bool = True
    """Whether there can be more tensor-parallel ranks than key-value heads, several of which then share a head."""
    has_tied_pipelines: bool = True
    """Whether input and output embeddings on different stages can be tied."""
    context_halves: Literal["", "sequence", "micro-batch"] = ""
    """Number that must be a multiple of 2 x context tokens, because each context rank gets an early and a late part;
    empty if there is no such restriction."""
    offloaded: tuple[str, ...] = ()
    """Optimizers whose states the framework offloads with offload="optimizer"; empty for all."""
    unsharded: tuple[str, ...] = ()
    """Optimizers whose states the framework does not shard."""

    def axes_for(self, model: Transformer, optimizers: Iterable[str]) -> dict[str, tuple[int | str, ...]]:
        """Return the values of the axes that the framework restricts for a model and these optimizers, by axis."""
        found: dict[str, tuple[int | str, ...]] = {}
        if not self.has_parts_of_heads:
            found["tensor"] = divisors(model.kv_heads)
        if model.tied and not self.has_tied_pipelines:
            found["pipeline"] = (1,)
        if self.context_halves:
            found["context"] = tuple(
                each for each in divisors(model.seq) if not uneven_halves(model.seq, each)
            )
        if {*optimizers} <= {*self.unsharded}:
            found["zero"] = (0,)
        if self.offloaded and not {*optimizers} & {*self.offloaded}:
            found["offload"] = tuple(each for each in self.offload if each != "optimizer")
        return found

    def refuses(self, layout: Layout, model: Transformer) -> tuple[str, ...]:
        """Return the features of a layout of this model that the framework rejects, as text: ``pipelines with tied
        embeddings``.
        """
        found, name = [], layout.optimizer.name
        if not self.has_parts_of_heads and model.kv_heads % layout.tensor:
            found.append(f"tensor={layout.tensor} with {model.kv_heads} key-value heads")
        if model.tied and layout.pipeline > 1 and not self.has_tied_pipelines:
            found.append("pipelines with tied embeddings")
        tokens = model.seq * (layout.micro_batch if self.context_halves == "micro-batch" else 1)
        if self.context_halves and uneven_halves(tokens, layout.context):
            found.append(
                f"context={layout.context} with {tokens} tokens, which are not a multiple of 2 x context"
            )
        if layout.offload == "optimizer" and self.offloaded and name not in self.offloaded:
            found.append(f"offload={layout.offload!r} with {name}")
        if layout.zero and name in self.unsharded:
            found.append(f"ZeRO {layout.zero} with {name}")
        return tuple(found)

    def axes(self) -> dict[str, tuple[int | str, ...]]:
        """Return the values of each axis that the framework restricts, by axis."""
        stages = {"schedule": self.schedule} if self.schedule else {"pipeline": (1,)}
        context = {} if self.has_context else {"context": (1,)}
        return {**stages, "zero": self.zero, "offload": self.offload, "shard": self.shard, **context}

    def lacks(self, layout: Layout, model: Transformer | None = None) -> tuple[str, ...]:
        """Return the features of a layout that the framework does not ship, as text, such as ``the zbv schedule``.

        With a model, also the features that it rejects for this model.
        """
        found, is_piped = [] if model is None else [*self.refuses(layout, model)], layout.pipeline > 1
        if is_piped and layout.schedule not in self.schedule:
            found.append(f"the {layout.schedule} schedule" if self.schedule else "pipelines")
        if layout.zero not in self.zero:
            found.append(f"ZeRO {layout.zero}{self.zero_of}")
        elif is_piped and layout.zero not in self.zero_in_pipelines:
            found.append(f"ZeRO {layout.zero} in a pipeline")
        ranks = layout.data * layout.context
        if 0 < layout.shard < ranks and "node" not in self.shard:
            found.append(f"ZeRO over {layout.shard} of {ranks} ranks")
        if layout.context > 1 and not self.has_context:
            found.append("context parallelism")
        if layout.offload not in self.offload:
            found.append(f"offload={layout.offload!r}")
        elif layout.zero < (needed := dict(self.zero_for_offload).get(layout.offload, 0)):
            found.append(f"offload={layout.offload!r} below zero={needed}")
        if layout.offload in self.full_for_offload and not recomputes_all(layout):
            found.append(f"offload={layout.offload!r} without recompute='full' of all layers")
        return tuple(found)


_MEGATRON = Shipped(
    ("1f1b", "interleaved"), zero=(0, 1), zero_in_pipelines=(0, 1), offload=("none", "optimizer"),
    shard=("all", "node"), has_context=True,
    source="Megatron-Core: core.pipeline_parallel.schedules, --use-distributed-optimizer, --optimizer-cpu-offload, "
    "--context-parallel-size; ZeRO 2 and 3 are in Megatron-FSDP, which is not modelled; only the distributed optimizer "
    "offloads its states",
    zero_of=" in its distributed optimizer", zero_for_offload=(("optimizer", 1),), context_halves="sequence",
    offloaded=("adamw",), unsharded=("sgd",),
)  # fmt: skip
_TORCH = Shipped(
    ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"), zero=(0, 1, 2, 3),
    zero_in_pipelines=(0, 1, 2, 3), offload=("none", "states"), shard=("all", "node"), has_context=True,
    source="PyTorch: distributed.pipelining, DDP, ZeroRedundancyOptimizer, fully_shard with CPUOffloadPolicy, "
    "distributed.tensor.experimental.context_parallel",
    zero_for_offload=(("states", 2),),
)  # fmt: skip
_DEEPSPEED = Shipped(
    ("1f1b",), zero=(0, 1, 2, 3), zero_in_pipelines=(0, 1),
    offload=("none", "optimizer", "states", "activations", "all"), shard=("all",), has_context=False,
    source="DeepSpeed: runtime.pipe, whose PipelineEngine refuses ZeRO 2 and 3; DeepSpeed-Ulysses splits sequences, "
    "but exchanges heads; offload_optimizer is for stages 1 to 3, offload_param for stage 3; "
    "zero_hpz_partition_size copies only parameters to each node, and still shards gradients and optimizer states over "
    "all ranks; mics_shard_size, of stage 3 without offloading, was removed in September 2026 (pull request 8490); "
    "cpu_checkpointing moves what deepspeed.checkpointing.checkpoint saves, the inputs of recomputed layers",
    zero_for_offload=(("optimizer", 1), ("states", 3), ("all", 3)), full_for_offload=("activations", "all"),
)  # fmt: skip


class Software(NamedTuple):
    """One framework, or a trainer that determines which framework and kernels are used."""

    name: str
    label: str
    family: Family
    shipped: Shipped
    """Features that the software supports; a plan for the software is limited to these."""
    memory: str
    """Memory model of the software: a key of `analytic.memory.FRAMEWORKS`."""
    aliases: tuple[str, ...] = ()
    constants: str = ""
    """Software whose time constants apply, because it runs the same kernels; empty if this software has its own
    constants."""
    attention: str = "flash-2"
    """Fused attention kernel: a key of `calibration.attention_kernels.KERNELS`, whose module states its releases."""
    caveat: str = ""
    """Caveat on the measured steps of the software; it is part of the note of its calibrations."""

    @property
    def measured_as(self) -> str:
        """Name of the software whose measured time constants apply."""
        return self.constants or self.name


_KNOWN = (
    Software(
        "megatron-core", "Megatron-Core", "megatron", _MEGATRON, "megatron-core", ("megatron", "megatron-lm"),
        attention="cudnn",
    ),
    Software("nemo", "NVIDIA NeMo", "megatron", _MEGATRON, "nemo", ("nemo-framework",), attention="cudnn"),
    Software(
        "megatron-bridge", "Megatron Bridge", "megatron", _MEGATRON, "megatron-bridge", ("bridge",), constants="nemo",
        attention="cudnn",
    ),
    Software("megatron-deepspeed", "Megatron-DeepSpeed", "megatron", _DEEPSPEED, "megatron-deepspeed"),
    # All call PyTorch's attention: cuDNN's on Hopper with 2.11 or newer, FlashAttention-2 with most releases before.
    Software("fsdp2", "PyTorch FSDP2", "fsdp", _TORCH, "fsdp2", ("fsdp", "pytorch"), attention="cudnn"),
    Software("fsdp2-2.10", "FSDP2 of PyTorch before 2.11", "fsdp", _TORCH, "fsdp2", constants="fsdp2"),
    Software(
        "torchtitan", "torchtitan", "fsdp",
        _TORCH._replace(
            zero=(0, 2, 3), zero_in_pipelines=(0, 2, 3),
            source="torchtitan: parallelism.pipeline_parallel_schedule, data_parallel_replicate_degree, "
            "fsdp_reshard_after_forward and context_parallel_degree, training.enable_cpu_offload; "
            "Decoder.Config.update_from_config",
            has_parts_of_heads=False, has_tied_pipelines=False, context_halves="micro-batch",
        ),
        "torchtitan",
    ),
    Software(
        "llm-foundry", "LLM Foundry", "fsdp",
        Shipped(
            (), zero=(0, 2, 3), zero_in_pipelines=(), offload=("none",), shard=("all", "node"),
            has_context=False,
            source="Composer: parallelism_config.fsdp with sharding_strategy NO_SHARD, SHARD_GRAD_OP, FULL_SHARD or "
            "HYBRID_SHARD",
        ),
        "llm-foundry", ("mosaic", "composer"), attention="flash-1",
    ),
    Software(
        "deepspeed", "DeepSpeed", "deepspeed", _DEEPSPEED, "deepspeed", ("deepspeed-0.5.9",),
        caveat="of DeepSpeed since 0.5.9, only three steps of October 2021 were measured",
    ),
    Software("deepspeed-0.5", "DeepSpeed before 0.5.9", "deepspeed-0.5", _DEEPSPEED, "deepspeed-0.5"),
)  # fmt: skip
SOFTWARE = {each.name: each for each in _KNOWN}
"""All software by name."""
_ALIASES = {alias: each.name for each in _KNOWN for alias in each.aliases}


def software_names() -> tuple[str, ...]:
    """Return the names of all software."""
    return tuple(SOFTWARE)


def software_of(name: str) -> Software:
    """Return the software with this name or alias.

    Raises:
        SpecError: No software has this name.

    Example:
        >>> software_of("megatron-lm").name
        'megatron-core'
    """
    text = name.lower() if isinstance(name, str) else name
    found = SOFTWARE.get(_ALIASES.get(text, text)) if isinstance(text, str) else None
    if found is None:
        raise unknown_name("software", name, SOFTWARE)
    return found


def memory_model(name: str) -> str:
    """Return the memory model of a software, a key of `analytic.memory.FRAMEWORKS`; Megatron-Core's for no name."""
    return SOFTWARE[name].memory if name else "megatron-core"


class Assumed(NamedTuple):
    """The software that a layout suggests, and why."""

    software: Software
    because: str


def assumed_software(layout: Layout) -> Assumed:
    """Return the software that is assumed for a layout if none is given.

    Megatron does not shard gradients or parameters of a replica in a pipeline, so ZeRO 2 and 3 suggest FSDP2; DeepSpeed
    is the framework that offloads model states.
    """
    if layout.offload != "none":
        return Assumed(SOFTWARE["deepspeed"], f"because of offload={layout.offload!r}")
    if layout.zero >= 2:
        return Assumed(SOFTWARE["fsdp2"], f"because of zero={layout.zero}")
    return Assumed(SOFTWARE["megatron-core"], "by default")
