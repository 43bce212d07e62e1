"""What no engine of this size could ever compute, and is refused at once with what to change."""

from motet.errors import ContextLengthExceeded, InvalidRequest
from motet_runner.interface import NewSequence


def refuse_what_cannot_be(new: NewSequence, *, max_length: int, vocabulary: int, pages: int) -> None:
    """Raises InvalidRequest. `pages` may be promised in all."""
    sampling = new.sampling
    length = len(new.prompt) + sampling.max_tokens
    if not new.prompt:
        raise InvalidRequest("The prompt is empty; it needs at least one token.", param="prompt")
    if sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1.", param="max_tokens")
    if len(new.delivered) >= sampling.max_tokens:
        raise InvalidRequest("All of max_tokens has been delivered already; nothing is left to generate.")
    if length > max_length:
        raise ContextLengthExceeded(
            f"The prompt has {len(new.prompt)} tokens and max_tokens is {sampling.max_tokens}; "
            f"together {length}, and the context holds {max_length}. Shorten one of them.",
            param="max_tokens" if len(new.prompt) < max_length else "messages",
        )
    if new.promise < 1:
        raise InvalidRequest(f"A promise is at least one page, not {new.promise}.")
    if new.promise > pages:
        raise InvalidRequest(f"{new.promise} pages were promised and this runner has {pages} (OR-09).")
    fed = (*new.prompt, *new.delivered)
    largest, smallest = max(fed), min(fed)
    if largest >= vocabulary or smallest < 0:
        wrong = largest if largest >= vocabulary else smallest
        raise InvalidRequest(f"Token {wrong} is not in the vocabulary of {vocabulary}.", param="prompt")
