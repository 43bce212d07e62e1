"""The bridge from the check of an adapter's files to the certificate that travels and is kept."""

from pathlib import Path

from motet.api.v1 import scheduler_pb2
from motet_runner.interface import EngineInfo


def certify(folder: Path, info: EngineInfo) -> scheduler_pb2.Certificate:
    """Check an adapter's folder against the base model's linears. Raises AdapterIncompatible with what does not fit."""
    raise NotImplementedError
