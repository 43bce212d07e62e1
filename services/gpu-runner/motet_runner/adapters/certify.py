"""From the check of an adapter's files to the certificate that travels and is kept beside its bytes."""

from pathlib import Path

from motet.api.v1 import scheduler_pb2
from motet_runner.adapters.check import check
from motet_runner.adapters.values import check_values
from motet_runner.interface import EngineInfo


def certify(folder: Path, info: EngineInfo) -> scheduler_pb2.Certificate:
    """Check an adapter's files and weights against a base's linears. Raises AdapterIncompatible with what is wrong."""
    found = check(folder, info.target_modules, max_rank=info.max_lora_rank)
    check_values(folder, info.target_modules)
    return scheduler_pb2.Certificate(
        rank=found.rank,
        alpha=found.alpha,
        target_modules=found.modules,
        mapped=found.mapped,
        unmapped=found.unmapped,
        method=found.method,
    )
