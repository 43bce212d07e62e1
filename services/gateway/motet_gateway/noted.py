"""What happens to a request at the gateway, for its timeline: the kinds, and the words that people read."""

from motet.timeline import Kind


class Noted(Kind):
    RECEIVED = "received", "for {0}"
    HELD = "waits", "{0}"
    PREPARED = "prepared", "its model is known, and its prompt has {0} tokens"
    SENT = "sent", "to the scheduler, as class {0}"
    NO_SCHEDULER = "waits", "the scheduler does not answer"
    TOLD = "waits", "{1} (number {0})"
    PLACED = "placed", "on runner {0} (placement {1})"
    MOVED = "moved", "to runner {0} (placement {1}): {2}"
    LOADS = "loads", "the runner loads adapter {0}"
    AT_RUNNER = "waits", "at the runner, for a place in the batch"
    READS = "computes", "the runner reads the prompt"
    WRITES = "computes", "the runner writes the answer"
    PARKED = "parked", "the runner has too little memory"
    LOST = "lost", "on runner {0}: {1}"
    RESUMED = "resumed", "{0:.3g} s after its last token"
    FINISHED = "finished", "{0} tokens ({1})"
    FAILED = "failed", "{0}: {1}"
    CANCELLED = "cancelled", "{0}"
    ANSWERED = "answered", "with status {0}"
    REPLACED = "starts again", "its model was replaced"
