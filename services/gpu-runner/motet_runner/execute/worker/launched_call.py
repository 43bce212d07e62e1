"""A launched call of the model on an asynchronous device. Its results come to the host later."""

from collections.abc import Sequence
from dataclasses import dataclass

from motet_runner.execute.batch.row_table import UNKNOWN_TOKEN, TableRow
from motet_runner.execute.batch.scored_rows import ScoredRow
from motet_runner.execute.sample import prompt_logprobs
from motet_runner.execute.sample.device_sampler import NOT_FINITE, Sampling
from motet_runner.execute.worker.base_worker import Flight
from motet_runner.memory.parcel import Returning


@dataclass(frozen=True, slots=True)
class LaunchedCall:
    """Its results are being copied to the host."""

    rows: Sequence[TableRow]
    places: Sequence[int]
    """The sampled tokens' places in their sequences"""
    sampling: Sampling | None
    scored: Sequence[ScoredRow]
    results: Returning | None
    """None: there are no results."""

    def read(self, flight: Flight) -> None:
        """Reads the results, which have arrived, and replaces each row's unknown token with the sampled token."""
        if self.results is None:
            return
        tensors = self.results.read()
        first = len(flight.sampled)
        if self.sampling is not None:
            tokens = tensors.pop(0).tolist()
            for row, place, token in zip(self.rows, self.places, tokens, strict=True):
                row.tokens[place] = max(token, UNKNOWN_TOKEN)
            flight.sampled += [None if token == NOT_FINITE else token for token in tokens]
            if self.sampling.asks:
                found = self.sampling.logprobs(tensors[:3])
                del tensors[:3]
                flight.logprobs |= {first + place: logprob for place, logprob in found.items()}
        scores, parts = flight.prompt_logprobs, prompt_logprobs.PARTS
        for at, one in enumerate(self.scored):
            read = prompt_logprobs.read_scores(one.places.start, tensors[parts * at : parts * (at + 1)])
            scores[one.row.number] = prompt_logprobs.joined(scores.get(one.row.number), read)

    def note(self, flight: Flight) -> None:
        """Until `read`, the rows have unknown tokens."""
        flight.unread.append(self.read)
        for row in self.rows:
            row.tokens.append(UNKNOWN_TOKEN)
        flight.model_calls += 1
