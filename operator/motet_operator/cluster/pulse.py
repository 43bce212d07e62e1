"""Whether the operator still does its work, by how long ago each part of it last did something. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

STALLED_SECONDS = 60.0
SILENT_SECONDS = 150.0
"""Bookmarks come every minute, and a watch that is silent for a little longer is opened anew: this one is lost."""

ANSWERED_SECONDS = 30.0
"""A watch is taken for dead only while the API server answers everything else: nobody starts again for an outage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Seconds since then."""

    round: float
    answer: float
    watches: Mapping[str, float]
    """By the path that is watched."""

    def dead_because(self) -> str:
        """Why only another process can help; empty: nothing is wrong, or nothing that it could mend."""
        if self.round > STALLED_SECONDS:
            return f"the work loop has not ticked for {self.round:.0f} s"
        if self.answer > ANSWERED_SECONDS:
            return ""
        path, silent = max(self.watches.items(), key=lambda one: one[1], default=("", 0.0))
        return f"the watch of {path} has said nothing for {silent:.0f} s" if silent > SILENT_SECONDS else ""

    def unready_because(self, resync_seconds: float) -> str:
        """Lists are asked for so often, and are all that is asked for while nothing changes."""
        if self.answer > ANSWERED_SECONDS + resync_seconds:
            return f"the API server has said nothing for {self.answer:.0f} s"
        return ""
