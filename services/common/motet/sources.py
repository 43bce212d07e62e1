"""Where adapters and models come from: each source is declared once, as an entry of `SOURCES`.

The rules of manifests and CRDs, the operator, the runner's parser and its fetch process, the keys of Secrets and the
pages of the reference read this table. A module of `motet_runner.sources` reads the files: it is named here and
imported there, because it needs libraries that only runners have. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

SecretKeys = tuple[str, ...]
"""Keys that a Secret has together."""

TOKEN: SecretKeys = ("token",)
PASSWORD: SecretKeys = ("username", "password")
DOCKER_CONFIG: SecretKeys = (".dockerconfigjson",)
"""What a Secret of type `kubernetes.io/dockerconfigjson` has: user names and passwords, by registry."""
ACCESS_KEY: SecretKeys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
SESSION_TOKEN = "AWS_SESSION_TOKEN"  # noqa: S105 - a key of Secrets
STORE_ENDPOINT = "AWS_ENDPOINT_URL"
STORE_REGION = "AWS_REGION"
NOT_SECRET = frozenset({PASSWORD[0], ACCESS_KEY[0], STORE_ENDPOINT, STORE_REGION})
"""The values of these keys may be in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    scheme: str
    what: str
    """What its URIs name."""
    example: str
    """A URI, for messages."""
    of_adapters: str = ""
    """How the description of an adapter's URI names it. Empty: adapters do not come from there."""
    of_models: str = ""
    """How the description of a model's URI names it. Empty: models do not come from there."""
    form: str = ""
    """A regular expression for what follows `scheme://`, in the dialect of CEL. Empty: any text."""
    form_message: str = ""
    """What a URI of another form must do."""
    revisions: bool = False
    """Whether one URI has several revisions."""
    secrets: tuple[SecretKeys, ...] = ()
    """What a Secret for it may have, the first choice first. Empty: it takes no Secret."""
    secret_options: SecretKeys = ()
    """What a Secret may have besides, each key for itself. Those that are not secret it may have alone."""
    network: bool = True
    """Whether it is reached over the network."""
    read_by: str = ""
    """The module of `motet_runner.sources` that parses its URIs and fetches its files. Empty: no runner sees it."""

    @property
    def prefix(self) -> str:
        return f"{self.scheme}://"


def declared(*sources: Source) -> Mapping[str, Source]:
    """By scheme. Raises ValueError where two have the same one."""
    found: dict[str, Source] = {}
    for one in sources:
        if one.scheme in found:
            raise ValueError(f"Two sources have the scheme {one.prefix}; remove one of them.")
        found[one.scheme] = one
    return found


FOLDER = Source(
    scheme="file",
    what="a folder of the runner's machine",
    example="file:///folder",
    of_adapters="`file://` works only with `motet up`; a relative path begins at the manifest's folder",
    of_models="`file://` (in a cluster a path in the runner's image; with `motet up` a path that may be relative to "
    "the manifest's folder)",
    network=False,
    read_by="folder",
)
CLAIM = Source(
    scheme="pvc",
    what="a folder of a volume, by the claim in the pool's namespace",
    example="pvc://claim/folder",
    of_models="`pvc://claim/folder` (a claim in the pool's namespace)",
    form="[^/]+/.+",
    form_message="must name a claim and a folder in it, as pvc://models/llama",
    network=False,
)
"""The operator mounts it: runners find a folder."""

BUCKET = Source(
    scheme="s3",
    what="a folder of a bucket, in AWS S3 or the store that `MOTET_RUNNER_S3_ENDPOINT` or the Secret names",
    example="s3://bucket/folder",
    of_adapters="`s3://bucket/folder`",
    of_models="`s3://bucket/folder`",
    form="[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?",
    form_message="must name a bucket and a folder in it, as s3://bucket/folder",
    secrets=(ACCESS_KEY,),
    secret_options=(SESSION_TOKEN, STORE_ENDPOINT, STORE_REGION),
    read_by="s3",
)

_PINNED = "@sha256:[0-9a-f]{64}"
REGISTRY = Source(
    scheme="oci",
    what="an artifact of an OCI registry: files pushed with oras, or a ModelPack",
    example="oci://ghcr.io/acme/pirate:v1",
    of_adapters="`oci://registry/repository:tag`",
    of_models="`oci://registry/repository:tag`",
    form="(([A-Za-z0-9-]+[.])+[A-Za-z0-9-]+(:[0-9]{1,5})?|[A-Za-z0-9-]+:[0-9]{1,5}|localhost)"
    "(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)+"
    f"(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}({_PINNED})?|{_PINNED})",
    form_message="must name a registry, a repository in it, and a tag or a digest, as oci://ghcr.io/acme/pirate:v1",
    secrets=(DOCKER_CONFIG, PASSWORD),
    read_by="oci",
)

SOURCES = declared(
    Source(
        scheme="hf",
        what="a repository of the hub that `MOTET_RUNNER_HUB_ENDPOINT` names",
        example="hf://org/name",
        of_adapters="`hf://organisation/name`",
        of_models="`hf://organisation/name`",
        form="[^/]+/[^/]+",
        form_message="must name a repository of the hub, as hf://organisation/name",
        revisions=True,
        secrets=(TOKEN,),
        read_by="hub",
    ),
    CLAIM,
    Source(
        scheme="https",
        what="a folder on the web",
        example="https://host/folder/",
        of_adapters="`https://…/` of a folder",
        of_models="`https://…/` of a folder",
        secrets=(TOKEN, PASSWORD),
        read_by="web",
    ),
    BUCKET,
    REGISTRY,
    FOLDER,
)


def _in_messages(sources: Iterable[Source]) -> tuple[Source, ...]:
    """First those that need no network, then by name."""
    return tuple(sorted(sources, key=lambda one: (one.network, one.scheme)))


ADAPTER_SOURCES = _in_messages(one for one in SOURCES.values() if one.of_adapters)
MODEL_SOURCES = _in_messages(one for one in SOURCES.values() if one.of_models)
READABLE = _in_messages(one for one in SOURCES.values() if one.read_by)
"""Those that runners read."""

ADAPTER_SCHEMES = tuple(one.scheme for one in ADAPTER_SOURCES)
MODEL_SCHEMES = tuple(one.scheme for one in MODEL_SOURCES)


def prefixes(sources: Iterable[Source]) -> str:
    return " or ".join(one.prefix for one in sources)


def refusal(scheme: str, known: Iterable[Source]) -> str:
    """What every door says of a scheme that no source of `known` has; empty if one has it."""
    known = tuple(known)
    if any(one.scheme == scheme for one in known):
        return ""
    return f"must begin with {prefixes(known)}"


def listed(words: Iterable[str], last: str) -> str:
    """The words with commas between them, and `last` before the last one."""
    *first, end = list(words) or [""]
    return f"{', '.join(first)}{last}{end}" if first else end


EXAMPLES = listed((one.example for one in READABLE), " or ")


def folder_of(uri: str) -> Path | None:
    """The folder of an absolute URI `file:///folder`, or `file:/folder`; None for other URIs."""
    scheme, _, rest = uri.partition(":")
    path = rest.removeprefix("//")
    if path.startswith("localhost/"):
        path = path.removeprefix("localhost")
    return Path(unquote(path)) if scheme == FOLDER.scheme and path.startswith("/") else None
