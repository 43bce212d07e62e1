"""Refuses at once what no engine of this size could ever compute, and says what to change."""

from dataclasses import replace

from motet import promises
from motet.errors import ContextLengthExceeded, InvalidRequest
from motet.sampling import check_tokens
from motet_runner.interface import NewSequence


def admitted(new: NewSequence, *, max_length: int, vocabulary: int, promisable: int) -> NewSequence:
    """The sequence with its checked sampling options. Raises InvalidRequest. `promisable`: how many pages may be
    promised while no adapter but the sequence's is in use."""
    sampling = new.sampling.checked(vocabulary)
    length = len(new.prompt) + sampling.max_tokens
    if not new.prompt:
        raise InvalidRequest("The prompt is empty; it needs at least one token.", param="prompt")
    if not -(2**63) <= new.seed < 2**64:
        raise InvalidRequest("seed must be an integer of at most 64 bits.", param="seed")
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
    if new.promise > promisable:
        raise InvalidRequest(f"{new.promise} pages were promised, but at most {promisable} may be (OR-09).")
    fed = (*new.prompt, *new.delivered)
    check_tokens("prompt", fed, vocabulary)
    if (smallest := min(fed)) < 0:
        raise InvalidRequest(f"prompt must have token ids, not {smallest}.", param="prompt")
    return new if sampling is new.sampling else replace(new, sampling=sampling)


def too_long_beside_adapter(
    new: NewSequence, *, adapter_pages: int, pages: int, page_tokens: int
) -> InvalidRequest | None:
    """Why a request can never be computed beside its own adapter, in a pool of `pages`."""
    longest = promises.max_pages(len(new.prompt), new.sampling.max_tokens, page_tokens=page_tokens)
    if not adapter_pages or longest + adapter_pages <= pages:
        return None
    return InvalidRequest(
        f"The prompt has {len(new.prompt)} tokens and max_tokens is {new.sampling.max_tokens}: this needs {longest} "
        f"pages of device memory, and its adapter {adapter_pages}. This runner has {pages}. Shorten one of them, or "
        "raise the pool's engine.kvCacheMiB.",
        param="max_tokens",
    )
