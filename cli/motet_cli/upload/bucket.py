"""Sends files to a bucket: AWS S3, or a store with the same API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from urllib.parse import quote

from motet.errors import SetupError
from motet.sources import ACCESS_KEY, SESSION_TOKEN, STORE_ENDPOINT, STORE_REGION
from motet_cli.upload.blobs import Blob, changed
from motet_cli.upload.exchange import Answer, Exchange, Peer
from motet_runner.sources.s3 import S3Uri, is_endpoint, root_of
from motet_runner.sources.s3_refusals import OTHER_REGION_CODES, PASSING_CODES, REGION, code_of, region_of
from motet_runner.sources.s3_signature import AccessKey, signed
from motet_runner.sources.web_requests import PASSING, Interrupted

MAX_FILE_BYTES = 5 << 30
"""The most bytes of one request, as stores have it."""

ENDPOINTS = (f"{STORE_ENDPOINT}_S3", STORE_ENDPOINT)
REGIONS = (STORE_REGION, "AWS_DEFAULT_REGION")
CA_FILE = "AWS_CA_BUNDLE"
USUAL_REGION = "us-east-1"

SUM = "x-amz-meta-motet-sha256"
"""What an object is known by. Stores give ETags another meaning each."""

FULL_CODES = ("InsufficientCapacity", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull")


@dataclass(frozen=True, slots=True)
class Account:
    key: AccessKey
    region: str
    endpoint: str = ""
    """Empty for AWS"""
    ca_file: str = ""


def account_of(environment: Mapping[str, str]) -> Account:
    """From the variables that other tools use, too. Raises SetupError."""
    given = {name: environment.get(name, "").strip() for name in (*ACCESS_KEY, SESSION_TOKEN)}
    if missing := " and ".join(name for name in ACCESS_KEY if not given[name]):
        raise SetupError(
            f"{missing} must be set to send files to a bucket. For a profile of AWS's command line: "
            'eval "$(aws configure export-credentials --format env)"'
        )
    for name, value in given.items():
        if not (value.isascii() and value.isprintable()):
            raise SetupError(f"{name} has characters that no credential of AWS has, such as a line break. Correct it.")
    region = _first(environment, REGIONS) or USUAL_REGION
    if not REGION.fullmatch(region):
        raise SetupError(f"{STORE_REGION} is no region. Correct it.")
    endpoint = _first(environment, ENDPOINTS).rstrip("/")
    if endpoint and not is_endpoint(endpoint):
        raise SetupError(f"{STORE_ENDPOINT} must be https://host:port, without a path. Correct it.")
    return Account(AccessKey(*given.values()), region, endpoint, environment.get(CA_FILE, ""))


def _first(environment: Mapping[str, str], names: Sequence[str]) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


class _AnotherRegion(Exception):
    def __init__(self, told: str) -> None:
        super().__init__(told)
        self.told = told


class Bucket:
    """A folder of a bucket."""

    def __init__(self, uri: S3Uri, account: Account) -> None:
        self.name = f"s3://{uri.bucket}/{uri.prefix}".rstrip("/")
        self._uri = uri
        self._account = account
        self._region = account.region
        self._peer = Peer(
            name=self.name,
            address_from=STORE_ENDPOINT if account.endpoint else f"--to or {STORE_REGION}",
            ca_file=account.ca_file,
            ca_variable=CA_FILE,
        )

    def send(self, blobs: Sequence[Blob]) -> list[str]:
        """In this order. The names of those that were not there yet."""
        for blob in blobs:
            if blob.size > MAX_FILE_BYTES:
                raise SetupError(f"{blob.name} has {blob.size} bytes, but a bucket takes {MAX_FILE_BYTES} at once.")
        with Exchange(self._peer) as exchange:
            return [blob.name for blob in blobs if exchange.patiently(blob.name, partial(self._sent, exchange, blob))]

    def _sent(self, exchange: Exchange, blob: Blob) -> bool:
        """False: it was there."""
        try:
            return self._sent_to_region(exchange, blob)
        except _AnotherRegion as other:
            if not other.told or other.told == self._region:
                raise SetupError(
                    f"{self.name}: the bucket is in another region than {self._region}. Set {STORE_REGION}."
                ) from None
            self._region = other.told
        try:
            return self._sent_to_region(exchange, blob)
        except _AnotherRegion:
            raise SetupError(
                f"{self.name}: the store sends on from one region to another. Set {STORE_REGION}."
            ) from None

    def _sent_to_region(self, exchange: Exchange, blob: Blob) -> bool:
        if self._has(exchange, blob):
            return False
        headers = {SUM: blob.sha256}
        answer = self._ask(exchange, "PUT", blob, headers, blob.sha256)
        if answer.status not in (200, 201, 204):
            raise self._refusal(answer, blob)
        return True

    def _has(self, exchange: Exchange, blob: Blob) -> bool:
        """Asks for its first byte: unlike a HEAD, a refusal then says why. A key that may write and not read is
        enough: then everything is sent."""
        answer = self._ask(exchange, "GET", blob, {"range": "bytes=0-0"})
        if answer.status == 206:
            whole = answer.headers.get("content-range", "").rpartition("/")[2]
            return whole == str(blob.size) and answer.headers.get(SUM, "") == blob.sha256
        code = code_of(answer.body)
        absent = code in ("AccessDenied", "NoSuchKey") or (answer.status == 404 and not code)
        if answer.status not in (200, 416) and not absent:
            raise self._refusal(answer, blob)
        return False

    def _ask(
        self, exchange: Exchange, method: str, blob: Blob, headers: Mapping[str, str], body_sha256: str = ""
    ) -> Answer:
        url = root_of(self._uri.bucket, self._account.endpoint, self._region) + quote(self._uri.prefix + blob.name)
        body = {"body_sha256": body_sha256} if body_sha256 else {}
        own = signed(self._account.key, self._region, url, datetime.now(UTC), headers, method=method, **body)
        answer = exchange.send(method, url, {**headers, **own}, blob if body_sha256 else None)
        status, code = answer.status, code_of(answer.body)
        told = region_of(answer.body) or answer.headers.get("x-amz-bucket-region", "")
        malformed = code == "AuthorizationHeaderMalformed" and told in ("", self._region)
        if (status in (301, 307) or code in OTHER_REGION_CODES) and not malformed:
            raise _AnotherRegion(told if REGION.fullmatch(told) else "")
        if (status in PASSING or code in PASSING_CODES) and code not in FULL_CODES:
            raise Interrupted(f"the store answers {status} {code}".rstrip(), answer.retry_after)
        return answer

    def _refusal(self, answer: Answer, blob: Blob) -> SetupError:
        status, code = answer.status, code_of(answer.body)
        says = f"{self.name}: the store answers {status} {code}".rstrip()
        key, secret = ACCESS_KEY
        if code in FULL_CODES or status == 507:
            return SetupError(f"{says} for {blob.name}: it is full. Make room there, or choose another bucket in --to.")
        match code:
            case "NoSuchBucket" | "InvalidBucketName":
                at = f", or {STORE_ENDPOINT}" if self._account.endpoint else ""
                return SetupError(f"{says}: there is no bucket {self._uri.bucket}. Create it, or correct --to{at}.")
            case "InvalidAccessKeyId" | "XAdminUserNotFound" | "AuthorizationHeaderMalformed":
                return SetupError(f"{says}: it does not know {key}. Correct it.")
            case "SignatureDoesNotMatch":
                return SetupError(f"{says}: {secret} does not belong to {key}. Correct it.")
            case "ExpiredToken" | "TokenRefreshRequired" | "InvalidToken":
                return SetupError(f"{says}: {SESSION_TOKEN} has expired, or is that of other keys. Renew all three.")
            case "RequestTimeTooSkewed" | "RequestExpired":
                return SetupError(f"{says}: the clock of this machine differs from the store's. Set the clock.")
            case "XAmzContentSHA256Mismatch" | "BadDigest":
                return changed(blob.name)
        if status in (401, 403):
            return SetupError(f"{says} for {blob.name}: {key} needs the permission s3:PutObject for {self.name}.")
        return SetupError(f"{says} for {blob.name}.")
