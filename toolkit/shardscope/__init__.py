"""Describe a distributed training job once; then predict it, simulate it and run it, side by side.

    import shardscope as ss

    job = ss.Job(model="gpt-nano", data="python-source", strategy="ring", world_size=4, steps=50)
    run = ss.launch(job)     # returns at once; real ranks train in processes of their own
    run.wait().metrics()     # one row a step
    ss.compare(run)          # measured beside predicted, term by term

Names are imported when first used (PEP 562), so `import shardscope` costs milliseconds and loads neither
torch nor plotly. A notebook kernel that only starts and watches runs never needs torch at all.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardscope import analytic
    from shardscope.conformance import check_method
    from shardscope.errors import (
        CheckpointError,
        DataError,
        LaunchError,
        RunFailed,
        RunNotFound,
        RunUnreadable,
        ShardscopeError,
        SpecError,
        StudyError,
        UntrustedCode,
    )
    from shardscope.measure.break_even import break_even
    from shardscope.measure.compare.comparison import Comparison
    from shardscope.measure.compare.of_run import compare
    from shardscope.measure.worth import worth
    from shardscope.methods.compressors.packed import PackedCompression
    from shardscope.methods.strategies.all_reduce import AllReduce
    from shardscope.methods.strategies.bucketed import BucketedStrategy
    from shardscope.methods.strategies.gossip import Gossip
    from shardscope.methods.strategies.hierarchical import Hierarchical
    from shardscope.methods.strategies.parameter_server import ParameterServer
    from shardscope.methods.strategies.pipeline import Pipeline
    from shardscope.methods.strategies.ring import Ring
    from shardscope.methods.strategies.single import Single
    from shardscope.methods.strategies.tree import Tree
    from shardscope.methods.strategies.zero_1 import Zero1
    from shardscope.methods.strategies.zero_2 import Zero2
    from shardscope.methods.strategies.zero_3 import Zero3
    from shardscope.prediction.job import JobPrediction
    from shardscope.prediction.layout import Prediction
    from shardscope.prediction.planner import Plans, plan
    from shardscope.prediction.predict import predict
    from shardscope.runtime import Run, launch, load_job, runs
    from shardscope.runtime.check import check
    from shardscope.runtime.check_report import CheckReport
    from shardscope.runtime.doctor import diagnose as doctor
    from shardscope.spec import (
        Batch,
        Checkpoint,
        Cluster,
        Compression,
        Device,
        Job,
        Layout,
        Link,
        LRSchedule,
        Model,
        Optimizer,
        Record,
        Strategy,
    )
    from shardscope.spec.calibration import Calibration
    from shardscope.spec.optimizer import OptimizerStates
    from shardscope.spec.pipeline_schedule import PipelineSchedule
    from shardscope.spec.registry import register
    from shardscope.spec.space import Between, Choices, PowersOfTwo, Space
    from shardscope.training.compression.codec import SimpleCodec
    from shardscope.training.strategies.own_all_reduce import OwnAllReduce
    from shardscope.tuning.batch_sweep import batch_sweep
    from shardscope.tuning.lr_range import lr_range_test
    from shardscope.tuning.population import Population, PopulationError, train_population
    from shardscope.tuning.tune import tune

__version__ = "0.1.0"

_HOMES = {
    "shardscope.analytic": ("analytic",),
    "shardscope.prediction.planner": ("Plans", "plan"),
    "shardscope.prediction.job": ("JobPrediction",),
    "shardscope.prediction.layout": ("Prediction",),
    "shardscope.prediction.predict": ("predict",),
    "shardscope.spec.calibration": ("Calibration",),
    "shardscope.spec.optimizer": ("OptimizerStates",),
    "shardscope.spec.pipeline_schedule": ("PipelineSchedule",),
    "shardscope.spec.registry": ("register",),
    "shardscope.spec.space": ("Between", "Choices", "PowersOfTwo", "Space"),
    "shardscope.tuning.batch_sweep": ("batch_sweep",),
    "shardscope.tuning.tune": ("tune",),
    "shardscope.errors": (
        "CheckpointError",
        "DataError",
        "LaunchError",
        "RunFailed",
        "RunNotFound",
        "RunUnreadable",
        "ShardscopeError",
        "SpecError",
        "StudyError",
        "UntrustedCode",
    ),
    "shardscope.methods.compressors.packed": ("PackedCompression",),
    "shardscope.methods.strategies.bucketed": ("BucketedStrategy",),
    "shardscope.methods.strategies.all_reduce": ("AllReduce",),
    "shardscope.methods.strategies.gossip": ("Gossip",),
    "shardscope.methods.strategies.hierarchical": ("Hierarchical",),
    "shardscope.methods.strategies.parameter_server": ("ParameterServer",),
    "shardscope.methods.strategies.pipeline": ("Pipeline",),
    "shardscope.methods.strategies.ring": ("Ring",),
    "shardscope.methods.strategies.single": ("Single",),
    "shardscope.methods.strategies.tree": ("Tree",),
    "shardscope.methods.strategies.zero_1": ("Zero1",),
    "shardscope.methods.strategies.zero_2": ("Zero2",),
    "shardscope.methods.strategies.zero_3": ("Zero3",),
    "shardscope.conformance": ("check_method",),
    "shardscope.training.compression.codec": ("SimpleCodec",),
    "shardscope.training.strategies.own_all_reduce": ("OwnAllReduce",),
    "shardscope.measure.break_even": ("break_even",),
    "shardscope.measure.compare.comparison": ("Comparison",),
    "shardscope.measure.compare.of_run": ("compare",),
    "shardscope.measure.worth": ("worth",),
    "shardscope.runtime": ("Run", "launch", "load_job", "runs"),
    "shardscope.runtime.check": ("check",),
    "shardscope.runtime.check_report": ("CheckReport",),
    "shardscope.runtime.doctor": ("doctor",),
    "shardscope.tuning.lr_range": ("lr_range_test",),
    "shardscope.spec": (
        "Batch",
        "Checkpoint",
        "Cluster",
        "Compression",
        "Device",
        "Job",
        "LRSchedule",
        "Layout",
        "Link",
        "Model",
        "Optimizer",
        "Record",
        "Strategy",
    ),
    "shardscope.tuning.population": ("Population", "PopulationError", "train_population"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_NAME_AT_HOME = {"doctor": "diagnose"}

__all__ = [
    "AllReduce",
    "Batch",
    "Between",
    "BucketedStrategy",
    "CheckReport",
    "Calibration",
    "Checkpoint",
    "CheckpointError",
    "Choices",
    "Cluster",
    "Comparison",
    "Compression",
    "DataError",
    "Device",
    "Gossip",
    "Hierarchical",
    "Job",
    "JobPrediction",
    "LRSchedule",
    "LaunchError",
    "Layout",
    "Link",
    "Model",
    "Optimizer",
    "OptimizerStates",
    "OwnAllReduce",
    "PackedCompression",
    "ParameterServer",
    "Pipeline",
    "PipelineSchedule",
    "Plans",
    "Population",
    "PopulationError",
    "PowersOfTwo",
    "Prediction",
    "Record",
    "Ring",
    "Run",
    "RunFailed",
    "RunNotFound",
    "RunUnreadable",
    "ShardscopeError",
    "SimpleCodec",
    "Single",
    "Space",
    "SpecError",
    "Strategy",
    "StudyError",
    "Tree",
    "UntrustedCode",
    "Zero1",
    "Zero2",
    "Zero3",
    "__version__",
    "analytic",
    "batch_sweep",
    "break_even",
    "check",
    "check_method",
    "compare",
    "doctor",
    "launch",
    "load_job",
    "lr_range_test",
    "plan",
    "predict",
    "register",
    "runs",
    "train_population",
    "tune",
    "worth",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(home)
    value = module if home == f"{__name__}.{name}" else getattr(module, _NAME_AT_HOME.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
