"""How frameworks differ in their use of memory: a table of their conventions, with sources.

Two values were not taken from code, but inferred from 11 measured peaks of Megatron-LM on B200 GPUs, published by
SimuMax: `ring_copies` from the only measurement with context parallelism, and `routed_copies` from the only one with
experts. `reserved` and `message_bytes` are from logs of single runs: the runs of SimuMax, and two runs of BigScience in
2021 (gpt2-meg-ds-3d, for which gpt2.md also reports 26 GB in nvidia-smi, and gpt2-meg-ds-zero). All other values are
from the code or the recipes named in `source`. ``shardscope scoreboard --memory`` compares with published peaks.
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
    keeps_gradients_from: int = 4
    """Lowest ZeRO stage at which gradients stay allocated from step to step; 4 if they are freed after each update."""
    casts: bool = False
    """Whether 16-bit mixed precision keeps weights and gradients in float32, without other master weights. ZeRO 2 and 3
    shard both, and cast weights when they are gathered; otherwise autocast casts them."""
    gathers_units: bool = False
    """Whether ZeRO 2 and 3 gather and reduce whole units, as `fully_shard` does: each layer, and all other parameters
    as the root unit. See `analytic.memory.units`."""
    whole_in_pipelines: bool = False
    """Whether a pipeline keeps full float32 gradients until its last micro-batch, and reduces them only then."""
    dropout: bool = False
    """Whether the model has dropout layers, each of which saves a mask of one byte per element."""
    gated_tensors: int = 3
    """Number of tensors of the inner width that a gated feed-forward layer saves: gate, input and product if SwiGLU is
    a single operation, and also the activated gate if it is two operations."""
    logits_bytes: int = 10
    """Bytes per logit at the memory peak of the loss."""
    whole_logits: bool = False
    """Whether each tensor rank has the logits of the whole vocabulary."""
    norm_copies: int = 0
    """Number of tensors that a norm saves in addition to its input, if it consists of several operations."""
    attention_copies: int = 0
    """Number of additional saved copies of the attention output, in another order of dimensions."""
    logits_later: int = 0
    """Part of `logits_bytes` that is allocated only when the gradient of the logits is computed."""
    float32_logits: tuple[int, int] | None = None
    """`logits_bytes` and `logits_later` in fp32, where logits need no cast, and tensors in the activations' precision
    are wider; None if they are the same as in 16 bits."""
    autocast_logits: tuple[int, int] | None = None
    """`logits_bytes` and `logits_later` if autocast computes the loss of 16-bit logits; None if equal to those."""
    every_other_product: bool = False
    """Whether selective recomputation keeps attention and the output of every other matrix product of a dense layer,
    and recomputes all other operations; otherwise it recomputes core attention alone."""
    stops_early: bool = False
    """Whether full recomputation of a layer stops at its last saved tensor, so that the layer's final matrix product
    and its messages are not repeated. `torch.utils.checkpoint` does, without re-entry, since PyTorch 2.1
    (``set_checkpoint_early_stop``)."""
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
    has_workspaces: bool = True
    """Whether matrix products use workspaces, whose size depends on the device (`torch_workspace_bytes`)."""
    accumulators: bool = False
    """Whether bf16-mixed accumulates gradients in float32 tensors, in addition to the 16-bit gradients."""
    remainders: bool = False
    """Whether bf16-mixed stores only those 16 bits of a master weight that the bf16 weight lacks."""
    fp8_weights: bool = False
    """Whether fp8-mixed stores no 16-bit weights of layers' matrices, but only fp8 ones and their transposes."""
    skips_transposes: bool = False
    """Whether fp8-mixed stores no transposes of fp8 weights on devices that do not need them (`reads_any_fp8_layout`).
    This applies to one scale per tensor; with block scaling, as in MXFP8, a weight is always stored in both directions,
    because they are quantized separately."""
    float32_update: bool = False
    """Whether the update needs gradients in float32, and with ZeRO also flat 16-bit gradients; not needed with
    `accumulators`."""
    live_elements: float = 0.0
    """Number of gathered parameters kept for reuse if matrices are gathered singly; 0 if layers are gathered."""
    holds_gathered: bool = False
    """Whether gathered weights of layers that are not recomputed stay until the backward pass, because autograd saves
    them; only with `live_elements`."""
    bucket_elements: float = 0.0
    """Number of gradient elements in a bucket, which is reduced at once; 0 to reduce by layer, without a bucket."""
    buckets: int = 1
    """Number of gradient buffers in ZeRO 3: two if one is filled while the other is reduced. ZeRO 2 has one."""
    keeps_buckets: bool = False
    """Whether gradient buffers stay allocated in ZeRO 3, instead of only during the backward pass."""
    keeps_outputs: bool = False
    """Whether a pipeline keeps the output of each stage for all micro-batches in flight. With `whole_in_pipelines`, the
    pipeline also keeps, like `torch.distributed.pipelining`, a buffer for each message that a stage receives in a step
    and, for each micro-batch in flight, the tensors that the loss saves and autocast's copies of weights. See
    `analytic.memory.pipelines`, which has the same rules for a job."""
    shards_outputs: bool = False
    """Whether the kept stage outputs are sharded over tensor ranks, and gathered for the backward pass."""
    copies_to_reduce: bool = False
    """Whether replicas without ZeRO copy all gradients into buckets, which stay allocated, to reduce them."""
    keeps_replicas_gradients: bool = False
    """Whether data-parallel replicas, also with ZeRO 1, hold gradients in buckets that stay allocated."""
    reserved: float = 1.035
    """Bytes that the caching allocator reserves, for each byte of the peak: the median of SimuMax's 11 runs."""
    message_bytes: float = 0.0
    """Bytes of communication buffers that are not allocated as tensors."""


MEGATRON_CORE = Framework(
    "Megatron-Core with TransformerEngine 2.x",
    "gradients accumulate in fp32 main_grad; get_dummy_wgrad keeps a bf16 placeholder per weight shape; the fused "
    "cross entropy overwrites the bf16 logits with their gradient; quantizer.cpp creates a transpose of an fp8 weight "
    "only if nvte_is_non_tn_fp8_gemm_supported says that the device needs it",
    main_gradients=True,
    keeps_gradients_from=0,
    logits_bytes=2,
    float32_logits=(4, 0),
    skips_transposes=True,
    reused_gradient=True,
)
MEGATRON_2022 = Framework(
    "Megatron-LM of 2022",
    "Korthikanti et al. 2022 (arXiv 2205.05198), section 4: dropout masks saved, logits saved in fp32",
    main_gradients=True,
    keeps_gradients_from=0,
    dropout=True,
    gated_tensors=4,
    logits_bytes=4,
    has_workspaces=False,
)
FSDP2 = Framework(
    "PyTorch FSDP2",
    "fully_shard gathers one block in advance; F.cross_entropy on logits.float() keeps bf16 logits, fp32 logits, their "
    "log-softmax and its gradient; SiLU and product are two operations; torchtitan's selective op recomputation; "
    "torch.distributed.pipelining reduces gradients only in the last backward pass (set_requires_gradient_sync); "
    "gradients of replicas are views of buckets, as with DistributedDataParallel's gradient_as_bucket_view; under "
    "autocast, F.cross_entropy of 16-bit logits takes 10 bytes of each (tests/benchmarks/memory_gpu.py); AdamW "
    "with fused=True, while its default on CUDA, foreach, takes about another float32 copy of a rank's weights in the "
    "update (torch/optim/optimizer.py)",
    casts=True,
    whole_in_pipelines=True,
    keeps_outputs=True,
    gated_tensors=4,
    logits_bytes=14,
    logits_later=4,
    float32_logits=(12, 4),
    autocast_logits=(10, 2),
    every_other_product=True,
    stops_early=True,
    keeps_replicas_gradients=True,
    gathers_units=True,
)
TORCHTITAN = FSDP2._replace(
    name="torchtitan of 2025",
    source=f"{FSDP2.source}; components/loss.py: the loss is compiled with the model, which keeps 16-bit logits and "
    "writes 16-bit gradients",
    logits_bytes=4,
    logits_later=2,
    float32_logits=(8, 4),
    gathers_units=False,
)
TORCHTITAN_2024 = FSDP2._replace(
    name="torchtitan of 2024",
    source=f"{FSDP2.source}; but the peaks that were published for its pipelines are predicted with an error of 4.9 % "
    "with what keeps_outputs adds, and of 3.9 % without, for an unknown reason",
    keeps_outputs=False,
)
LIGHTNING = FSDP2._replace(
    name="Lightning",
    source=f"{FSDP2.source}; but DistributedDataParallel has gradient_as_bucket_view off by default; "
    "loops/optimization/automatic.py: Closure.closure zeroes the gradients of the last step "
    "after the forward pass of the next one",
    keeps_gradients_from=0,
    keeps_replicas_gradients=False,
    gathers_units=False,
    copies_to_reduce=True,
    autocast_logits=None,
)
LLM_FOUNDRY = FSDP2._replace(
    name="LLM Foundry",
    source="FSDP much as in FSDP2; models/mpt/modeling_mpt.py: loss_fn is fused_crossentropy by default, whose kernel "
    "reads 16-bit logits and writes 16-bit gradients",
    logits_bytes=4,
    logits_later=2,
    gathers_units=False,
    float32_logits=(8, 4),
)
NEMO = MEGATRON_CORE._replace(
    name="NeMo",
    source="Megatron-Core; recipes of NVIDIA/dgxc-benchmarking v24.11.1 and v25.02: grad_sync_dtype is bf16, and "
    "fp8_params is on with fp8; megatron_base_model.py: store_param_remainders with bf16; "
    "TransformerEngine before 2.3, which keeps no placeholder gradients",
    main_gradients=False,
    reused_gradient=False,
    remainders=True,
    fp8_weights=True,
)
MEGATRON_BRIDGE = MEGATRON_CORE._replace(
    name="Megatron Bridge",
    source="Megatron-Core; training/mixed_precision.py: fp8_param_gather is on with fp8, and grad_reduce_in_fp32 with "
    "bf16",
    fp8_weights=True,
)
DEEPSPEED = Framework(
    "DeepSpeed",
    "runtime/zero/stage_1_and_2.py and stage3.py: gradients in 2 bytes; parameters gathered by module, of which "
    "stage3_max_live_parameters (1e9) stay for reuse and stage3_prefetch_bucket_size (5e7) are prefetched; a buffer of "
    "reduce_bucket_size (5e8), allocated once in stage 3; flat gradients of a shard in 16 and 32 bits in the update; "
    "transformers' loss/loss_utils.py computes the loss of logits.float(), as in FSDP2",
    keeps_gradients_from=3,
    gated_tensors=4,
    logits_bytes=14,
    float32_logits=(12, 0),
    float32_update=True,
    live_elements=1e9 + 5e7,
    bucket_elements=5e8,
    keeps_buckets=True,
    reserved=1.094,
)
DEEPSPEED_2021 = DEEPSPEED._replace(
    name="DeepSpeed before 0.5.9",
    source="runtime/zero/stage3.py of 0.3.12 to 0.5.8: as today, but each backward pass allocates two buffers of "
    "reduce_bucket_size, because overlap_comm is on in stage 3 but not in others (zero/constants.py), and frees them; "
    "models of Megatron-LM, which have dropout by default and a cross entropy in float32",
    dropout=True,
    logits_bytes=10,
    float32_logits=None,
    buckets=2,
    keeps_buckets=False,
)
MEGATRON_DEEPSPEED = Framework(
    "Megatron-DeepSpeed",
    "bigscience-workshop/Megatron-DeepSpeed with DeepSpeed's pipelines: dropout by default; cross entropy clones "
    "float32 logits (mpu/cross_entropy.py); gradients in 2 bytes, and in fp16 also flat and in float32 in the update "
    "(fp16/fused_optimizer.py, zero/stage_1_and_2.py); bf16_optimizer.py accumulates in float32 too, unsharded; "
    "pipe/engine.py keeps outputs in pipe_buffers until their backward pass (pipe_partitioned)",
    dropout=True,
    gated_tensors=4,
    keeps_outputs=True,
    shards_outputs=True,
    accumulators=True,
    float32_update=True,
    reserved=1.167,
    message_bytes=2.17 * 2**30,
)
SCALING = Framework(
    "Scaling",
    "Aleph-Alpha/scaling@737f855: ColumnParallelLinear of lm_head.py gathers the logits of all tensor ranks; "
    "losses/cross_entropy.py takes them in float32, and PIPELINE_STAGE_OUTPUT of parallel_module.py keeps those of two "
    "micro-batches in 16 bits; optimizer/parameter_group.py frees 16-bit gradients after the update; attention.py "
    "rearranges the output of FlashAttention; silu and product are two operations in mlp.py",
    gated_tensors=4,
    logits_bytes=16,
    logits_later=4,
    whole_logits=True,
    attention_copies=1,
    keeps_outputs=True,
    float32_update=True,
)
PAPER = Framework(
    "ZeRO paper",
    "Rajbhandari et al. 2020 (arXiv 1910.02054), section 3: model states only, without workspace",
    keeps_gradients_from=0,
    gated_tensors=4,
    logits_bytes=4,
    has_workspaces=False,
    reserved=1.0,
)
FRAMEWORKS: MappingProxyType[str, Framework] = MappingProxyType(
    {
        "megatron-core": MEGATRON_CORE,
        "megatron-2022": MEGATRON_2022,
        "nemo": NEMO,
        "megatron-bridge": MEGATRON_BRIDGE,
        "megatron-deepspeed": MEGATRON_DEEPSPEED,
        "fsdp2": FSDP2,
        "torchtitan": TORCHTITAN,
        "torchtitan-2024": TORCHTITAN_2024,
        "lightning": LIGHTNING,
        "llm-foundry": LLM_FOUNDRY,
        "deepspeed": DEEPSPEED,
        "deepspeed-0.5": DEEPSPEED_2021,
        "scaling": SCALING,
        "paper": PAPER,
    }
)
"""How each framework keeps model states and activations, by name."""
