"""Mutated jobs, spaces, layouts, Hugging Face configs and JSON texts: each makes a value or ends in one sentence.

    python tests/campaigns/specs.py                         16,000 of them
    python tests/campaigns/specs.py --first 0 --count 500

A violation is any error that is not a `ShardscopeError`, one that is longer than a screen, whatever takes longer than
five seconds, and a job that JSON does not give back as it was.
"""

from __future__ import annotations

import json
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _campaign import Outcome, run
from _nasty import IN_JSON, IN_PYTHON, mutated

import shardscope as ss
from shardscope.errors import ShardscopeError
from shardscope.spec import Compression, Optimizer, registry
from shardscope.spec.space import Space
from shardscope.spec.strategy import strategies

CASES = 16_000
LIMIT_S = 5
LONGEST = 4_000
"""Characters of a message: lists of valid names are long, quoted values are not."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 500000.0,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 1024, "vocab_size": 50257, "activation_function": "gelu_new",
}  # fmt: skip
SPACE = {
    "optimizer": ["adamw", "lamb"],
    "optimizer[adamw].lr": (1e-4, 1e-2, "log"),
    "batch": (32, 256, "log2"),
    "compression": ["none", "topk"],
    "compression[topk].ratio": (0.001, 0.1, "log"),
    "warmup": (0.0, 0.3),
}


def _job(source: random.Random) -> dict[str, Any]:
    kind = source.choice(list(strategies()))
    return {
        "model": source.choice(("mlp", "gpt-nano", "cnn")), "data": source.choice(("digits", "python-source", "a.txt")),
        "strategy": source.choice((kind, {"name": kind})), "world_size": source.choice((1, 2, 4)),
        "optimizer": source.choice(("sgd", {"name": source.choice(registry.names(Optimizer)), "lr": 0.1})),
        "lr_schedule": source.choice(("cosine", {"name": "polynomial", "warmup_steps": 3, "power": 2.0})),
        "batch": source.choice((64, {"global_batch": 64, "micro_batch": 8})), "steps": 10, "clip_norm": 1.0, "seed": 1,
        "compression": source.choice(("none", {"name": source.choice(registry.names(Compression))})), "eval_every": 5,
        "checkpoint": {"every": 3, "keep": 2}, "record": {"spans_first": 3, "noise_every": 1}, "timeout_s": 60.0,
        "link": source.choice((None, {"bandwidth": "1 Gbit/s", "latency": "1 ms"})), "name": "a name", "until": 5,
    }  # fmt: skip


def _describe_job(source: random.Random) -> object:
    fields = mutated(source, _job(source), times=source.randint(1, 3), values=IN_JSON + IN_PYTHON)
    return _returned(ss.Job.from_fields(fields))


def _returned(job: ss.Job) -> ss.Job:
    """The same job, having been to JSON and back."""
    assert job.user_code or ss.Job.from_json(job.to_json()) == job, f"JSON gives back another job: {job!r}"
    return job


def _read_json(source: random.Random) -> object:
    text = json.dumps(mutated(source, _job(source), times=source.randint(1, 3), values=IN_JSON))
    if source.random() < 0.3:
        start = source.randrange(len(text))
        text = text[:start] + source.choice(("", "}", '"', "\x00", "[" * 5000, text)) + text[start + 1 :]
    if source.random() < 0.1:
        text = source.choice(
            ("null", "[]", '""', "1", "{}", "", " ", "NaN", "[[]]", "[" * 100_000, '{"model": 1e999}')
        )
    return _returned(ss.Job.from_json(text))


def _describe_space(source: random.Random) -> object:
    fields = mutated(source, SPACE, times=source.randint(1, 3), values=IN_JSON + IN_PYTHON)
    return Space(fields)


def _describe_layout(source: random.Random) -> object:
    fields = {
        "data": 4,
        "tensor": 2,
        "pipeline": 2,
        "zero": 1,
        "global_batch": 64,
        "micro_batch": 2,
        "context": 1,
    }
    layout = ss.Layout.from_fields(mutated(source, fields, times=2, values=IN_JSON + IN_PYTHON))
    return ss.predict(ss.Model.of("gpt2-xl"), ss.Cluster.of("a100-80gb", nodes=4), layout)


def _read_config(source: random.Random) -> object:
    fields = mutated(source, source.choice((LLAMA, GPT2)), times=source.randint(1, 3), values=IN_JSON)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(fields), encoding="utf-8")
        return ss.Model.from_hf(path)


KINDS: dict[Callable[[random.Random], object], int] = {
    _describe_job: 6, _read_json: 4, _describe_space: 3, _describe_layout: 1, _read_config: 2,
}  # fmt: skip
"""With how many of sixteen cases are of each."""


def case(number: int, source: random.Random) -> Outcome:
    """One description, made or refused."""
    kinds = [kind for kind, share in KINDS.items() for _ in range(share)]
    kind = kinds[number % len(kinds)]
    name = kind.__name__.removeprefix("_").replace("_", " ")
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LIMIT_S)
    try:
        kind(source)
    except ShardscopeError as error:
        text = str(error)
        return Outcome(f"{name}: refused", violation=len(text) > LONGEST, details={"error": text[:300]})
    finally:
        signal.alarm(0)
    return Outcome(f"{name}: accepted")


def _too_long(signum: int, frame: object) -> None:
    raise TimeoutError(f"longer than {LIMIT_S} s")


if __name__ == "__main__":
    run(case, cases=CASES, description=__doc__)
