"""How many defects of reading and loading adapters no check and no proof finds: see `benchmarks.adapters`. Nothing here
reads a clock."""

import tempfile
from pathlib import Path

from benchmarks.harness import Result
from motet_runner.adapters.proof import Proof
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig
from testbed.proof_missed import MUTANTS, missed, outcome, save_adapters, save_base


def measure_proofs(scratch: Path) -> list[Result]:
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        base = save_base(folder / "base")
        adapters = save_adapters(base, folder / "adapters")
        engine = Engine(
            EngineConfig(model=base, kernels="torch", device="cpu", threads=1, kv_cache_mib=4, prove_adapters=True)
        )
        for adapter in adapters.values():
            right = outcome(engine, adapter)
            if not isinstance(right, Proof):  # else refusals would show nothing
                raise right
        found = missed(engine, adapters, folder)
    print(f"{len(MUTANTS)} mutants; missed: {', '.join(found) or 'none'}")
    return [Result("proof_missed", len(found), f"of {len(MUTANTS)} mutants", "<= 0", not found, counted=True)]
