from shardscope import analytic as analytic
from shardscope import errors as errors
from shardscope.calibration.calibration import Calibration as Calibration
from shardscope.calibration.host_calibration import HostCalibration as HostCalibration
from shardscope.conformance import check_method as check_method
from shardscope.errors import RunFailed as RunFailed
from shardscope.errors import ShardscopeError as ShardscopeError
from shardscope.errors import SpecError as SpecError
from shardscope.measure.accuracy import accuracy as accuracy
from shardscope.measure.calibrate.entry import calibrate as calibrate
from shardscope.measure.compare.of_run import compare as compare
from shardscope.measure.compare_runs.of_runs import compare_runs as compare_runs
from shardscope.measure.compression.speedup import compression_speedup as compression_speedup
from shardscope.measure.explain.of_run import explain as explain
from shardscope.measure.goodput import goodput as goodput
from shardscope.measure.jitter import jitter as jitter
from shardscope.measure.scaling.scaling import extrapolate as extrapolate
from shardscope.measure.scaling.scaling import scaling as scaling
from shardscope.methods.compressors.packed import PackedCompression as PackedCompression
from shardscope.methods.strategies.all_reduce import AllReduce as AllReduce
from shardscope.methods.strategies.bucketed import BucketedStrategy as BucketedStrategy
from shardscope.methods.strategies.gossip import Gossip as Gossip
from shardscope.methods.strategies.hierarchical import Hierarchical as Hierarchical
from shardscope.methods.strategies.parameter_server import ParameterServer as ParameterServer
from shardscope.methods.strategies.pipeline import Pipeline as Pipeline
from shardscope.methods.strategies.ring import Ring as Ring
from shardscope.methods.strategies.tree import Tree as Tree
from shardscope.methods.strategies.zero_1 import Zero1 as Zero1
from shardscope.methods.strategies.zero_2 import Zero2 as Zero2
from shardscope.methods.strategies.zero_3 import Zero3 as Zero3
from shardscope.planner import plan as plan
from shardscope.prediction.predict import predict as predict
from shardscope.runtime import Run as Run
from shardscope.runtime import launch as launch
from shardscope.runtime import runs as runs
from shardscope.runtime.emulated import why_not_emulated as why_not_emulated
from shardscope.runtime.launcher.driver_server import warm_up as warm_up
from shardscope.runtime.observe import observe as observe
from shardscope.runtime.record.load_job import load_job as load_job
from shardscope.runtime.tools.check import check as check
from shardscope.runtime.tools.doctor import doctor as doctor
from shardscope.runtime.tools.reproduce import reproduce as reproduce
from shardscope.simulator import simulate as simulate
from shardscope.spec import Batch as Batch
from shardscope.spec import Checkpoint as Checkpoint
from shardscope.spec import Cluster as Cluster
from shardscope.spec import Compression as Compression
from shardscope.spec import Device as Device
from shardscope.spec import Elastic as Elastic
from shardscope.spec import Faults as Faults
from shardscope.spec import Job as Job
from shardscope.spec import Layout as Layout
from shardscope.spec import Link as Link
from shardscope.spec import LRSchedule as LRSchedule
from shardscope.spec import Model as Model
from shardscope.spec import Optimizer as Optimizer
from shardscope.spec import Record as Record
from shardscope.spec import Recovery as Recovery
from shardscope.spec import Shards as Shards
from shardscope.spec import Strategy as Strategy
from shardscope.spec.optimizer import OptimizerStates as OptimizerStates
from shardscope.spec.pipeline_schedule import PipelineSchedule as PipelineSchedule
from shardscope.spec.registry import register as register
from shardscope.spec.space import PowersOfTwo as PowersOfTwo
from shardscope.spec.tensor_plan import TensorPlan as TensorPlan
from shardscope.storage.write import write_shards as write_shards
from shardscope.training.compression.codec import SimpleCodec as SimpleCodec
from shardscope.training.strategies.own_all_reduce import OwnAllReduce as OwnAllReduce
from shardscope.tuning.batch_sweep import batch_sweep as batch_sweep
from shardscope.tuning.lr_range import lr_range_test as lr_range_test
from shardscope.tuning.population import Population as Population
from shardscope.tuning.population import train_population as train_population
from shardscope.tuning.session import StudySession as StudySession
from shardscope.tuning.tune import tune as tune

__version__: str

from shardscope.errors import CheckpointError as CheckpointError  # kept
from shardscope.errors import DataError as DataError  # kept
from shardscope.errors import LaunchError as LaunchError  # kept
from shardscope.errors import RunNotFound as RunNotFound  # kept
from shardscope.errors import RunUnreadable as RunUnreadable  # kept
from shardscope.errors import StudyError as StudyError  # kept
from shardscope.errors import UntrustedCode as UntrustedCode  # kept
from shardscope.measure.accuracy import Accuracy as Accuracy  # kept
from shardscope.measure.compare.comparison import Comparison as Comparison  # kept
from shardscope.measure.compare_runs.comparison import RunsComparison as RunsComparison  # kept
from shardscope.measure.explain.of_run import Explanation as Explanation  # kept
from shardscope.measure.goodput import ExpectedGoodput as ExpectedGoodput  # kept
from shardscope.measure.scaling.result import Scaling as Scaling  # kept
from shardscope.methods.strategies.single import Single as Single  # kept
from shardscope.planner import Plans as Plans  # kept
from shardscope.prediction.job import JobPrediction as JobPrediction  # kept
from shardscope.prediction.layout import Prediction as Prediction  # kept
from shardscope.runtime.tools.check_report import CheckReport as CheckReport  # kept
from shardscope.runtime.tools.reproduce import first_difference as first_difference  # kept
from shardscope.simulator import AsyncSimulation as AsyncSimulation  # kept
from shardscope.simulator import Simulation as Simulation  # kept
from shardscope.spec.space import Between as Between  # kept
from shardscope.spec.space import Choices as Choices  # kept
from shardscope.spec.space import Space as Space  # kept
from shardscope.tuning.population import PopulationError as PopulationError  # kept
