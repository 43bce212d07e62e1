"""Checks an adapter. The result is a certificate, for the scheduler, and a layout, for the engine."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from google.protobuf import json_format

from motet.adapter_template import digest_of_template
from motet.api.v1 import scheduler_pb2
from motet.domain import Digest
from motet_runner.adapters.base_name import name_in_hub
from motet_runner.adapters.chat_template import own_template
from motet_runner.adapters.compatibility_check import check
from motet_runner.adapters.layout import AdapterLayout, FileStamp, checked_name
from motet_runner.adapters.peft_config import WEIGHTS_NAME
from motet_runner.adapters.proof import Proof
from motet_runner.adapters.recorded_answers import read_recorded_answers
from motet_runner.adapters.second_reading import check_again
from motet_runner.adapters.tokenizer_check import check_tokenizer
from motet_runner.adapters.weight_check import check_products, check_values
from motet_runner.interface import EngineInfo


class EngineLimits(NamedTuple):
    """What a check needs to know of the engine: its linears, and what it can compute."""

    target_modules: dict[str, tuple[int, int]]
    max_lora_rank: int
    dtype: str
    no_scales: str = ""
    """Where Motet can't scale and shift a linear's own result yet, as DoRA and trained biases need; empty if it can"""
    biased_modules: tuple[str, ...] = ()
    """The linears that have a bias"""
    max_device_rank: int | None = None
    """The largest rank on the device, with what scales take; None: any that `max_lora_rank` allows."""
    model: str = ""
    """The base model's folder, with its tokenizer and chat template; empty: there is none here"""
    asset_digest: str = ""
    """Of these files"""
    vocabulary: int = 0
    """The number of the base model's token ids"""
    base_name: str = ""
    """The base model's name in a hub; empty: it is not known"""

    @classmethod
    def of_engine(cls, info: EngineInfo) -> "EngineLimits":
        return cls(
            info.target_modules,
            info.max_lora_rank,
            info.dtype,
            info.no_scales,
            info.biased_modules,
            info.max_device_rank,
        )

    @classmethod
    def of(cls, values: Sequence[Any]) -> "EngineLimits":
        """From the JSON of `encode`."""
        modules, rank, dtype, no_scales, biased, device_rank, *base = values
        shapes = {module: (inputs, outputs) for module, (inputs, outputs) in modules.items()}
        return cls(shapes, rank, dtype, no_scales, tuple(biased), device_rank, *base)

    def with_base(self, model: Path, asset_digest: Digest, vocabulary: int, uri: str = "") -> "EngineLimits":
        """`uri`: where the model came from."""
        name = name_in_hub(model, uri)
        return self._replace(model=str(model), asset_digest=asset_digest, vocabulary=vocabulary, base_name=name)

    def encode(self) -> bytes:
        return orjson.dumps(tuple(self))

    def __str__(self) -> str:
        """What the check depends on besides the base model: data types overflow at different numbers, pools serve
        different ranks, and engines adapt different linears of one model."""
        linears = (self.target_modules, sorted(self.biased_modules))
        modules = sha256(orjson.dumps(linears, option=orjson.OPT_SORT_KEYS)).hexdigest()
        text = f"{self.dtype}, rank {self.max_lora_rank}, linears {modules}"
        text += "" if self.max_device_rank is None else f", device rank {self.max_device_rank}"
        text += f", assets {self.asset_digest}" if self.asset_digest else ""
        return text + (", no scales" if self.no_scales else "")


@dataclass(frozen=True, slots=True)
class Certification:
    """The result of a check: the certificate and the layout. The certificate is kept compressed, because thousands of
    adapters wait."""

    compressed: bytes = field(repr=False)
    layout: AdapterLayout
    engine: str = ""
    """The engine's limits that the adapter was checked against: the text of `EngineLimits`."""
    proofs: tuple[Proof, ...] = ()
    """By the kernels of this engine. They are kept in a file of their own."""
    recorded: bool = False
    """True if the adapter has recorded answers."""
    proved_before: bool = False
    """True if an engine of this machine, which differs in its version or its type, has proved the adapter"""
    proved_elsewhere: tuple[str, ...] = ()
    """The kernels by which another machine has proved the adapter, with an engine and a device like these"""
    template: bytes = field(default=b"", repr=False)
    """The adapter's own chat template, encoded, if it is not in its file"""
    lacks_slab: bool = False
    """When it was found or made, there was no slab beside it, and the engine loads slabs."""

    @classmethod
    def of(
        cls,
        certificate: scheduler_pb2.Certificate,
        layout: AdapterLayout,
        engine: str = "",
        *,
        recorded: bool = False,
        template: bytes = b"",
    ) -> "Certification":
        packed = zlib.compress(certificate.SerializeToString(deterministic=True))
        return cls(packed, layout, engine, recorded=recorded, template=template)

    @property
    def certificate(self) -> scheduler_pb2.Certificate:
        """A copy."""
        return scheduler_pb2.Certificate.FromString(zlib.decompress(self.compressed))

    def encode(self) -> str:
        """The text that is kept beside the adapter's files, and beside the file of the layout's linears."""
        layout = self.layout
        kept = {
            "engine": self.engine,
            "recorded": self.recorded,
            "certificate": json_format.MessageToDict(self.certificate, preserving_proto_field_name=True),
            "layout": {
                "stamp": tuple(layout.stamp),
                "rank": layout.rank,
                "size": layout.size,
                "linears_file": layout.linears_file,
            },
        }
        return orjson.dumps(kept, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()

    @classmethod
    def decode(cls, text: str, folder: Path, packed: bytes = b"", template: bytes = b"") -> "Certification":
        """`packed`, `template`: the layout's linears and the chat template, if they are not in their files. Raises
        ValueError for a text that `encode` has not written."""
        try:
            kept = orjson.loads(text)
            fields: dict[str, Any] = kept["certificate"]
            if "size_bytes" in fields:  # JSON has the 64 bits of it as text
                fields["size_bytes"] = int(fields["size_bytes"])
            certificate = scheduler_pb2.Certificate(**fields)  # `ParseDict` takes ten times as long
            layout = kept["layout"]
            stamp, rank, size = FileStamp(*layout["stamp"]), int(layout["rank"]), int(layout["size"])
            linears_file = checked_name(layout["linears_file"], packed)
            found = AdapterLayout(str(folder / WEIGHTS_NAME), stamp, rank, size, linears_file, packed)
            return cls.of(certificate, found, kept["engine"], recorded=bool(kept["recorded"]), template=template)
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"this is not a certificate that Motet has written: {error}") from error


def certify(folder: Path, engine: EngineInfo | EngineLimits) -> Certification:
    """Check an adapter's files and weights against the base model. Raises AdapterIncompatible, which says what is
    wrong."""
    limits = engine if isinstance(engine, EngineLimits) else EngineLimits.of_engine(engine)
    base = Path(limits.model) if limits.model else None
    found = check(
        folder,
        limits.target_modules,
        max_rank=limits.max_lora_rank,
        no_scales=limits.no_scales,
        biased=limits.biased_modules,
        max_device_rank=limits.max_device_rank,
        base_name=limits.base_name,
        base=base,
    )
    check_again(folder, found.layout.linears)
    recorded = read_recorded_answers(folder)
    of_tokenizer = check_tokenizer(folder, base, limits.vocabulary)
    own = own_template(folder, base)
    template = own.encode() if own is not None else b""
    check_values(found.layout.file, found.tensors)
    check_products(found.layout, limits.dtype)
    certificate = scheduler_pb2.Certificate(
        rank=found.rank,
        device_rank=found.layout.rank,
        alpha=found.alpha,
        target_modules=found.modules,
        mapped=len(found.tensors),
        method=found.method,
        warnings=(*found.warnings, *of_tokenizer),
        template_digest=digest_of_template(template) if template else "",
    )
    return Certification.of(certificate, found.layout, str(limits), recorded=recorded is not None, template=template)
