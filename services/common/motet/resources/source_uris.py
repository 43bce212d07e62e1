"""URIs of sources: which schemes adapters and models may come from, and which form each must have.

A runner reads them with `motet_runner.sources`: a new scheme needs both.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import StringConstraints

from motet.resources.validation_rules import Rule, ValidatedBy, quoted

ADAPTER_SCHEMES = ("file", "hf", "https")
MODEL_SCHEMES = ("file", "pvc", "hf", "https")

PLANNED_SCHEMES: dict[str, str] = {
    "s3": "object stores",
    "oci": "OCI registries",
}
"""Validation says that these come later, and with what. When a runner can read one, move it to the schemes above."""

URI_PATTERN = r"^[a-z][a-z0-9+.-]*://\S+$"
URI_SENTENCE = "must be a URI such as hf://organisation/name or https://files.example.com/legal/, without spaces"


def _uri_rules(known: Iterable[str], coming: Mapping[str, str]) -> tuple[Rule, ...]:
    """The rules for the URI of a source. `known` are the schemes that Motet reads, `coming` those that are planned."""
    use = " or ".join(f"{scheme}://" for scheme in known)
    unsafe = "[@?%]|/[.][.](/|$)"
    schemes = f"^({'|'.join([*known, *coming])})://"
    return (
        Rule(
            cel=f"!self.matches({quoted(unsafe)})",
            message="must not contain '..', '@', '?' or '%' (no traversal, no inline credentials, no signed URLs)",
            holds=lambda uri: re.search(unsafe, uri) is None,
        ),
        *(_not_yet(scheme, what, use) for scheme, what in coming.items()),
        Rule(
            cel=f"self.matches({quoted(schemes)})",
            message=f"must begin with {use}",
            holds=lambda uri: re.search(schemes, uri) is not None,
        ),
        Rule(
            cel="!self.startsWith('file://') || self.startsWith('file:///')",
            message="must be absolute in a cluster (file:///models/base); only motet up knows the manifest's folder",
            holds=None,
        ),
    )


def _form(scheme: str, rest: str, message: str) -> Rule:
    """A rule for the text after a scheme."""
    start, whole = f"{scheme}://", f"^{scheme}://{rest}$"
    return Rule(
        cel=f"!self.startsWith({quoted(start)}) || self.matches({quoted(whole)})",
        message=message,
        holds=lambda uri: not uri.startswith(start) or re.search(whole, uri) is not None,
    )


def _not_yet(scheme: str, what: str, use: str) -> Rule:
    start = f"{scheme}://"
    return Rule(
        cel=f"!self.startsWith({quoted(start)})",
        message=f"not yet: {start} ({what}) comes later; use {use}",
        holds=lambda uri: not uri.startswith(start),
    )


_HUB_FORM = _form("hf", "[^/]+/[^/]+", "must name a repository of the hub, as hf://organisation/name")
_CLAIM_FORM = _form("pvc", "[^/]+/.+", "must name a claim and a folder in it, as pvc://models/llama")
AdapterUri = Annotated[
    str,
    StringConstraints(pattern=URI_PATTERN, max_length=1024),
    ValidatedBy(*_uri_rules(ADAPTER_SCHEMES, PLANNED_SCHEMES), _HUB_FORM),
]
ModelUri = Annotated[
    str,
    StringConstraints(pattern=URI_PATTERN, max_length=1024),
    ValidatedBy(*_uri_rules(MODEL_SCHEMES, PLANNED_SCHEMES), _HUB_FORM, _CLAIM_FORM),
]
