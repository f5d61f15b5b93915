"""Published speeds of fused attention kernels, as fractions of the device's peak in 16-bit matrix products.

Each speed is for both passes together, on long causal sequences with 128 elements per head. A cluster's own
`attention_efficiency` is expected to differ little from it. Kernels differ more than clusters: on Hopper, a kernel
written for Ampere leaves two thirds of the peak unused.

- FlashAttention on A100: 25 to 40 %; FlashAttention-2: 50 to 73 % forward, up to 63 % backward (Dao 2023, arXiv
  2307.08691, abstract and section 3).
- On H100: FlashAttention-2 reaches 335 of 989 TFLOP/s forward with 16,384 tokens, and cuDNN 9 reaches 539 (Shah et
  al. 2024, arXiv 2407.08608, figure 5), both slightly less backward. FlashAttention-2 is about twice as fast as
  FlashAttention.
- No source gives cuDNN's speed on A100, so the speed of FlashAttention-2 is used instead.

Which kernel runs depends on releases, not only on the software. PyTorch's `scaled_dot_product_attention` uses
FlashAttention-2, and on Hopper cuDNN's kernel since 2.11, whose cuDNN is newer than 9.15; of earlier releases, 2.5.0
did, too (pytorch/pytorch#138522; huggingface/transformers#48163). `fsdp2` and `torchtitan` both call it, but `fsdp2` is
expected at the speed of cuDNN's kernel on Hopper; `fsdp2-2.10`, which represents earlier releases, and `torchtitan` at
that of FlashAttention-2, with which their steps were measured. The predicted attention of `torchtitan` with PyTorch
2.11 is therefore too slow on Hopper, by a factor of up to 1.9. Calibrating with measured steps corrects it.
"""

from __future__ import annotations

from collections.abc import Mapping

KERNELS: Mapping[str, Mapping[str, float]] = {
    "flash-1": {"a100": 0.32, "h100": 0.17},
    "flash-2": {"a100": 0.57, "h100": 0.34},
    "cudnn": {"a100": 0.57, "h100": 0.52},
}
"""Kernels, and their speeds by architecture (see `calibration.effects`): the original FlashAttention, which
Triton's kernel of that time matches; FlashAttention-2, which is PyTorch's own kernel; and cuDNN's kernel, which
Transformer Engine uses, and on Hopper also PyTorch since 2.11."""
