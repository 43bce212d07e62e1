"""A series of iterations in which the same sequences decode beside chunks of one prompt, and none of them ends it.

Only simulators take such iterations at once. An engine composes each of them anew: how much of a prompt one takes
depends on how long the one before has taken.
"""

from collections import defaultdict
from dataclasses import dataclass
from operator import is_

from motet.domain import Digest
from motet_runner.plan.composer import Iteration, Work
from motet_runner.plan.decode_round import DecodeRound
from motet_runner.plan.prefix_cache import PageChain
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.sequence_memory import SequenceMemory


@dataclass(frozen=True, slots=True)
class ChunkRound:
    decoding: DecodeRound
    prompt: Sequence
    prompts: int
    """How many sequences are in their prompt phase, as the costs are asked. All but one wait for that one."""
    most_tokens: int
    """The most prompt tokens of an iteration, whatever they cost."""

    def leap(self, tokens: int, memory: SequenceMemory) -> None:
        """Takes this number of the prompt's tokens as computed; at least one is left."""
        prompt = self.prompt
        memory.grow(prompt, prompt.scheduled + tokens)
        memory.rows.new_pages_of(prompt)
        prompt.scheduled += tokens
        prompt.computed = prompt.scheduled


def chunk_of(iteration: Iteration) -> Work | None:
    """The chunk beside an iteration's decodes, if it has one, and the next iteration goes on with the same prompt."""
    if not iteration.decodes or not iteration.prompts or len(iteration.prefills) != 1:
        return None
    chunk = iteration.prefills[0]
    return None if chunk.samples else chunk


def may_go_on_beside(decodes: list[Work], prompt: Sequence, runnable: list[Sequence]) -> bool:
    """True if the next iterations only decode these and go on with the prompt, until a sequence changes its state.

    Nobody may stand at a promise, which is counted in each iteration, and nobody is suspect. Nobody waits who might
    find pages in the prefix cache that the decodes add to it.
    """
    decoding = [sequence for sequence in runnable if sequence.decodes]
    return (
        len(decodes) == len(decoding)
        and all(map(is_, (work.sequence for work in decodes), decoding))
        and prompt.room >= prompt.to_schedule
        and not any(sequence.at_promise or sequence.suspect for sequence in runnable)
        and not _may_find_pages(runnable, decoding)
    )


def _may_find_pages(runnable: list[Sequence], decoding: list[Sequence]) -> bool:
    adding: defaultdict[tuple[Digest, bytes], list[PageChain]] = defaultdict(list)
    for one in decoding:
        if one.chain is not None:
            adding[one.chain.adapter, one.chain.salt].append(one.chain)
    return any(
        one.chain.may_find_pages_of(other)
        for one in runnable
        if one.row is None and one.chain is not None
        for other in adding.get((one.chain.adapter, one.chain.salt), ())
    )
