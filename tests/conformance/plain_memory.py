"""The memory of a dense transformer in plain Python, stage by stage: the oracle of the tables, and what they are timed
against. Written from the papers and from what Megatron-Core keeps, not from the tables' code.
"""

from __future__ import annotations

from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

IN_FLIGHT = {
    "gpipe": lambda p, left, m, v: m,
    "1f1b": lambda p, left, m, v: left,
    "interleaved": lambda p, left, m, v: ((v - 1) * p + 2 * left - 1) / v if v > 1 else left,
    "zb-h1": lambda p, left, m, v: p,
    "zb-h2": lambda p, left, m, v: 2 * p - 1,
    "zbv": lambda p, left, m, v: min(p, (m + p - left + 1) / 2),
    "v-half": lambda p, left, m, v: min(p // 2 + 1, (m + p - left + 1) / 2),
    "v-min": lambda p, left, m, v: min(
        (p + 4) // 3 - (p % 3 == 2 and (p - left) % 3 == 0), (m + p - left + 1) / 2
    ),
    "dualpipev": lambda p, left, m, v: p + 0.5,
}
FOLDED = ("zbv", "v-half", "v-min", "dualpipev")


def plain_stage_memory(model: Transformer, layout: Layout, stage: int) -> float:
    """Bytes on a rank of that stage under Megatron-Core, bf16-mixed AdamW, without offloading."""
    p, t, c = layout.pipeline, layout.tensor, layout.context
    layers = model.layers // p + (stage < model.layers % p)
    is_first = stage == 0
    is_last = stage == (0 if layout.schedule in FOLDED else p - 1)
    shards = layout.shard or layout.data * c
    params, layer, table, matrices = _params(model, layout, layers, is_first, is_last)
    held = params * (2 / (shards if layout.zero >= 3 else 1))
    held += params * (4 / (shards if layout.zero >= 2 else 1))
    held += params * (12 / (shards if layout.zero >= 1 else 1))
    vocabulary = table if is_first or is_last else 0
    bucket = 2 * min(max(layer, vocabulary), params) * (1 - 1 / shards) if layout.zero >= 2 else 0.0
    if layout.zero >= 3:
        held += 2 * min(max(layer, vocabulary) + layer, params) * (1 - 1 / shards)
    held += 2 * matrices / t + (2 * table if is_last else 0) + 64 * 2**20
    m = layout.num_micro_batches
    flight = min(m, IN_FLIGHT[layout.schedule](p, p - stage, m, layout.virtual_stages)) if p > 1 else 1
    tokens = layout.micro_batch * model.seq / c
    sp = t if layout.sequence_parallel else 1
    kept, again = _saved(model, layout, tokens, sp)
    working = 2 * tokens * ((2 if model.gated else 1) * model.ffn / t + model.hidden / sp)
    if not layout.flash_attention:
        working = max(working, 4 * model.heads * tokens * model.seq / c / t)
    working += again + bucket  # no gradients are reduced at the loss
    if is_last:
        hidden = 2 * tokens * model.hidden
        working = max(working, 2 * tokens * model.vocab / t + 3 * hidden / sp + (2 * hidden if sp > 1 else 0))
    return held + kept * layers * flight + working


def _params(
    model: Transformer, layout: Layout, layers: int, is_first: bool, is_last: bool
) -> tuple[float, float, float, float]:
    t, h = layout.tensor, model.hidden
    attention = h * model.head_size * (2 * model.heads + 2 * model.kv_heads)
    ffn = (3 if model.gated else 2) * h * model.ffn
    small = model.layer_params - attention - ffn
    layer, table = (attention + ffn) / t + small, model.vocab * h / t
    params = layers * layer
    if is_first:
        params += table + model.embedding_params - model.vocab * h
    if is_last:
        params += model.final_norm_params
        if not (model.tied and is_first):
            params += table
    return params, layer, table, attention + ffn


def _saved(model: Transformer, layout: Layout, tokens: float, sp: int) -> tuple[float, float]:
    t, h, a, d = layout.tensor, model.hidden, model.heads, model.head_size
    span = model.seq / layout.context
    whole = 8 * h / sp
    divided = (2 * d * (2 * a + 2 * model.kv_heads) + (6 if model.gated else 4) * model.ffn) / t
    core = (4 * a if layout.flash_attention else 2 * a * span) / t
    if layout.context > 1:
        core += (2 * a * d + (4 * a if layout.flash_attention else 0)) / t
    all_of_it = tokens * (whole + divided + core)
    kept = all_of_it
    if layout.recompute == "full":
        kept = tokens * 2 * h / sp
    elif layout.recompute == "selective" and not layout.flash_attention:
        kept = tokens * (whole + divided)
    return kept, all_of_it - kept
