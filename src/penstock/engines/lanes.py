"""Lanes: runs of one program side by side that share its workers, each with a consumer placed next to its blocks."""

from __future__ import annotations

from penstock.engines.consumer import ConsumerHost, LocalHost
from penstock.engines.cursor import Start
from penstock.engines.meter import Meters
from penstock.engines.program import Program
from penstock.engines.run import Run, start_pools
from penstock.engines.stats import Stats, snapshot
from penstock.order import Order
from penstock.plan.values import available_cores

_MAX_LANES = 32  # each has threads of its own, and on a cluster an actor


class Lanes:
    """The runs of a program on its engine: up to ``count`` at a time, with one set of workers.

    Args:
        program: What runs.
        order: The order of the epoch.
        epoch: The epoch.
        most: The most runs at a time that can have work.
        consumers: Whether blocks are taken by consumers, so that the results stay on the cluster until then.

    Attributes:
        count: How many runs there may be at a time.

    Raises:
        EngineError: The cluster cannot be reached, or lacks what a stage requests.
    """

    def __init__(self, program: Program, order: Order, epoch: int, most: int, *, consumers: bool = False) -> None:
        self._program, self._order, self._epoch = program, order, epoch
        options = program.plan.engine
        self._on_ray = consumers and options.name == "ray"
        if options.name == "serial":
            cores = 1
        elif options.name == "ray":
            from penstock.engines.ray.engine import cluster_cores  # imported here so that only users of Ray load it

            cores = max(2, cluster_cores(options.get("address")))
        else:
            cores = 2 * (options.get("cpus") or available_cores())  # half of them wait for the disk to take a file
        self.count = max(1, min(most, cores, _MAX_LANES))
        self._meters = Meters(engine=options.name, observer=options.get("observer"))
        self._pools = start_pools(program, self._meters, keep_remote=consumers)

    def run(self, start: Start) -> Run:
        """Start a run; it is closed by its user.

        Raises:
            EngineError: The engine cannot run the plan.
        """
        program = self._program.for_one_run()
        alone = program is not self._program
        return Run(program, self._order, self._epoch, start, pools=self._pools, alone=alone)

    def host(self) -> ConsumerHost:
        """Return a host for the consumers of one lane."""
        if not self._on_ray:
            return LocalHost()
        from penstock.engines.ray.consumer import ActorHost  # imported here so that only users of Ray load it

        return ActorHost()

    def stats(self) -> Stats:
        """Return what the workers did so far."""
        return snapshot(self._meters)

    def close(self) -> None:
        """End the workers; runs that are not complete fail."""
        if self._pools is not None:
            self._pools.close()
        self._program.suspend()
