"""The errors of a fetch. Each has the reason for the adapter's condition, and the time until the next attempt."""

from motet.errors import AdapterFetchFailed

RETRY_SOON_SECONDS = 5.0
"""For temporary errors, such as a broken connection or a full disk. The time doubles with each failure, up to
RETRY_LATER_SECONDS."""

RETRY_LATER_SECONDS = 300.0
"""For errors that a person must correct at the source: a missing file, a wrong Secret, a missing permission."""


def temporary(message: str, *, after: float = 0.0) -> AdapterFetchFailed:
    return AdapterFetchFailed(message, retry_after=max(RETRY_SOON_SECONDS, after))


def missing(message: str) -> AdapterFetchFailed:
    return AdapterFetchFailed(message, retry_after=RETRY_LATER_SECONDS)


def credentials(message: str) -> AdapterFetchFailed:
    return AdapterFetchFailed(message, reason="CredentialsInvalid", retry_after=RETRY_LATER_SECONDS)


def forbidden(message: str) -> AdapterFetchFailed:
    """For what the platform does not allow a tenant to read. Another attempt would not help."""
    return AdapterFetchFailed(message)


def too_large(message: str) -> AdapterFetchFailed:
    return AdapterFetchFailed(message, reason="TooLarge")


def malformed(message: str, *, again: bool = False) -> AdapterFetchFailed:
    """`again`: the source may have other bytes later under the same name."""
    return AdapterFetchFailed(message, reason="FormatRejected", retry_after=RETRY_LATER_SECONDS if again else 0.0)


def another_digest(message: str) -> AdapterFetchFailed:
    return AdapterFetchFailed(message, reason="DigestMismatch")


NO_SPACE = "NoSpace"
NO_ROOM = "NoRoom"
"""Inside of the runner. Users read NO_SPACE."""


def no_space(message: str) -> AdapterFetchFailed:
    """The disk is full."""
    return AdapterFetchFailed(message, reason=NO_SPACE, retry_after=RETRY_SOON_SECONDS)


def no_room(message: str) -> AdapterFetchFailed:
    """The bound on adapters' bytes leaves too little beside what is in use. The disk itself may be empty."""
    return AdapterFetchFailed(message, reason=NO_ROOM, retry_after=RETRY_SOON_SECONDS)
