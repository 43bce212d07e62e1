"""Reads manifests and indexes of an OCI registry. Pure: it believes nothing that the registry says."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

MAX_MANIFEST_BYTES = 4 << 20
"""The most bytes of a manifest or an index: what registries take."""

MAX_LAYERS = 1000
"""The most files of an artifact. A large model has some hundred."""

MAX_MANIFESTS = 16
"""The most entries of an index, and the most manifests and indexes that are read to find the one with the files."""

MAX_INDEX_DEPTH = 2
"""How many indexes may lie one in another."""

TITLE = "org.opencontainers.image.title"
"""The annotation that names a layer's file, as oras writes it."""

MODEL_PATH = "org.cncf.model.filepath"
"""The annotation that names a layer's file in a ModelPack."""

MODEL_PACK = "application/vnd.cncf.model."
"""The types of a ModelPack's layers begin with it, and end with how the file is packed."""

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFESTS = (MANIFEST, "application/vnd.docker.distribution.manifest.v2+json")
_INDEXES = (INDEX, "application/vnd.docker.distribution.manifest.list.v2+json")
ACCEPTED = (*_MANIFESTS, *_INDEXES)

_OF_CONTAINERS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
_FOLDER = "io.deis.oras.content.unpack"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PART = re.compile(r"[^/\\]{1,255}")
_MAX_SIZE = 1 << 60


class NotAnArtifact(Exception):
    """Says what is wrong and what to do, as the end of a sentence about the artifact."""


class NoManifest(NotAnArtifact):
    """The answer may be another page in place of the manifest, such as that of a proxy."""


class ContainerImage(NotAnArtifact):
    def __init__(self) -> None:
        super().__init__("is a container image, not an artifact with files. Push the adapter's files with oras push")


@dataclass(frozen=True, slots=True)
class Layer:
    digest: str
    size: int
    packing: str = ""
    """How the file lies in the layer: `tar`, or another word if Motet cannot read it. Empty: as it is."""


Files = Mapping[str, Layer]
"""By the name of the file. Files of folders are left out."""


def read(body: bytes, content_type: str) -> Files | list[str]:
    """The files of a manifest, or the digests that an index names, each once. Raises NotAnArtifact."""
    try:
        document = orjson.loads(body)
        kind = document.get("mediaType") or content_type.partition(";")[0].strip()
    except (orjson.JSONDecodeError, AttributeError):
        raise NoManifest("has a manifest that is no JSON object. Name a registry") from None
    if kind in _MANIFESTS:
        return _files(document)
    if kind in _INDEXES:
        return _manifests(document)
    raise NoManifest(f"has a manifest of the type {shown(kind)}. Push it as an OCI artifact, with oras push")


def _manifests(index: Mapping[str, Any]) -> list[str]:
    entries = index.get("manifests")
    if not isinstance(entries, list) or not entries:
        raise NotAnArtifact("is an index without manifests. Name the manifest that has the files")
    if len(entries) > MAX_MANIFESTS:
        raise NotAnArtifact(f"is an index with more than {MAX_MANIFESTS} manifests. Name the one that has the files")
    return list(dict.fromkeys(_digest(entry, "a manifest of its index") for entry in entries))


def _files(manifest: Mapping[str, Any]) -> Files:
    layers = manifest.get("layers")
    if not isinstance(layers, list):
        raise NotAnArtifact("has a manifest without layers. Push it again")
    if len(layers) > MAX_LAYERS:
        raise NotAnArtifact(f"has more than {MAX_LAYERS} layers. Push only the adapter's files")
    config = manifest.get("config")
    names = [_name(layer) for layer in layers]
    if isinstance(config, dict) and config.get("mediaType") in _OF_CONTAINERS and not any(names):
        raise ContainerImage
    files: dict[str, Layer] = {}
    for at, (layer, name) in enumerate(zip(layers, names, strict=True), 1):
        if name is None:
            raise NotAnArtifact(
                f"has no {TITLE} at layer {at}: it does not name the file. Push the adapter's files with oras push"
            )
        *folders, last = name.split("/")
        if not all(_is_part(part) for part in (*folders, last)):
            raise NotAnArtifact(f"names a file {shown(name)} at layer {at}. Push the files from inside their folder")
        if folders or _annotations(layer).get(_FOLDER) == "true":
            continue
        if last in files:
            raise NotAnArtifact(f"has two layers of the name {shown(last)}. Push each file once")
        files[last] = Layer(_digest(layer, f"layer {at}"), _size(layer, at), _packing(layer))
    if layers and not files:
        raise NotAnArtifact("has its files in folders. Push them from inside their folder: oras push …:TAG *")
    return files


def _annotations(layer: Any) -> Mapping[str, Any]:
    found = layer.get("annotations") if isinstance(layer, dict) else None
    return found if isinstance(found, dict) else {}


def _name(layer: Any) -> str | None:
    annotations = _annotations(layer)
    found = annotations.get(MODEL_PATH) or annotations.get(TITLE)
    return found if isinstance(found, str) else None


def _is_part(text: str) -> bool:
    return _PART.fullmatch(text) is not None and text.isprintable() and text not in (".", "..")


def _packing(layer: Mapping[str, Any]) -> str:
    kind = layer.get("mediaType")
    end = kind.rpartition(".")[2] if isinstance(kind, str) and kind.startswith(MODEL_PACK) else "raw"
    return "" if end == "raw" else end


def _digest(entry: Any, what: str) -> str:
    found = entry.get("digest") if isinstance(entry, dict) else None
    if not isinstance(found, str) or not _DIGEST.fullmatch(found):
        raise NotAnArtifact(f"gives {what} no sha256 digest. Push it again")
    return found


def _size(layer: Mapping[str, Any], at: int) -> int:
    found = layer.get("size")
    if type(found) is not int or not 0 <= found < _MAX_SIZE:
        raise NotAnArtifact(f"gives layer {at} a size that makes no sense. Push it again")
    return found


def shown(text: object) -> str:
    """A text of a stranger, for a message."""
    return ascii(text)[:80]
