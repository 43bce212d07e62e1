"""Traces in the words of W3C's trace context: to which trace of its client's a request belongs. Pure.

Motet makes no spans of its own. What came is passed on, and log lines about a request name its trace.
"""

import re
from collections.abc import Sequence

KNOWN_FLAGS = 0b11
"""Sampled, and a trace id that is random. A sender sets no other ones."""

_TRACEPARENT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})"
    r"-(?P<trace>(?!0{32})[0-9a-f]{32})"
    r"-(?P<parent>(?!0{16})[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


def traceparent_of(values: Sequence[str]) -> str:
    """From the headers of that name, as version 00. Empty: there is none, or none that counts, as the standard says:
    what does not fit its form is ignored, and so are several."""
    found = _TRACEPARENT.fullmatch(values[0]) if len(values) == 1 else None
    if found is None or (found["version"] == "00" and found["more"]):
        return ""
    return f"00-{found['trace']}-{found['parent']}-{int(found['flags'], 16) & KNOWN_FLAGS:02x}"


def trace_of(traceparent: str) -> str:
    """The id of the trace; empty: it names none."""
    return traceparent_of([traceparent])[3:35] if traceparent else ""


def in_log(traceparent: str) -> dict[str, str]:
    """What a log line says of it."""
    trace = trace_of(traceparent)
    return {"trace": trace} if trace else {}
