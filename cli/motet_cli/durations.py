"""Parses durations such as 30s, 45m, 12h and 90d."""

import re
from datetime import timedelta

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_TYPED = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
MAX_DURATION = timedelta(days=36_500)


def duration(text: str) -> timedelta:
    """Parse a duration. Raises ValueError that says how to write one."""
    match = _TYPED.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a duration: write a whole number with s, m, h or d, such as 30m, 12h or 90d")
    number, unit = match.groups()
    length = timedelta(**{_UNITS[unit]: int(number)})
    if length > MAX_DURATION:
        raise ValueError(f"is too long: at most {MAX_DURATION.days}d")
    return length
