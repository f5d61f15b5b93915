"""What frameworks do differently with the same job, as data: whose habits they are, and where each is from.

Three figures are inferred from measured peaks of Megatron-LM on B200 GPUs (SimuMax's, 11 rows), not read in code:
`ring_copies` from the one row with context parallelism, `routed_copies` from the one with experts, and
`workspace_bytes`, of which 52 MiB were left over in the dense rows. ``fsdp2`` and ``deepspeed`` follow what their
documentation says and are not checked against a measured peak.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple


class Framework(NamedTuple):
    """Habits of a framework that cost or save memory."""

    name: str
    source: str
    main_gradients: bool = False
    """Gradients of a mixed recipe add up in float32, in place of the short ones."""
    dropout: bool = False
    """One byte a masked element is saved, of every dropout."""
    gated_tensors: int = 3
    """Tensors of the inner width that a gated feed-forward layer saves: gate, input and product where SwiGLU is one
    operation, and gate's activation too where it is two."""
    logits_bytes: int = 10
    """Of each logit at the peak of the loss."""
    reused_gradient: bool = False
    """One placeholder for each shape of weight stays allocated."""
    ring_copies: int = 1
    """Copies of the attention's output that context parallelism keeps beside it."""
    routed_copies: int = 5
    """Of the tokens that experts get, while a mixture runs: as sorted, as received, the experts' results, those in the
    senders' order, as returned. Without expert parallelism nothing is sent, and two of them are left."""
    prefetched: int = 1
    """Layers that are gathered ahead of the one that runs."""
    workspace_bytes: float = 64 * 2**20
    """Of matrix products."""


MEGATRON_CORE = Framework(
    "Megatron-Core with TransformerEngine 2.x",
    "gradients add up in fp32 main_grad; get_dummy_wgrad keeps a bf16 placeholder for each weight shape; the fused "
    "cross entropy writes the gradient over bf16 logits",
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
    "fully_shard gathers one block ahead; F.cross_entropy on logits.float() holds bf16 logits, fp32 logits and their "
    "log-softmax; SiLU and product are two operations",
    gated_tensors=4,
)
DEEPSPEED = Framework(
    "DeepSpeed",
    "runtime/zero/stage_1_and_2.py and stage3.py: gradients in 2 bytes, one layer gathered ahead",
    gated_tensors=4,
)
PAPER = Framework(
    "ZeRO paper",
    "Rajbhandari et al. 2020 (arXiv 1910.02054), section 3: model states alone, no work space",
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
