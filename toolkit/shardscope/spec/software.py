"""Training software: what a prediction assumes of the framework that runs a layout.

Kernels, overlap of messages and memory differ more between frameworks than between clusters, so each calibration names
the software that it was measured with. Software of one family shares kernels and the way in which it overlaps messages.

DeepSpeed before 0.5.9 is a family of its own: pull request 1453 rewrote how ZeRO 3 fetches parameters, and one model
went from 55 to 92 TFLOP/s. Three steps of that release are the only ones of `deepspeed`, which its `caveat` says.
NVIDIA's recipes run Megatron-Core with overlaps and fused kernels that it leaves off by default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.errors import unknown_name

if TYPE_CHECKING:
    from shardscope.spec.layout import Layout

Family = Literal["megatron", "fsdp", "deepspeed", "deepspeed-0.5"]


class Software(NamedTuple):
    """One framework, or a trainer that determines which framework and kernels are used."""

    name: str
    label: str
    family: Family
    memory: str
    """Its memory model: a key of `analytic.memory.FRAMEWORKS`."""
    aliases: tuple[str, ...] = ()
    constants: str = ""
    """The software whose constants of time it shares, because it runs the same kernels; empty for its own."""
    attention: str = "flash-2"
    """Its fused attention kernel, a key of `spec.attention_kernels.KERNELS`, which says for which releases it holds."""
    caveat: str = ""
    """What the note of its calibrations says about the steps that they rest on."""

    @property
    def measured_as(self) -> str:
        """Name of the software whose measured times are its own."""
        return self.constants or self.name

    @property
    def schedules(self) -> tuple[str, ...]:
        """Names of the pipeline schedules that it ships."""
        return _SCHEDULES[self.family]


_KNOWN = (
    Software(
        "megatron-core", "Megatron-Core", "megatron", "megatron-core", ("megatron", "megatron-lm"), attention="cudnn"
    ),
    Software("nemo", "NVIDIA NeMo", "megatron", "nemo", ("nemo-framework",), attention="cudnn"),
    Software(
        "megatron-bridge", "Megatron Bridge", "megatron", "megatron-bridge", ("bridge",), constants="nemo",
        attention="cudnn",
    ),
    Software("megatron-deepspeed", "Megatron-DeepSpeed", "megatron", "megatron-deepspeed"),
    # Both call PyTorch's attention: cuDNN's on Hopper with 2.11 or newer, FlashAttention-2 with most releases before.
    Software("fsdp2", "PyTorch FSDP2", "fsdp", "fsdp2", ("fsdp", "pytorch"), attention="cudnn"),
    Software("torchtitan", "torchtitan", "fsdp", "torchtitan"),
    Software("llm-foundry", "LLM Foundry", "fsdp", "llm-foundry", ("mosaic", "composer"), attention="flash-1"),
    Software(
        "deepspeed", "DeepSpeed", "deepspeed", "deepspeed", ("deepspeed-0.5.9",),
        caveat="of DeepSpeed since 0.5.9, only three steps of October 2021 were measured",
    ),
    Software("deepspeed-0.5", "DeepSpeed before 0.5.9", "deepspeed-0.5", "deepspeed-0.5"),
)  # fmt: skip
SOFTWARE = {each.name: each for each in _KNOWN}
"""All software by name."""
_ALIASES = {alias: each.name for each in _KNOWN for alias in each.aliases}
_SCHEDULES: dict[Family, tuple[str, ...]] = {
    "megatron": ("1f1b", "interleaved"),
    "fsdp": ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"),
    "deepspeed": ("1f1b",),
    "deepspeed-0.5": ("1f1b",),
}
"""Pipeline schedules by family: those of `megatron.core.pipeline_parallel`, `torch.distributed.pipelining` and
`deepspeed.runtime.pipe`."""


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
