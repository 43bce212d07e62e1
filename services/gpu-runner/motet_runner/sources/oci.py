"""Artifacts of OCI registries."""

import re
from dataclasses import dataclass

from motet.errors import AdapterFetchFailed
from motet.sources import REGISTRY
from motet_runner.sources.remote_source import Opening, OpenSource

_API_HOSTS = {"docker.io": "registry-1.docker.io"}
"""Of registries whose name in references is not the host of their API."""

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class OciUri:
    registry: str
    repository: str
    tag: str
    digest: str
    """Of the manifest or the index, with its algorithm. It comes before the tag. One of them may be empty."""

    @property
    def url(self) -> str:
        return f"https://{_API_HOSTS.get(self.registry, self.registry)}/v2/{self.repository}/"

    def hosts(self, *_: object) -> tuple[()]:
        return ()

    def open(self, opening: Opening) -> OpenSource:
        from motet_runner.sources.oci_artifact import OciArtifact

        return OciArtifact(self, opening)


def parse(uri: str, _: str) -> OciUri:
    image = uri.removeprefix(REGISTRY.prefix)
    if re.fullmatch(REGISTRY.form, image) is None:
        raise AdapterFetchFailed(f"source.image: {uri} {REGISTRY.form_message}.")
    image, _, digest = image.partition("@")
    registry, _, path = image.partition("/")
    port = registry.partition(":")[2]
    if port and not 0 < int(port) <= MAX_PORT:
        raise AdapterFetchFailed(f"source.image: {uri} names port {port}. Name one from 1 to {MAX_PORT}.")
    repository, _, tag = path.partition(":")
    return OciUri(registry, repository, tag, digest)
