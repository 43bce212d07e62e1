"""What happens to a request at the scheduler, for its timeline: the kinds, and the words that people read."""

from motet.timeline import Kind


class Happening(Kind):
    QUEUED = "queued", "class {0}"
    QUEUED_AGAIN = "queued", "class {0}, again after placement {1}"
    ADOPTED = "adopted", "it ran on runner {0} (placement {1}) when this scheduler heard of it"
    HELD = "held", "{0} is over its {1}"
    LET_IN = "let in", "its quota lets it into the queue"
    WAITS = "waits", "{0}{1}"
    LOADS_AHEAD = "loads ahead", "its adapter is loaded on runner {0}, where it may be placed next"
    PLACED = "placed", "on runner {0} with {2} pages (placement {1}){3}"
    DECLINED = "declined", "by runner {0}: {1}"
    MOVED = "moved", "away from runner {0}: {1}"
    LOST = "lost", "{0}"
    EXTENDED = "extended", "its promise grows to {0} pages"
    PARKED = "parked", "its runner has too little memory; it goes on when {0} pages are free"
    RESUMED = "resumed", "with {0} pages"
    REFUSED = "refused", "{0}"
    CANCELLED = "cancelled", ""
    GATEWAY_GONE = "ended", "its gateway has gone, or does not know it any more"
    FINISHED = "finished", "{0} tokens ({1})"
