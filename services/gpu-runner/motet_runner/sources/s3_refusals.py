"""What the error of an object store means, and what to do. Pure."""

import re

from motet.errors import AdapterFetchFailed
from motet_runner.sources.fetch_errors import RETRY_LATER_SECONDS, credentials, missing, temporary

MAX_ERROR_BYTES = 64 << 10
"""The most bytes of an error that are read."""

PASSING_CODES = ("InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling")
"""After these the next attempt may succeed, whatever the status is."""

OTHER_REGION_CODES = (
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
)

REGION = re.compile(r"[a-z0-9-]{1,64}")

_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>")
_REGION_TOLD = re.compile(rb"<Region>\s*([a-z0-9-]{1,64})\s*</Region>")

_SECRET = "source.credentialsSecretRef"  # noqa: S105 - a field's name


def passing(status: int, code: str) -> str:
    """Why the next attempt may succeed, as the end of a sentence."""
    if code == "SlowDown" or status == 429:
        return (
            f"the store answers {status} {code}: it is asked too often. If that stays, the platform can lower "
            "MOTET_RUNNER_FETCHES_AT_ONCE"
        )
    return f"the store answers {status}{f' {code}' if code else ''}"


def code_of(body: bytes) -> str:
    found = _CODE.search(body)
    return found[1].decode() if found else ""


def region_of(body: bytes) -> str:
    found = _REGION_TOLD.search(body)
    return found[1].decode() if found else ""


def refusal(name: str, what: str, status: int, code: str, *, given: bool) -> AdapterFetchFailed:
    """`name`: the source. `what`: what was asked for. `given`: whether there was a Secret."""
    answer = f"{name} answers {status}{f' {code}' if code else ''}"
    match code:
        case "AuthorizationHeaderMalformed":
            return credentials(
                f"{answer}: AWS_ACCESS_KEY_ID of the Secret in {_SECRET} is malformed. Are the two keys swapped? Or "
                "the bucket is in another region, which the store does not name: set AWS_REGION in the Secret, or the "
                "platform can set MOTET_RUNNER_S3_REGION."
            )
        case "InvalidAccessKeyId":
            return credentials(f"{answer}: it does not know AWS_ACCESS_KEY_ID of the Secret in {_SECRET}. Correct it.")
        case "SignatureDoesNotMatch":
            return credentials(
                f"{answer}: AWS_SECRET_ACCESS_KEY of the Secret in {_SECRET} does not belong to its AWS_ACCESS_KEY_ID. "
                "Correct it."
            )
        case "ExpiredToken" | "TokenRefreshRequired":
            return credentials(
                f"{answer}: AWS_SESSION_TOKEN of the Secret in {_SECRET} has expired. Renew all its keys."
            )
        case "InvalidToken":
            return credentials(
                f"{answer}: AWS_SESSION_TOKEN of the Secret in {_SECRET} does not belong to its keys. Correct it, or "
                "remove it if the keys have none."
            )
        case "RequestTimeTooSkewed" | "RequestExpired":
            return temporary(
                f"{answer}: the clock of this runner's machine differs from the store's by many minutes. Set the clock."
            )
        case "NoSuchBucket" | "InvalidBucketName":
            return missing(f"{answer}: there is no such bucket. Correct source.uri, or the endpoint of the store.")
        case "InvalidObjectState":
            return missing(f"{answer}: {what} is archived. Restore it, or copy it to a storage class that can be read.")
    if status in (401, 403):
        if given:
            return credentials(
                f"{answer} for {what}: the Secret in {_SECRET} does not open it. Its key needs the permissions "
                "s3:ListBucket and s3:GetObject."
            )
        return credentials(f"{answer} for {what}: it is not public. Name a Secret in {_SECRET}.")
    return missing(f"Motet cannot fetch {what} from {name}: the store answers {status}{f' {code}' if code else ''}.")


class AnotherRegion(AdapterFetchFailed):
    def __init__(self, name: str, told: str) -> None:
        where = f"is in the region {told}" if told else "is in another region, which the store does not name"
        super().__init__(
            f"The bucket of {name} {where}. Set AWS_REGION in the Secret of {_SECRET}, or the platform can set "
            "MOTET_RUNNER_S3_REGION.",
            retry_after=RETRY_LATER_SECONDS,
        )
        self.told = told
