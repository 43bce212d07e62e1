"""Signs requests for object stores with AWS Signature Version 4. Pure."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import urlsplit

import httpx2

EMPTY_BODY = hashlib.sha256(b"").hexdigest()

_ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, slots=True)
class AccessKey:
    id: str
    secret: str = field(repr=False)
    session_token: str = field(default="", repr=False)


def signed(
    key: AccessKey,
    region: str,
    url: str,
    at: datetime,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    body_sha256: str = EMPTY_BODY,
) -> dict[str, str]:
    """The headers that a request of `url` needs besides. Path and query of the URL are percent-encoded but for letters,
    digits and `-._~/`. `headers`: others that are signed, with lower-case names."""
    parts = urlsplit(url)
    stamp = at.strftime("%Y%m%dT%H%M%SZ")
    added = {"x-amz-content-sha256": body_sha256, "x-amz-date": stamp}
    if key.session_token:
        added["x-amz-security-token"] = key.session_token
    named = {**(headers or {}), **added, "host": httpx2.URL(url).netloc.decode()}  # as the client writes it
    names = ";".join(sorted(named))
    request = "\n".join(
        (
            method,
            parts.path or "/",
            "&".join(sorted(parts.query.split("&"))),
            *(f"{name}:{named[name].strip()}" for name in sorted(named)),
            "",
            names,
            body_sha256,
        )
    )
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = f"{_ALGORITHM}\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    derived = f"AWS4{key.secret}".encode()
    for part in scope.split("/"):
        derived = _hmac(derived, part)
    signature = _hmac(derived, text).hex()
    credential = f"{_ALGORITHM} Credential={key.id}/{scope},SignedHeaders={names},Signature={signature}"
    return {**added, "authorization": credential}


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
