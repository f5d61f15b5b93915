"""How frameworks differ in their use of memory: a table of their conventions, with sources.

Three values were not taken from code, but inferred from 11 measured peaks of Megatron-LM on B200 GPUs, published by
SimuMax: `ring_copies` from the only measurement with context parallelism, `routed_copies` from the only one with
experts, and `workspace_bytes` from the 52 MiB that the formulas leave unexplained in dense models. The values for
``fsdp2`` agree within 4 % with three peaks of Llama 3.1 8B that torchtitan published, but not with those of pipelines
of 405B, which are about twice as large. The values for ``deepspeed`` follow its documentation, and have not been
compared with peaks.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple


class Framework(NamedTuple):
    """Conventions of a framework that affect memory."""

    name: str
    source: str
    main_gradients: bool = False
    """Whether mixed precision accumulates gradients in float32 instead of the 16-bit dtype."""
    whole_in_pipelines: bool = False
    """Whether a pipeline keeps whole gradients, in float32, until its last micro-batch, and reduces them only then."""
    dropout: bool = False
    """Whether the model has dropout layers, each of which saves a mask of one byte per element."""
    gated_tensors: int = 3
    """Number of tensors of the inner width that a gated feed-forward layer saves: gate, input and product if SwiGLU is
    a single operation, and also the activated gate if it is two operations."""
    logits_bytes: int = 10
    """Bytes per logit at the memory peak of the loss."""
    every_other_product: bool = False
    """Whether selective recomputation keeps attention and the output of every other matrix product of a dense layer,
    and recomputes all other operations; otherwise it recomputes core attention alone."""
    reused_gradient: bool = False
    """Whether one placeholder gradient per distinct weight shape stays allocated."""
    ring_copies: int = 1
    """Number of extra copies of the attention output that context parallelism keeps."""
    routed_copies: int = 5
    """Number of copies of the routed tokens while a mixture of experts runs: tokens sorted by expert, tokens received,
    outputs of the experts, outputs in the senders' order, and outputs returned. Always two without expert parallelism,
    because nothing is sent."""
    prefetched: int = 1
    """Number of layers whose parameters are prefetched, that is, gathered in advance."""
    workspace_bytes: float = 64 * 2**20
    """Bytes of workspace that matrix products need."""


MEGATRON_CORE = Framework(
    "Megatron-Core with TransformerEngine 2.x",
    "gradients accumulate in fp32 main_grad; get_dummy_wgrad keeps a bf16 placeholder per weight shape; the fused "
    "cross entropy overwrites the bf16 logits with their gradient",
    main_gradients=True,
    logits_bytes=2,
    reused_gradient=True,
)
MEGATRON_2022 = Framework(
    "Megatron-LM of 2022",
    "Korthikanti et al. 2022 (arXiv 2205.05198), section 4: dropout masks saved, logits saved in fp32",
    main_gradients=True,
    dropout=True,
    gated_tensors=4,
    logits_bytes=4,
    workspace_bytes=0,
)
FSDP2 = Framework(
    "PyTorch FSDP2",
    "fully_shard gathers one block in advance; F.cross_entropy on logits.float() keeps bf16 logits, fp32 logits, their "
    "log-softmax and its gradient; SiLU and product are two operations; torchtitan's selective op recomputation; "
    "torch.distributed.pipelining reduces gradients only in the last backward pass (set_requires_gradient_sync)",
    whole_in_pipelines=True,
    gated_tensors=4,
    logits_bytes=14,
    every_other_product=True,
)
DEEPSPEED = Framework(
    "DeepSpeed",
    "runtime/zero/stage_1_and_2.py and stage3.py: gradients in 2 bytes, one layer gathered in advance",
    gated_tensors=4,
)
PAPER = Framework(
    "ZeRO paper",
    "Rajbhandari et al. 2020 (arXiv 1910.02054), section 3: model states only, without workspace",
    gated_tensors=4,
    logits_bytes=4,
    workspace_bytes=0,
)
FRAMEWORKS: MappingProxyType[str, Framework] = MappingProxyType(
    {
        "megatron-core": MEGATRON_CORE,
        "megatron-2022": MEGATRON_2022,
        "fsdp2": FSDP2,
        "deepspeed": DEEPSPEED,
        "paper": PAPER,
    }
)
