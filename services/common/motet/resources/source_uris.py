"""URIs of sources as fields of manifests: their rules and descriptions, from the table `motet.sources.SOURCES`."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import StringConstraints

from motet.resources.validation_rules import Rule, ValidatedBy, quoted
from motet.sources import (
    ADAPTER_SCHEMES,
    ADAPTER_SOURCES,
    FOLDER,
    MODEL_SOURCES,
    REGISTRY,
    SOURCES,
    SecretKeys,
    Source,
    listed,
    prefixes,
    refusal,
)

URI_PATTERN = r"^[a-z][a-z0-9+.-]*://[^\s\x00-\x1f\x7f]+$"
URI_SENTENCE = (
    "must be a URI such as hf://organisation/name or https://files.example.com/legal/, without spaces and control "
    "characters"
)


def _uri_rules(known: Sequence[Source]) -> tuple[Rule, ...]:
    """The rules for the URI of a source that is one of `known`. Those of a registry have one form, with an '@' before
    a digest."""
    unsafe = "[@?%]|/[.][.](/|$)"
    schemes = f"^({'|'.join(one.scheme for one in known)})://"
    return (
        Rule(
            cel=f"self.startsWith('{REGISTRY.prefix}') || !self.matches({quoted(unsafe)})",
            message="must not contain '..', '@', '?' or '%' (no traversal, no inline credentials, no signed URLs)",
            holds=lambda uri: uri.startswith(REGISTRY.prefix) or re.search(unsafe, uri) is None,
        ),
        Rule(
            cel=f"self.matches({quoted(schemes)})",
            message=refusal("", known),
            holds=lambda uri: re.search(schemes, uri) is not None,
        ),
        Rule(
            cel=f"!self.startsWith('{FOLDER.prefix}') || self.startsWith('{FOLDER.prefix}/')",
            message="must be absolute in a cluster (file:///models/base); only motet up knows the manifest's folder",
            holds=None,
        ),
        *(_form(one) for one in SOURCES.values() if one in known and one.form),
    )


def _form(source: Source) -> Rule:
    start, whole = source.prefix, f"^{source.prefix}{source.form}$"
    return Rule(
        cel=f"!self.startsWith({quoted(start)}) || self.matches({quoted(whole)})",
        message=source.form_message,
        holds=lambda uri: not uri.startswith(start) or re.search(whole, uri) is not None,
    )


AdapterUri = Annotated[
    str,
    StringConstraints(pattern=URI_PATTERN, max_length=1024),
    ValidatedBy(*_uri_rules(ADAPTER_SOURCES)),
]
ModelUri = Annotated[
    str,
    StringConstraints(pattern=URI_PATTERN, max_length=1024),
    ValidatedBy(*_uri_rules(MODEL_SOURCES)),
]
IMAGE_EXAMPLE = REGISTRY.example.removeprefix(REGISTRY.prefix)
Image = Annotated[
    str,
    StringConstraints(max_length=1000),
    ValidatedBy(
        Rule(
            cel=f"self.matches({quoted(f'^{REGISTRY.form}$')})",
            message=REGISTRY.form_message.replace(REGISTRY.example, IMAGE_EXAMPLE),
            holds=lambda image: re.fullmatch(REGISTRY.form, image) is not None,
        )
    ),
]
if TYPE_CHECKING:
    AdapterScheme = str
else:
    AdapterScheme = Literal[ADAPTER_SCHEMES]


def begins(sources: Sequence[Source]) -> str:
    """In CEL: whether `self.uri` is of one of these sources."""
    return " || ".join(f"self.uri.startsWith('{one.prefix}')" for one in sources)


def begins_as_one(sources: Sequence[Source]) -> str:
    """The same as an operand of another operator."""
    return begins(sources) if len(sources) == 1 else f"({begins(sources)})"


def is_of(uri: str | None, sources: Sequence[Source]) -> bool:
    return uri is not None and uri.startswith(tuple(one.prefix for one in sources))


def with_revisions(known: Sequence[Source]) -> list[Source]:
    return [one for one in known if one.revisions]


def on_network(known: Sequence[Source], *, yes: bool = True) -> list[Source]:
    return [one for one in known if one.network == yes]


def with_secrets(known: Sequence[Source], *, yes: bool = True) -> list[Source]:
    return [one for one in known if bool(one.secrets) == yes]


def only_with_secrets(known: Sequence[Source]) -> str:
    return f"credentialsSecretRef may only be set for an {prefixes(with_secrets(known))} source"


def only_with_revisions(known: Sequence[Source]) -> str:
    return f"revision may only be set for an {prefixes(with_revisions(known))} source"


def revision_meaning(known: Sequence[Source]) -> str:
    named = listed((f"`{one.prefix}`" for one in with_revisions(known)), " and ")
    return f"Only for {named}: a branch, tag or commit. Absent: the main branch."


def told(secrets: Sequence[SecretKeys], options: SecretKeys = ()) -> str:
    """The keys that a Secret may have, for a page."""
    keys = listed((" and ".join(f"`{key}`" for key in keys) for keys in secrets), ", or ")
    return f"{keys} (optional: {', '.join(f'`{key}`' for key in options)})" if options else keys


_every = SOURCES.values()
_adapters = listed((one.of_adapters for one in _every if one.of_adapters and one is not FOLDER), ", or ")
_models = listed((one.of_models for one in _every if one.of_models), ", or ")
_secrets = list(dict.fromkeys(keys for one in _every for keys in one.secrets))
ADAPTER_URI_MEANING = f"The address of the PEFT folder: {_adapters}. {FOLDER.of_adapters}."
MODEL_URI_MEANING = f"The address of the base model: {_models}. Immutable."
_options = tuple(dict.fromkeys(key for one in _every for key in one.secret_options))
SECRET_MEANING = f"The Secret's name. Its keys must be {told(_secrets, _options)}."
ONLY_ON_NETWORK = "may only be set for a source that is reached over the network"
