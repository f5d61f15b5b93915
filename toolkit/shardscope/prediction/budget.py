"""Training time and cost for a token budget, at the predicted throughput."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf
from numbers import Real

from shardscope.analytic.reliability import Reliability
from shardscope.errors import SpecError
from shardscope.spec.cluster import Cluster

HOUR_S = 3600.0


class Budgeted(ABC):
    """Base class of predictions with a throughput in tokens per second."""

    @property
    @abstractmethod
    def tokens_per_s(self) -> float:
        """Tokens per second, over all devices."""

    @property
    @abstractmethod
    def num_devices(self) -> int:
        """Number of devices to pay for."""

    @property
    @abstractmethod
    def priced(self) -> Cluster | None:
        """The cluster whose price `dollars` uses; None if the job runs on this machine, which has no price."""

    @property
    @abstractmethod
    def reliability(self) -> Reliability | None:
        """Expected cost of failures and checkpoints; None if the cluster gives no failure rate."""

    @property
    def goodput(self) -> float | None:
        """Expected fraction of the time spent on training that is not lost to failures, from 0 to 1.

        This is the limit of `Summary.goodput` in a long run, with checkpoints at the job's interval, or else at the
        optimal one; `ss.goodput` predicts the goodput of a short run from measured costs. None if the cluster's
        `device_mtbf_hours` is None.
        """
        return None if self.reliability is None else float(self.reliability.goodput)

    def time_to_train(self, tokens: float) -> float:
        """Return the expected training time for a number of tokens, in seconds, without evaluations.

        It includes checkpoints and failures if the cluster's `device_mtbf_hours` is given.

        Raises:
            SpecError: `tokens` is not a positive finite number, or training never ends, because of failures.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, Real) or not 0 < tokens < inf:
            raise SpecError(f"tokens={tokens!r} is not a number of tokens; give a finite number above 0")
        goodput = 1.0 if self.goodput is None else self.goodput
        if not goodput:
            raise SpecError(
                "failures occur before a checkpoint is complete, so training never ends; raise the cluster's "
                "device_mtbf_hours or storage_bandwidth, or lower its restart_s"
            )
        return float(tokens) / self.tokens_per_s / goodput

    def dollars(self, tokens: float) -> float:
        """Return the cost of `time_to_train` for a number of tokens, in US dollars, at the cluster's price.

        Raises:
            SpecError: The cluster has no price, or training never ends.
        """
        cluster = self.priced
        if cluster is None:
            raise SpecError("cluster=None is this machine, which has no price; give a cluster")
        if cluster.price_per_device_hour is None:
            raise SpecError(
                f"cluster {cluster.name!r} has no price; set one: cluster.replace(price_per_device_hour=...)"
            )
        return self.time_to_train(tokens) / HOUR_S * cluster.price_per_device_hour * self.num_devices


class Throughput(Budgeted):
    """A throughput in tokens per second on a cluster, for the time and the cost of a token budget."""

    def __init__(self, tokens_per_s: float, cluster: Cluster, reliability: Reliability | None = None) -> None:
        self._tokens_per_s, self._cluster, self._reliability = tokens_per_s, cluster, reliability

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, over all devices."""
        return self._tokens_per_s

    @property
    def num_devices(self) -> int:
        """Number of devices of the cluster."""
        return self._cluster.num_devices

    @property
    def priced(self) -> Cluster:
        """The cluster whose price `dollars` uses."""
        return self._cluster

    @property
    def reliability(self) -> Reliability | None:
        """Expected cost of failures and checkpoints; None if no failure rate is given."""
        return self._reliability
