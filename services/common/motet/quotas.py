"""How quotas fill: the scheduler counts by it, and gateways tell their clients."""

BUCKET_SECONDS = 10.0
"""Of a minute's grant, what this long grants may be used at once."""

MAX_DEBT_SECONDS = 60.0
"""Nobody has to wait longer until nothing is owed."""


CLAIM_SECONDS = 2.0
"""How much later than told one may come: some read whole seconds, and all need a way back."""

MAX_CLAIMS_IN_MESSAGE = 50
"""To take one in takes up to 0.2 ms, if there are a thousand."""


def full_in(left: float, per_minute: int) -> float:
    """Seconds until all of it is there again that may be used at once."""
    return BUCKET_SECONDS - left * 60 / per_minute
