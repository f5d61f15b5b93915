"""Every error a user can cause, under one base.

Each message is one sentence that names the field, quotes the value that was given and says what to do instead.
Broken invariants of Shardscope itself are `assert`s, never one of these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from re import findall


class ShardscopeError(ValueError):
    """Base of all errors that the user can mend."""


class SpecError(ShardscopeError):
    """The job as described cannot exist; raised before any process starts."""


class DataError(ShardscopeError):
    """The data named by the job is missing, unreadable or of the wrong shape."""


class LaunchError(ShardscopeError):
    """The ranks could not be started."""


class RunNotFound(ShardscopeError):
    """No run directory with this name or path."""


class CheckpointError(ShardscopeError):
    """A checkpoint is missing, damaged or belongs to another model."""


class StudyError(ShardscopeError):
    """A study cannot be begun or gone on with: its storage is away, or it is about something else."""


class RunFailed(ShardscopeError):
    """A rank failed: says which, at which step, under which strategy, and carries its traceback.

    Attributes:
        rank: The rank that failed first, or None when the failure was outside the ranks (the agent).
        step: The step it was on, 1-based; 0 before the first; None if unknown.
        strategy: Name of the strategy, for example ``"ring"``.
        traceback: The rank's own traceback, as text; empty if it left none.
    """

    def __init__(
        self, message: str, *, rank: int | None, step: int | None, strategy: str | None, traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.strategy = strategy
        self.traceback = traceback

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n\n{self.traceback.rstrip()}" if self.traceback else message


_ELSEWHERE = "members that change their settings while they train are ss.train_population"
_MEANT: Mapping[str, Mapping[str, str]] = {
    "sampler": {
        "'tpe', or 'gp' where trials are dear": "bayes bayesian bo bayesopt bayesian-optimization",
        "'tpe'": "parzen hyperopt", "'gp'": "gaussian gaussian-process gpr kriging",
        "'nsga'": "genetic evolution evolutionary ga nsga2 nsgaii nsga-ii nsga-2",
        "'qmc'": "sobol halton quasi-random grid lhs latin-hypercube", "'random'": "uniform",
        _ELSEWHERE: "pbt population",
    },
    "pruner": {
        "'successive-halving', or promote=3, which goes on from checkpoints": "asha sha halving",
        "'dominance'": "pareto", "'none'": "off no nop false", _ELSEWHERE: "pbt population",
    },
    "optimizer": {
        "'adamw'": "adam", "'sgd', which has momentum": "momentum sgdm sgd-momentum msgd", "'nesterov'": "nag",
        "": "rmsprop adagrad adadelta adafactor lion muon shampoo sophia",
    },
    "strategy": {
        "'all-reduce', which is torch's DistributedDataParallel, or 'ring', which is ours":
            "ddp dp data-parallel distributed-data-parallel horovod nccl",
        "'zero-3'": "fsdp fsdp2 fully-sharded", "'zero-1', 'zero-2' or 'zero-3'": "zero deepspeed sharded hsdp",
        "'parameter-server'": "ps server param-server", "'parameter-server:async'": "async asynchronous hogwild",
        "'pipeline', such as 'pipeline:1f1b'": "pp gpipe 1f1b pipedream zbv dualpipe dualpipev model-parallel",
        "compression='local-sgd'": "local-sgd localsgd diloco fedavg", "'gossip'": "decentralized d-psgd dpsgd",
        "'single'": "none serial local",
        "ss.plan and ss.predict have tensor parallelism, which is not run": "tp tensor-parallel megatron",
        _ELSEWHERE: "pbt population",
    },
    "compression": {
        "'fp16' or 'bf16'": "half float16", "'int8'": "8bit 8-bit", "'int4'": "4bit 4-bit",
        "'sign', 'onebit-adam' or 'onebit-lamb'": "1bit 1-bit onebit one-bit", "'onebit-lamb'": "1bit-lamb 1-bit-lamb",
        "'sign', which keeps what it leaves out": "signsgd ef-signsgd efsgd ef-sgd", "'sign-vote'": "majority-vote",
        "'int8', 'int4' or 'qsgd'": "quantize quantization quantized",
        "'topk' or 'randomk'": "sparse sparsify sparsification",
        "'powersgd'": "low-rank lowrank", "'dgc'": "deep-gradient-compression", "'none'": "off no false",
    },
    "precision": {
        "'bf16' or 'fp16'": "half amp mixed mixed-precision", "'fp16'": "float16", "'bf16'": "bfloat16",
        "'fp32'": "float32 full single", "'fp64'": "float64 double",
    },
    "objective": {
        "'error', the share of wrong answers": "accuracy acc", "'seconds'": "time speed duration latency throughput",
        "'bytes'": "traffic communication network bandwidth", "'memory'": "ram vram", "": "energy power joules",
    },
}  # fmt: skip
"""By field: what to say to names that users know from elsewhere; nothing where no valid one is near."""


def unknown_name(field: str, value: object, valid: Iterable[str]) -> SpecError:
    """The error for a name that is not in a catalogue; names the one that is meant, or nearest, and lists the rest."""
    names = sorted(valid)
    hint = _meant(field.rpartition(" ")[2], str(value), names)
    if hint is None:
        text = str(value)
        near = [name for name in names if name.lower() == text.lower()]
        for spelt in (text, text.lower()):  # Gb is near Gbit/s, and not GB/s
            near = near or get_close_matches(spelt, names, n=1, cutoff=0.4)
        hint = repr(near[0]) if near else ""
    told = f"did you mean {hint}? " if hint.startswith(("'", "compression=")) else f"{hint}; " * bool(hint)
    return SpecError(f"{field}={value!r} is not known; {told}valid are {', '.join(names)}")


def _meant(field: str, value: str, valid: Collection[str]) -> str | None:
    """What to suggest for a name of another's; None where it is not known, or the field has other names here."""
    asked = value.lower().replace("_", "-").replace(" ", "-")
    hint = next((hint for hint, names in _MEANT.get(field, {}).items() if asked in names.split()), None)
    if hint is None or not hint.startswith("'"):
        return hint
    names = findall(r"'([\w:-]+)'", hint)
    there = [name for name in names if name.partition(":")[0] in valid]
    return hint if there == names else " or ".join(map(repr, there)) or None
