"""Checks an adapter. The result is a certificate, for the scheduler, and a layout, for the engine."""

import json
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from motet.api.v1 import scheduler_pb2
from motet_runner.adapters.compatibility_check import check
from motet_runner.adapters.layout import AdapterLayout, FileStamp, LoraLinear, StoredTensor
from motet_runner.adapters.peft_config import WEIGHTS_NAME
from motet_runner.adapters.weight_check import check_products, check_values
from motet_runner.interface import EngineInfo


@dataclass(frozen=True, slots=True)
class Certification:
    """The result of a check: the certificate and the layout."""

    certificate: scheduler_pb2.Certificate
    layout: AdapterLayout
    engine: str = ""
    """The engine's limits that the adapter was checked against: see `limits_of`."""

    def encode(self) -> str:
        """The text that is kept beside the adapter's files."""
        layout = self.layout
        kept = {
            "engine": self.engine,
            "certificate": json_format.MessageToDict(self.certificate, preserving_proto_field_name=True),
            "layout": {"stamp": layout.stamp, "rank": layout.rank, "linears": layout.linears},
        }
        return json.dumps(kept, indent=1) + "\n"

    @classmethod
    def decode(cls, text: str, folder: Path) -> "Certification":
        """Raises ValueError for a text that `encode` has not written."""
        try:
            kept = json.loads(text)
            certificate = json_format.ParseDict(kept["certificate"], scheduler_pb2.Certificate())
            layout = kept["layout"]
            linears = [
                LoraLinear(module, _matrix(*a), _matrix(*b), float(scale)) for module, a, b, scale in layout["linears"]
            ]
            stamp = FileStamp(*layout["stamp"])
            found = AdapterLayout.of(folder / WEIGHTS_NAME, stamp, layout["rank"], linears)
            return cls(certificate, found, kept["engine"])
        except (KeyError, TypeError, ValueError, json_format.ParseError) as error:
            raise ValueError(f"this is not a certificate that Motet has written: {error}") from error


def certify(folder: Path, info: EngineInfo) -> Certification:
    """Check an adapter's files and weights against the base model. Raises AdapterIncompatible, which says what is
    wrong."""
    found = check(folder, info.target_modules, max_rank=info.max_lora_rank)
    check_values(found.layout.file, found.tensors)
    check_products(found.layout, info.dtype)
    certificate = scheduler_pb2.Certificate(
        rank=found.rank,
        alpha=found.alpha,
        target_modules=found.modules,
        mapped=len(found.tensors),
        method=found.method,
    )
    return Certification(certificate, found.layout, limits_of(info))


def limits_of(info: EngineInfo) -> str:
    """What the check depends on besides the base model: data types overflow at different numbers, and pools serve
    different ranks."""
    return f"{info.dtype}, rank {info.max_lora_rank}"


def _matrix(start: int, shape: list[int], dtype: str, size: int) -> StoredTensor:
    rows, columns = shape
    return StoredTensor(start, (rows, columns), dtype, size)
