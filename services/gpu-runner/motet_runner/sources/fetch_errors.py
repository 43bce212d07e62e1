"""How a fetch fails: each with the reason of its condition, and with when looking again makes sense."""

from motet.errors import AdapterFetchFailed

RETRY_SOON_SECONDS = 5.0
"""Seconds: something passing, such as a cut connection or a full disk. Doubles each time, up to LATER."""

RETRY_LATER_SECONDS = 300.0
"""Seconds: what somebody must put right at the other end: a missing file, a Secret, a right."""


def temporary(message: str, *, after: float = 0.0) -> AdapterFetchFailed:
    return AdapterFetchFailed(message, retry_after=max(RETRY_SOON_SECONDS, after))


def missing(message: str) -> AdapterFetchFailed:
    return AdapterFetchFailed(message, retry_after=RETRY_LATER_SECONDS)


def credentials(message: str) -> AdapterFetchFailed:
    return AdapterFetchFailed(message, reason="CredentialsInvalid", retry_after=RETRY_LATER_SECONDS)


def forbidden(message: str) -> AdapterFetchFailed:
    """What the platform does not let a tenant reach: nothing changes by asking again."""
    return AdapterFetchFailed(message)


def too_large(message: str) -> AdapterFetchFailed:
    return AdapterFetchFailed(message, reason="TooLarge")


def malformed(message: str) -> AdapterFetchFailed:
    return AdapterFetchFailed(message, reason="FormatRejected")


def another_digest(message: str) -> AdapterFetchFailed:
    return AdapterFetchFailed(message, reason="DigestMismatch")


def no_space(message: str) -> AdapterFetchFailed:
    return AdapterFetchFailed(message, reason="NoSpace", retry_after=RETRY_SOON_SECONDS)
