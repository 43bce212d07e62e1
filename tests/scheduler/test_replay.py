"""The same events bring the same effects in every process, so that an incident can be replayed from its events."""

import os
import subprocess
import sys


def test_the_same_events_bring_the_same_effects_whatever_the_seed_of_hashes():
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.scheduler.replay"],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(1, 4)
    ]
    first, *others = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    for kind in (
        "SendPlaced(",
        "DropAdapter(",
        "SendRefused(",
        "EnsureAdapter(",
        "CancelAtRunner(",
        "Park(",
        "Extend(",
    ):
        assert kind in first, f"the events have no {kind}...)"
    for other in others:
        assert other.splitlines() == first.splitlines()
