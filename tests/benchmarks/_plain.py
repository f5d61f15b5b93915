"""The planner's formulas as a plain Python loop writes them: scalars and `math`, one layout at a time.

For a dense decoder with fused attention in bf16 with AdamW and without compression, as Megatron-Core keeps it: what the
benchmark scores. It is written as one would by hand: constants once, everything else for each layout. `planner.py`
checks that it gives the numbers of `analytic.memory` and `prediction.step`.
"""

from __future__ import annotations

from math import ceil, floor, log2
from typing import NamedTuple

from shardscope.planner.setting import SearchSettings
from shardscope.spec.layout import schedule_names

V_SHAPED = {"zbv", "v-half", "v-min", "dualpipev"}
STATE_BYTES, GRADIENT_BYTES, WEIGHT_BYTES, MAIN_GRADIENT_BYTES = 12, 2, 2, 4
UPDATE_BYTES = WEIGHT_BYTES + GRADIENT_BYTES + 2 * STATE_BYTES
WORKSPACE = 2 * (8 + 1 / 8) * 2**20


class Row(NamedTuple):
    """One layout."""

    data: int
    tensor: int
    pipeline: int
    context: int
    zero: int
    shard: int
    micro_batch: int
    count: int
    virtual: int
    schedule: str
    recompute: int
    offload: int
    sequence: int


def rows_of(layouts):
    """Every row of a table."""
    columns = (
        layouts.data, layouts.tensor, layouts.pipeline, layouts.context, layouts.zero, layouts.shard,
        layouts.micro_batch, layouts.num_micro_batches, layouts.virtual_stages, layouts.schedule, layouts.recompute,
        layouts.offload, layouts.sequence_parallel,
    )  # fmt: skip
    rows = (Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True))
    return [row._replace(schedule=schedule_names()[row.schedule]) for row in rows]


class Plain:
    """One setting's constants, and the two formulas."""

    def __init__(self, setting: SearchSettings) -> None:
        model, cluster, cal = setting
        device = cluster.device
        self.cal, self.nodes, self.per_node = cal, cluster.nodes, cluster.per_node
        self.L, self.h, self.V, self.s = model.layers, model.hidden, model.vocab, model.seq
        self.heads, self.width, self.ffn, self.tied = (
            model.heads,
            model.heads * model.head_size,
            model.ffn,
            model.tied,
        )
        self.qkv = (model.heads + 2 * model.kv_heads) * model.head_size
        self.keys = 2 * model.kv_heads * model.head_size
        self.head_size = model.head_size
        self.attention = self.h * (self.qkv + self.width)
        self.layer = self.attention + 2 * self.h * self.ffn
        self.vectors = model.layer_params - self.layer
        self.table = self.V * self.h
        self.before = model.embedding_params - self.table
        self.behind = model.final_norm_params + model.head_params - (0 if model.tied else self.table)
        shapes = {(self.h, self.qkv), (self.width, self.h), (self.h, self.ffn), (self.ffn, self.h)}
        self.placeholders = 2 * sum(rows * columns for rows, columns in shapes)
        self.near, self.far = cluster.intra.bandwidth, cluster.inter.bandwidth
        self.near_s, self.far_s = cluster.intra.latency_s, cluster.inter.latency_s
        self.host_link = device.host_bandwidth
        self.drives = cluster.nvme_bandwidth / cluster.per_node
        self.host = cluster.host_memory_bytes / cluster.per_node
        self.matmul = device.peak_flops["bf16"] * cal.matmul_efficiency
        self.fused = device.peak_flops["bf16"] * cal.attention_efficiency
        self.stream = device.memory_bandwidth * cal.memory_efficiency
        self.update = device.memory_bandwidth * cal.optimizer_efficiency

    def memory(self, row: Row) -> tuple[float, float]:
        """Bytes on the fullest device, and of what is offloaded the share on drives."""
        t, p, zero, ranks = row.tensor, row.pipeline, row.zero, row.shard
        tokens = row.micro_batch * self.s / row.context
        divided = t if row.sequence else 1
        hidden = 2 * self.h * tokens / divided
        outside = 4 * hidden + tokens * (2 * (self.qkv + self.width) + 4 * self.ffn) / t
        core = tokens * 4 * self.heads / t
        if row.context > 1:
            core += (2 * self.width + 4 * self.heads) * tokens / t
        kept = hidden if row.recompute == 2 else outside + core
        in_layer = 2 * tokens * self.ffn / t + hidden + outside + core - kept
        at_loss = 2 * self.V * tokens / t + 3 * hidden + (4 * self.h * tokens if divided > 1 else 0)
        folded = row.schedule in V_SHAPED
        head_at = 0 if folded else p - 1
        own, rest = self.L // p, self.L % p
        states_away, saved_away, update_away = (
            row.offload in {2, 4},
            row.offload >= 3,
            row.offload in {1, 2, 4},
        )
        places = [0, p - 1]
        if rest and row.schedule in {"zbv", "v-half", "v-min"}:
            places.append(rest - 1)
        most = host = nvme = 0.0
        for place in places:
            layers = own + (place < rest)
            first, last = place == 0, place == head_at
            aside = first * self.table + (last and not (self.tied and first)) * self.table
            whole = layers * self.vectors + first * self.before + last * self.behind
            count = layers * self.layer / t + aside / t + whole
            weights = WEIGHT_BYTES * count / (ranks if zero >= 3 else 1)
            gradients = MAIN_GRADIENT_BYTES * count / (ranks if zero >= 2 else 1)
            optimizer = STATE_BYTES * count / (ranks if zero >= 1 else 1)
            flying = self._in_flight(row, place)
            saved = layers * kept * flying
            one = self.layer / t + self.vectors
            words = self.table / t if first or last else 0
            share = 1 - 1 / ranks
            gathered = min(max(one, words) + one, count) * (1 if states_away else share if zero >= 3 else 0)
            bucket = min(max(one, words), count) * (1 if states_away else share if zero >= 2 else 0)
            buffers = (
                max(at_loss if last else 0, in_layer + GRADIENT_BYTES * bucket) + WEIGHT_BYTES * gathered
            )
            buffers += (self.placeholders + last * 2 * self.table) / t + WORKSPACE
            stays = layers * kept * min(2 / layers, flying)
            away = 0.0
            if update_away:
                away, optimizer = optimizer, 0.0
            if states_away:
                away, weights, gradients = away + weights + gradients, 0.0, 0.0
            if saved_away:
                away, saved = away + saved - stays, stays
            most = max(most, weights + gradients + optimizer + saved + buffers)
            host, nvme = max(host, min(away, self.host)), max(nvme, away - min(away, self.host))
        return most, nvme / max(host + nvme, 1.0)

    def _in_flight(self, row: Row, place: int) -> float:
        p, m, v, name = row.pipeline, row.count, row.virtual, row.schedule
        left = p - place
        if name in {"interleaved", "zero-bubble"} and v > 1:
            held = ((v - 1) * p + (2 * left - 1 if name == "interleaved" else p)) / v
        elif name == "gpipe":
            held = m
        elif name in {"1f1b", "interleaved"}:
            held = left
        elif name == "zb-h2":
            held = 2 * p - 1
        elif name == "dualpipev":
            held = p + 0.5
        elif name in {"zbv", "v-half", "v-min"}:
            held = p if name == "zbv" else p / 2 + 1 if name == "v-half" else (p + 4) / 3
            held = floor(held + 1e-9) - (name == "v-min" and p % 3 == 2 and place % 3 == 0)
            held = min(held, (m + place + 1) / 2)
        else:
            held = p
        return min(held, m) if p > 1 else 1

    def _ring(self, passes: int, size: float, group: float, stride: float) -> float:
        """Seconds of a ring, with its start."""
        if group <= 1:
            return 0.0
        cal = self.cal
        rate, latency = self.near * cal.intra_efficiency, self.near_s
        if not self._is_in_node(group, stride):
            members = min(max(floor(self.per_node / stride), 1), group)
            rate, latency = min(rate, members * self.far * cal.inter_efficiency), max(self.near_s, self.far_s)
        return passes * (latency * ceil(log2(group)) + size * (group - 1) / group / rate) + cal.collective_s

    def _is_in_node(self, group: float, stride: float) -> bool:
        groups = self.per_node / (group * stride)
        return self.nodes == 1 or group == 1 or groups == floor(groups)

    def _product(self, m: float, n: float, k: float) -> float:
        return 2 * m * n * k / self.matmul * (1 + self.cal.half_size * (1 / m + 1 / n + 1 / k))

    def _soft(self, busy: float, host: float) -> float:
        return (busy**3 + host**3) ** (1 / 3)

    def time(self, row: Row, drive_share: float) -> float:
        """Seconds of a step."""
        cal, t, p, c, zero, m = self.cal, row.tensor, row.pipeline, row.context, row.zero, row.count
        layers = ceil(self.L / p)
        tokens = row.micro_batch * self.s / c
        divided = t if row.sequence else 1
        h = self.h
        products = self._product(tokens, self.qkv / t, h) + self._product(tokens, h, self.width / t)
        products += self._product(tokens, self.ffn / t, h) + self._product(tokens, h, self.ffn / t)
        moved = tokens * (22 * h / divided + 4 * self.qkv / t + 4 * self.ffn / t) / self.stream
        scores = 2 * 2 * (self.s / c) * self.s * self.head_size * row.micro_batch * self.heads / t
        core = scores / 2 / self.fused * (1 + cal.attention_half_seq / self.s)
        output = tokens * h * 2
        tensor = 2 * self._ring(2, output, t, 1)
        context = self._ring(1, tokens * c * self.keys / t * 2, c, t)
        launch = cal.launch_s * (1 + cal.launch_jitter * (t - 1))
        started = 4 if t > 1 else 0
        there, back = products + core + moved, 2 * (products + moved) + 2.5 * core
        hidden = cal.message_overlap * tensor
        forward = there + tensor - min(hidden, there) + context
        exposed = cal.exposed_launch * cal.launch_s if t > 1 else 0.0
        forward = self._soft(forward + (30 + started) * exposed, (30 + started) * launch)
        back = back + tensor - min(hidden, back) + 2 * context
        back = self._soft(back + (60 + started) * exposed, (60 + started) * launch)
        again = forward if row.recompute == 2 else core if row.recompute == 1 else 0.0
        f, w, b = layers * forward, layers * products, layers * (back + again)

        head_rate = cal.head_efficiency if t == 1 else 1.0
        edge = 3 * self._product(tokens, self.V / t, h) / head_rate + 20 * tokens * self.V / t / self.stream
        edge += 16 * tokens * h / self.stream + tensor

        replicas, ranks = row.data * c, row.shard if zero else 1
        vocabulary = self.V * h * ((1 if self.tied else 2) if p == 1 else 1)
        count = (layers * self.layer + vocabulary) / t
        within = min(ranks, replicas) if zero else replicas
        if zero:
            reduce = self._ring(1, count * GRADIENT_BYTES, within, t)
            between = self._ring(2, count * GRADIENT_BYTES / within, replicas / within, t * within)
            gather = self._ring(1, count * WEIGHT_BYTES, within, t)
            copied = cal.shard_copies / self.stream * count if within > 1 else 0.0
            reduce += copied * GRADIENT_BYTES if zero >= 2 else 0.0
            gather += copied * WEIGHT_BYTES if zero == 3 else 0.0
            if self._is_in_node(within, t) and not self._is_in_node(replicas / within, t * within):
                reduce = max(reduce, between - (gather if zero == 3 else 0.0))
            else:
                reduce += between
        else:
            reduce, gather = self._ring(2, count * GRADIENT_BYTES, replicas, t), 0.0
        if zero == 3 and replicas > 1:
            reduce, gather = reduce + layers * cal.collective_s, gather + layers * cal.collective_s
        own = count / ranks

        out = home = updating = 0.0
        if row.offload:
            states, saving = row.offload in {2, 4}, row.offload >= 3
            drag = drive_share * self.host_link / self.drives if self.drives else 0.0
            weights = (own if zero == 3 else count) * WEIGHT_BYTES / self.host_link if states else 0.0
            gradients = (own if zero >= 2 else count) * GRADIENT_BYTES / self.host_link if states else 0.0
            saved = layers * self._saved(row, tokens, divided) / self.host_link if saving else 0.0
            weights_back = weights * (2 if row.recompute == 2 else 1) + saved
            out = max(saved, weights, drag * (saved + weights))
            home = max(gradients, weights_back, drag * (gradients + weights_back))
            if row.offload != 3:
                updating = own * UPDATE_BYTES / self.host_link * max(1.0, drag)
            if row.offload == 1:
                updating += own * (GRADIENT_BYTES + WEIGHT_BYTES) / self.host_link
        gathered = gather if zero == 3 else 0.0
        reduced = reduce if zero >= 2 else 0.0
        there = f + gathered - min(cal.shard_overlap * gathered, f)
        both = gathered + reduced
        back = b + both - min(cal.shard_overlap * both, b)
        there, back = max(there, out), max(back, home)
        once = (gather if zero != 3 else 0.0) + (reduce if zero < 2 else 0.0)
        once -= min(once * cal.gradient_overlap, back - both)
        spare = (layers - min(max(self.L - (p - 1) * layers, 0), layers)) / layers

        total = m * (there + back + max(edge - (there + back) * spare, 0.0)) + cal.step_s + once
        total += updating if row.offload in {1, 2, 4} else own * UPDATE_BYTES / self.update
        if p > 1:
            total += bubble(row.schedule, p, m, row.virtual, there, back - w, w)
            is_far = self.nodes > 1 and t * c * row.data * p > self.per_node
            hop = (
                output / t / cal.pipeline_efficiency / (self.far if is_far else self.near) + cal.collective_s
            )
            total += 2 * hop * (m * row.virtual + p - 1)
            if self.tied and row.schedule not in V_SHAPED:
                total += self._ring(2, self.table / t * GRADIENT_BYTES, 2, t * replicas * (p - 1))
        return total

    def _saved(self, row: Row, tokens: float, divided: int) -> float:
        if row.recompute == 2:
            return 2 * self.h * tokens / divided
        saved = (
            8 * self.h * tokens / divided + tokens * (2 * (self.qkv + self.width) + 4 * self.ffn) / row.tensor
        )
        saved += tokens * 4 * self.heads / row.tensor
        return saved + (row.context > 1) * (2 * self.width + 4 * self.heads) * tokens / row.tensor


def bubble(name: str, p: int, m: int, virtual: int, f: float, i: float, w: float) -> float:
    """Seconds that the rank that waits most stands idle."""
    v = virtual if name in {"interleaved", "zero-bubble"} else 2 if name in V_SHAPED else 1
    f, i, w, q = f / v, i / v, w / v, p - 1
    if name in {"gpipe", "1f1b", "interleaved"}:
        return q * (f + i + w)
    if name == "zero-bubble":
        return q * (i + max(f - w, 0.0))
    if name == "zb-h1":
        return q * (f + i) - min(q, m - 1) * min(f, w)
    if name == "zb-h2":
        return _zb_h2(q, m, f, i, w)
    if name == "zbv":
        return _zbv(p, m, f, i, w)
    if name == "dualpipev":
        return max(
            q * f, 2 * q * i - q * w - f, q * (f + i - w), q * i - f, 2 * q * (f - w), q * (2 * f - i - w)
        )
    return _v_half(p, m, f, i, w) if name == "v-half" else _v_min(p, m, f, i, w)


def _zb_h2(q: int, m: int, f: float, i: float, w: float) -> float:
    late = min(2 * q, m - 1)
    half = late // 2
    return max(
        q * (f + i) - late * w,
        (q - late) * f + q * i,
        (q - late + half) * f + (q - half) * i,
        (q - half) * (f + i) - (late - 2 * half) * w,
    )


def _zbv(p: int, m: int, f: float, i: float, w: float) -> float:
    q = p - 1
    if m < 2 * p - 1:
        return max(2 * max(q - m + 1, 0) * f + 2 * q * i - 2 * max(m - p, 0) * w, (2 * q - m + 1) * (f + i))
    return max(
        0.0,
        2 * q * (i - w),
        q * (i - f),
        i - q * f + (q - 1) * w,
        (q - 1) * abs(w - f),
        q * (2 * f - i - w),
        (q - 1) * (f - i),
        (2 * q - 1) * f + i - 2 * q * w,
    )


def _v_half(p: int, m: int, f: float, i: float, w: float) -> float:
    odd, ramp = p % 2, p - 1
    if m < p // 2 + 1:
        return 2 * ramp * (f + i) - (1 + 2 * max(m - 2 + odd, 0)) * w
    if p == 2:
        return max(
            3 * (f + i - w),
            3 * f + i - w,
            f + 4 * i - 3 * w,
            2 * f,
            (7 - 2 * m) * f + (2 * m - 1) * (i - w),
            (5 - 2 * m) * f + 2 * m * i - (2 * m - 1) * w,
            2 * m * f - (2 * m - 3) * i - (m - 1) * w,
        )
    wide, even = ramp + 2 * (1 - odd), 1 - odd
    last = 2 * m - 1 if p == 3 else m + (p + 2 - odd) / 2
    return max(
        wide * f + 3 * ramp * i - (p + even) * w,
        wide * f + (2 * p - 3 + odd) * i - w,
        (wide + 1) * f + (2 * p - 5 + odd) * i,
        (2 * m + p - 2) * f - (2 * m - 2 * p + 1 + odd) * i,
        (2 * m + 2 * p - 4) * f - (2 * m - 2 * p + 1 + odd) * i - (p - 2) * w,
        (2 * m + 2 * p - 4) * f - (2 * m - 2 * p - 1 + odd) * i - p * w,
        (2 * m + 2 * p - 5 + odd) * f - (2 * m - 2 * p - 3 + 3 * odd) * i - (p + even) * w,
        (2 * p + 3 * even - 2 * m) * f + (2 * m + 2 * p - 5 + odd) * i - last * w,
    )


def _v_min(p: int, m: int, f: float, i: float, w: float) -> float:
    if m == 1:
        return 2 * (p - 1) * (f + i) - w
    late = (2 * m - 1) * w
    if p == 2:
        return max(
            3 * f, (3 - m) * f + 2 * m * i - m * w, 2 * m * f + (3 - m) * i - m * w, (m + 1) * (f + i) - late
        )
    k, small, large = p // 3, 2 * p - 2 * m, 2 * p - 6 + 4 * m
    if p % 3 == 0:
        return max(
            (8 * k - 1) * f + (5 * k - 1) * i - (k + 1) * w,
            (5 * k + 2) * f + (8 * k - 4) * i - (k + 1) * w,
            (small + 1) * f + large * i - late,
            (small + 4) * f + (large - 2) * i - late,
            (large - 2) * f + (small + 4) * i - late,
        )
    one = p % 3 == 1
    put_off = (k + 1 if one else 2 * k) * w
    return max(
        (8 * k if one else 10 * k + 1) * f + (5 * k if one else 4 * k + 2) * i - put_off,
        (5 * k if one else 4 * k + 3) * f + (8 * k if one else 10 * k) * i - put_off,
        small * f + large * i - late,
        large * f + small * i - late,
    )
