"""User-defined optimizers train on through saves and resumes, to the bit, or are refused before their first step.

All of pytorch_optimizer and, if it is installed, timm that train on one process, under every strategy with another way
to hold parameters: weights with checkpoints equal those without, and those of a resumed run; or a sentence refuses the
job by name before step 1. A copy of timm without its dependencies is enough: ``PYTHONPATH=FOLDER_OF_TIMM``.

    python tests/campaigns/optimizers.py --count 300     run a slice
    python tests/campaigns/optimizers.py table FILE      the verdicts by strategy
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import tempfile
import types
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _campaign import Outcome, run
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from conformance.alone import Never
from conformance.ranks import RankPool
from shardscope.errors import SpecError
from shardscope.runlog.writer import EventWriter
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter
from shardscope.training.trainer import Trainer

STRATEGIES = ("single", "ring", "zero-1", "zero-2", "zero-3", "pipeline")
STEPS, AT = 6, 3
NOT_TRAINABLE = {
    "a2grad": "its groups have no learning rate",
    "adahessian": "wants the graph of the gradients",
    "adalomo": "steps in the backward pass of a module that it is given",
    "alig": "its groups have no learning rate",
    "bsam": "wants a closure",
    "lbfgs": "wants a closure",
    "lomo": "steps in the backward pass of a module that it is given",
    "sophiah": "wants the graph of the gradients",
    "spectralsphere": "takes matrices only",
}
"""What no job trains on one process, by the reason."""
FAULTS = ("changed by saving", "resumed otherwise", "cannot be resumed", "fails while it saves")


class LibraryOptimizer(ss.Optimizer):
    """An optimizer of another library, with the settings that it has by default."""

    name = "library-optimizer"

    lr: float = 1e-3
    library: str = ""
    optimizer: str = ""

    def build(self, parameters: Any) -> torch.optim.Optimizer:
        """Build it, with hidden matrices in a group of their own for those that want it."""
        if self.optimizer == "adammini":
            return pytorch_optimizer(self.optimizer, _Named(parameters.named), self.lr)
        make = pytorch_optimizer if self.library == "pytorch_optimizer" else timm_optimizer
        return make(self.optimizer, [p for _, p in parameters.named], self.lr)


class _Named(nn.Module):
    """Parameters that an optimizer wants as those of a module."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self.pairs = named

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        """Names and parameters."""
        return iter(self.pairs)


def pytorch_optimizer(name: str, parameters: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer of pytorch_optimizer."""
    import pytorch_optimizer as library

    made = library.load_optimizer(name)
    needed = {"ranger21": {"num_iterations": 100}, "bsam": {"num_data": 1000}}.get(name, {})
    if name in {"muon", "adamuon", "adago", "distributedmuon", "normuon", "muonclip"}:
        hidden = [p for p in parameters if p.ndim >= 2]
        rest = [p for p in parameters if p.ndim < 2]
        groups = [{"params": hidden, "use_muon": True}, {"params": rest, "use_muon": False}]
        return made([group for group in groups if group["params"]], lr=lr)
    return made(parameters, lr=lr, **needed)


def timm_optimizer(name: str, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """An optimizer of timm."""
    _find_timm()
    from timm.optim import get_optimizer_class

    is_nesterov = name in {"csgdc", "csgdw", "nesterov", "nesterovw", "nlarc", "nlars", "sgd", "sgdc", "sgdw"}
    needed = {"momentum": 0.9} if is_nesterov else {}
    return get_optimizer_class(name, bind_defaults=True)(parameters, lr=lr, **needed)


def _find_timm() -> None:
    """Import only timm's optimizers: its models need torchvision."""
    found = importlib.util.find_spec("timm") if "timm" not in sys.modules else None
    if found is None:
        return
    for name, path in (
        ("timm", found.submodule_search_locations),
        ("timm.models", []),
        ("timm.models._manipulate", []),
    ):
        module: Any = types.ModuleType(name)
        module.__path__, module.group_parameters, module.named_apply = path, None, None
        sys.modules[name] = module


@cache
def optimizers() -> list[tuple[str, str]]:
    """Library and name of every optimizer."""
    import pytorch_optimizer as library

    found = [("pytorch_optimizer", name) for name in library.get_supported_optimizers()]
    if importlib.util.find_spec("timm") is not None:
        _find_timm()
        from timm.optim import list_optimizers

        found += [("timm", name) for name in list_optimizers()]
    return found


def model() -> nn.Module:
    """Matrices, norms and biases, and stages for a pipeline."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.Tanh(),
        nn.Linear(12, 12),
        nn.LayerNorm(12),
        nn.Tanh(),
        nn.Linear(12, 10),
    )


def trained(context: RankContext, folder: str, spec: Any, strategy: str, **changes: Any) -> list[np.ndarray]:
    """All parameters after the last step of a job."""
    warnings.simplefilter("ignore")
    resumed = changes.pop("after", None)
    is_pipeline = strategy == "pipeline"
    batch = ss.Batch(24, micro_batch=6) if is_pipeline else 24
    even: Any = (
        ss.Strategy("pipeline", split="even") if is_pipeline else strategy
    )  # the same stages in every run
    job = ss.Job(
        model=model, data="digits", strategy=even, world_size=context.world_size, batch=batch, optimizer=spec,
        steps=STEPS, record=ss.Record(parameters=True), **changes,
    )  # fmt: skip
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(job, context, path)
    if resumed is not None:
        trainer.resume(Path(resumed))
    trainer.train(Never())
    if context.group is not None:
        torch.distributed.barrier()
    with np.load(path / "parameters.npz") as saved:
        return [saved[f"value-{number}"] for number in range(len(saved.files) - 1)]


def verdict(context: RankContext, folder: str, spec: Any, strategy: str) -> tuple[str, str]:
    """What becomes of an optimizer under a strategy on this rank, and the sentence or error that says so."""
    try:
        plain = trained(context, f"{folder}/plain", spec, strategy)
    except SpecError as error:
        return "refused", str(error)
    except Exception as error:
        return "does not train", f"{type(error).__name__}: {error}"
    try:
        saved = trained(context, f"{folder}/saved", spec, strategy, checkpoint=ss.Checkpoint(every=AT))
    except SpecError as error:
        return "refused", str(error)
    except Exception as error:
        return "fails while it saves", f"{type(error).__name__}: {error}"
    if not all(map(same, plain, saved)):
        return "changed by saving", ""
    try:
        rest = trained(
            context, f"{folder}/rest", spec, strategy, after=f"{folder}/saved/checkpoints/step-{AT}"
        )
    except Exception as error:
        return "cannot be resumed", f"{type(error).__name__}: {error}"
    if not all(map(same, plain, rest)):
        return "resumed otherwise", ""
    return "equal", ""


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are equal to the bit, NaN included."""
    return one.tobytes() == other.tobytes()


_POOLS: list[RankPool] = []


def together(folder: str, spec: Any, strategy: str) -> list[tuple[str, str]]:
    """The verdicts of the ranks."""
    if strategy == "single":
        context = RankContext(
            0, 1, torch.device("cpu"), Meter(), EventWriter(Path(folder) / "rank-0.jsonl", 0)
        )
        return [verdict(context, folder, spec, strategy)]
    if not _POOLS or _POOLS[0].closed:
        _POOLS[:] = [RankPool(2, timeout_s=10.0)]
    told = _POOLS[0].run(lambda context: verdict(context, folder, spec, strategy), Path(folder))
    if any("Timed out" in text or "lost" in text or "Connection" in text for _, text in told):
        _POOLS[0].close()  # its group is no longer in step
    return told


def case(number: int, source: random.Random) -> Outcome:
    """One optimizer under one strategy."""
    del source
    library, name = optimizers()[number // len(STRATEGIES)]
    strategy = STRATEGIES[number % len(STRATEGIES)]
    spec = LibraryOptimizer(library=library, optimizer=name)
    with tempfile.TemporaryDirectory(prefix="shardscope-optimizers-") as folder:
        told = together(folder, spec, strategy)
    order = [
        "changed by saving",
        "resumed otherwise",
        "cannot be resumed",
        "fails while it saves",
        "does not train",
        "refused",
    ]
    worst = next((kind for kind in order if any(each == kind for each, _ in told)), "equal")
    text = next((text for kind, text in told if kind == worst), "")
    details = {"library": library, "optimizer": name, "strategy": strategy, "text": text[:400]}
    return Outcome(worst, violation=worst in FAULTS, details=details)


def table(path: Path) -> None:
    """Print the names of the optimizers by verdict, for each library and strategy."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    alone = {
        (row["library"], row["optimizer"])
        for row in lines
        if row["strategy"] == "single" and row["outcome"] == "does not train"
    }
    for library in dict.fromkeys(row["library"] for row in lines):
        print(
            f"{library}: not on one process: {', '.join(name for where, name in sorted(alone) if where == library)}"
        )
        for strategy in STRATEGIES:
            rows = [
                row for row in lines
                if (row["library"], row["strategy"]) == (library, strategy) and (library, row["optimizer"]) not in alone
            ]  # fmt: skip
            print(f"  {strategy}: {dict(Counter(row['outcome'] for row in rows))}")
            for kind in dict.fromkeys(row["outcome"] for row in rows if row["outcome"] != "equal"):
                print(f"    {kind}: {', '.join(row['optimizer'] for row in rows if row['outcome'] == kind)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["table"]:
        table(Path(sys.argv[2]))
    else:
        torch.set_num_threads(1)
        run(case, cases=len(optimizers()) * len(STRATEGIES), description=__doc__)
