"""Names that other libraries use for methods, and the names of the equivalent methods in Shardscope."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from re import findall

_POPULATION = "for population-based training, use ss.train_population"
ALIASES: Mapping[str, Mapping[str, str]] = {
    "sampler": {
        "'tpe', or 'gp' if trials are expensive": "bayes bayesian bo bayesopt bayesian-optimization",
        "'tpe'": "parzen hyperopt", "'gp'": "gaussian gaussian-process gpr kriging",
        "'nsga'": "genetic evolution evolutionary ga nsga2 nsgaii nsga-ii nsga-2",
        "'qmc'": "sobol halton quasi-random grid lhs latin-hypercube", "'random'": "uniform",
        _POPULATION: "pbt population",
    },
    "pruner": {
        "'successive-halving', or promote=3 to resume from checkpoints": "asha sha halving",
        "'dominance'": "pareto", "'none'": "off no nop false", _POPULATION: "pbt population",
    },
    "optimizer": {
        "'adamw'": "adam", "'sgd' with momentum=0.9": "momentum sgdm sgd-momentum msgd", "'nesterov'": "nag",
        "": "rmsprop adagrad adadelta adafactor lion muon shampoo sophia",
    },
    "strategy": {
        "'all-reduce' (torch's DistributedDataParallel) or 'ring' (Shardscope's own)":
            "ddp dp data-parallel distributed-data-parallel horovod nccl",
        "'zero-3'": "fsdp fsdp2 fully-sharded", "'zero-1', 'zero-2' or 'zero-3'": "zero deepspeed sharded hsdp",
        "'parameter-server'": "ps server param-server", "'parameter-server:async'": "async asynchronous hogwild",
        "'pipeline', such as 'pipeline:1f1b'": "pp gpipe 1f1b pipedream zbv dualpipe dualpipev model-parallel",
        "compression='local-sgd'": "local-sgd localsgd diloco fedavg", "'gossip'": "decentralized d-psgd dpsgd",
        "'single'": "none serial local",
        "tensor parallelism is available in ss.plan and ss.predict, but not in runs": "tp tensor-parallel megatron",
        _POPULATION: "pbt population",
    },
    "compression": {
        "'fp16' or 'bf16'": "half float16", "'int8'": "8bit 8-bit", "'int4'": "4bit 4-bit",
        "'sign', 'onebit-adam' or 'onebit-lamb'": "1bit 1-bit onebit one-bit", "'onebit-lamb'": "1bit-lamb 1-bit-lamb",
        "'sign', a method with error feedback": "signsgd ef-signsgd efsgd ef-sgd", "'sign-vote'": "majority-vote",
        "'int8', 'int4' or 'qsgd'": "quantize quantization quantized",
        "'topk' or 'randomk'": "sparse sparsify sparsification",
        "'powersgd'": "low-rank lowrank", "'dgc'": "deep-gradient-compression", "'none'": "off no false",
    },
    "precision": {
        "'bf16-mixed' or 'fp16-mixed'": "half amp mixed mixed-precision", "'fp16-mixed'": "float16",
        "'bf16-mixed'": "bfloat16",
        "'fp32'": "float32 full single", "'fp64'": "float64 double",
    },
    "objective": {
        "'error', the fraction of wrong predictions": "accuracy acc",
        "'seconds'": "time speed duration latency throughput",
        "'bytes'": "traffic communication network bandwidth", "'memory'": "ram vram", "": "energy power joules",
    },
}  # fmt: skip
"""Hints by field: a mapping from the text of a hint to the names, separated by spaces, for which it is shown.

The text is empty for names without an equivalent in Shardscope.
"""


def meant(field: str, value: str, valid: Collection[str]) -> str | None:
    """Return the hint for a method name from another library.

    Return None if there is no hint for this name, or if `valid` contains none of the methods that the hint suggests.
    """
    asked = value.lower().replace("_", "-").replace(" ", "-")
    hint = next((hint for hint, names in ALIASES.get(field, {}).items() if asked in names.split()), None)
    if hint is None or not hint.startswith("'"):
        return hint
    names = findall(r"'([\w:-]+)'", hint)
    there = [name for name in names if name.partition(":")[0] in valid]
    return hint if there == names else " or ".join(map(repr, there)) or None
