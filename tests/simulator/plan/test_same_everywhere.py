"""A simulation gives the same in every process, whatever order its sets have there."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

from motet_scheduler.policy import events as scheduler_events
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.setup import Setup
from tests.simulator.setups import profile, workload

ADAPTERS = 60


def test_processes_with_other_hashes_simulate_the_same() -> None:
    """Adapters come and go: in each process, the same one has to go."""
    command = [sys.executable, "-m", "tests.simulator.plan.test_same_everywhere"]
    answers = {
        subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(answers) == 1


def _all_that_happens() -> str:
    said = hashlib.sha256()

    def record(now: float, event: object) -> None:
        if isinstance(event, scheduler_events.RunnerReported):
            said.update(repr(sorted(event.cached_prefixes)).encode())
            event = replace(event, cached_prefixes=frozenset())
        said.update(f"{now!r} {event!r}\n".encode())

    of = profile(noise=0.5, pages=512, max_sequences=32, adapter_slots=16, cached_adapters=64)
    cluster = Cluster(Setup(profile=of, runners=1, rank=8), [f"a{one}" for one in range(ADAPTERS)], record=record)
    cluster.run(workload(1, 300, rate=20, adapters=ADAPTERS))
    return said.hexdigest()


if __name__ == "__main__":
    print(_all_that_happens())
