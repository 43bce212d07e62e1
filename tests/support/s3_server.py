"""An object store over TLS that checks signatures by the published algorithm, with code of its own.

async with s3_server(tmp_path) as store:
    store.keys["AKIA1"] = "secret"
    store.publish("models", "acme/pirate", folder)
"""

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote_plus
from xml.sax.saxutils import escape

from aiohttp import web

from tests.support.source_servers import EndlessBody, ErrorStatus, WebServer, running

EMPTY = hashlib.sha256(b"").hexdigest()


class S3Server(WebServer):
    """A bucket's files lie at /bucket/key. Faults of a listing are those of /bucket/."""

    def __init__(self, ca_file: Path) -> None:
        super().__init__(ca_file)
        self.keys: dict[str, str] = {}
        self.session_token = ""
        self.public: set[str] = set()
        self.region = "us-east-1"
        self.tells_region = True
        self.page_size = 1000
        self.clock_ahead = timedelta()
        self.claims: dict[str, int] = {}
        """Sizes that the listing claims, by path."""
        self.more_entries = ""
        """XML that each page of a listing has besides."""
        self.goes_on = False
        """Whether each page of a listing says that there is another one."""
        self.after_listing: Callable[[], object] | None = None

    def publish(self, bucket: str, prefix: str, folder: Path) -> str:
        self.put(f"/{bucket}/{prefix}/", folder)
        return f"s3://{bucket}/{prefix}"

    @property
    def listings(self) -> int:
        return sum(one.path.count("/") == 2 and one.path.endswith("/") for one in self.asked)

    async def serve(self, request: web.Request, path: str, headers: dict[str, str] | None = None) -> web.StreamResponse:
        bucket = path.split("/")[1]
        fault = self.faults.get(path)
        if not (isinstance(fault, ErrorStatus) and fault.times > 0):
            if refused := self._refusal(request, bucket):
                return refused
            if "list-type" in request.query:
                if isinstance(fault, EndlessBody):
                    return await self.endless_answer(request)
                answer = self._listing(request, bucket)
                if self.after_listing is not None:
                    self.after_listing()
                return answer
            body = self.files.get(path)
            if body is None:
                return failed(404, "NoSuchKey")
        return await super().serve(request, path, headers)

    async def endless_answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"<ListBucketResult>")
        while True:
            await response.write(b" " * 65536)
            self.sent += 65536
            await asyncio.sleep(0)

    def _refusal(self, request: web.Request, bucket: str) -> web.Response | None:
        given = request.headers.get("authorization", "")
        if not given:
            return None if bucket in self.public else failed(403, "AccessDenied")
        algorithm, _, rest = given.partition(" ")
        words = dict(part.strip().split("=", 1) for part in rest.split(","))
        if words["Credential"].count("/") != 4:
            return failed(400, "AuthorizationHeaderMalformed")
        key, day, region, service, end = words["Credential"].split("/")
        if (algorithm, service, end) != ("AWS4-HMAC-SHA256", "s3", "aws4_request"):
            return failed(400, "InvalidRequest")
        if region != self.region:
            told = f"<Region>{self.region}</Region>" if self.tells_region else ""
            return failed(400, "AuthorizationHeaderMalformed", told)
        if key not in self.keys:
            return failed(403, "InvalidAccessKeyId")
        stamp = request.headers["x-amz-date"]
        signed_at = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if abs(datetime.now(UTC) + self.clock_ahead - signed_at) > timedelta(minutes=15):
            return failed(403, "RequestTimeTooSkewed")
        if self.session_token and request.headers.get("x-amz-security-token") != self.session_token:
            return failed(400, "ExpiredToken")
        if stamp[:8] != day or words["Signature"] != self._signature(request, words["SignedHeaders"], key):
            return failed(403, "SignatureDoesNotMatch")
        return None

    def _signature(self, request: web.Request, names: str, key: str) -> str:
        must = {"host", *(name.lower() for name in request.headers if name.lower().startswith("x-amz-"))}
        if not must <= set(names.split(";")) or request.headers["x-amz-content-sha256"] != EMPTY:
            return "unsigned"
        headers = {name: request.headers[name] for name in names.split(";")}
        return signature(request.method, request.raw_path, headers, self.keys[key], self.region)

    def _listing(self, request: web.Request, bucket: str) -> web.Response:
        root = f"/{bucket}/"
        if not any(path.startswith(root) for path in self.files):
            return failed(404, "NoSuchBucket")
        prefix, start = request.query.get("prefix", ""), int(request.query.get("continuation-token", "0"))
        keys = sorted(path.removeprefix(root) for path in self.files if path.startswith(root + prefix))
        if request.query.get("delimiter") == "/":
            keys = [key for key in keys if "/" not in key.removeprefix(prefix)]
        page = keys[start : start + self.page_size]
        more = self.goes_on or start + self.page_size < len(keys)
        entries = "".join(self._entry(root, key, request.query.get("encoding-type") == "url") for key in page)
        follows = f"<NextContinuationToken>{start + self.page_size}</NextContinuationToken>" if more else ""
        return web.Response(
            content_type="application/xml",
            text='<?xml version="1.0" encoding="UTF-8"?>\n'
            f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket}</Name>'
            f"<EncodingType>url</EncodingType><IsTruncated>{str(more).lower()}</IsTruncated>{follows}"
            f"{entries}{self.more_entries}</ListBucketResult>",
        )

    def _entry(self, root: str, key: str, encoded: bool) -> str:
        body = self.files[root + key]
        size = self.claims.get(root + key, len(body))
        name = quote_plus(key, safe="/") if encoded else escape(key)
        etag = f"&quot;{hashlib.sha256(body).hexdigest()}&quot;"
        return f"<Contents><Key>{name}</Key><ETag>{etag}</ETag><Size>{size}</Size></Contents>"


def signature(method: str, target: str, headers: Mapping[str, str], secret: str, region: str) -> str:
    """The signature of a request. `headers`: those that are signed, with lower-case names."""
    path, _, query = target.partition("?")
    canonical = f"{method}\n{path}\n{'&'.join(sorted(query.split('&')))}\n"
    for name in sorted(headers):
        canonical += f"{name}:{headers[name]}\n"
    canonical += f"\n{';'.join(sorted(headers))}\n{headers['x-amz-content-sha256']}"
    stamp = headers["x-amz-date"]
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    derived = ("AWS4" + secret).encode()
    for word in (stamp[:8], region, "s3", "aws4_request", text):
        derived = hmac.new(derived, word.encode(), hashlib.sha256).digest()
    return derived.hex()


def failed(status: int, code: str, more: str = "") -> web.Response:
    return web.Response(status=status, body=error_body(code, more), content_type="application/xml")


def error_body(code: str, more: str = "") -> bytes:
    return f"<Error><Code>{code}</Code><Message>geheim</Message>{more}</Error>".encode()


@asynccontextmanager
async def s3_server(folder: Path, host: str = "127.0.0.1") -> AsyncIterator[S3Server]:
    async with running(folder / f"s3-{host}", S3Server, host) as server:
        assert isinstance(server, S3Server)
        yield server
