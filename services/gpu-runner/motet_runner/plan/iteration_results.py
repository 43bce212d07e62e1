"""Applies the results of an iteration to its sequences: next tokens, ends, adapters."""

from dataclasses import dataclass

from motet.domain import Digest
from motet.errors import NotFinite, Overloaded
from motet_runner.adapters.proof import Proof
from motet_runner.interface import (
    AdapterFailed,
    DecodedTokens,
    Finish,
    Logprobs,
    Sampling,
    SequenceOutput,
    State,
    StateChanged,
)
from motet_runner.plan.launched import Launched
from motet_runner.plan.prompt_scores import PromptScores
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.sequence_lives import SequenceLives
from motet_runner.plan.sequence_memory import SequenceMemory
from motet_runner.plan.sequence_table import SequenceTable
from motet_runner.plan.size_limit import SizeLimit
from motet_runner.plan.step_plan import ProofResult, StepResult

_NOT_FINITE = (
    "The model's results for this request are infinite or not numbers. If the request uses an adapter, try the base "
    "model, and tell the adapter's owner."
)


_OUT_OF_MEMORY = (
    "The runner has no memory to compute this request; try again, or lower engine.memoryUtilizationPercent."
)


class ExtendedSequences:
    """Those that only got another token, as columns once all have theirs."""

    __slots__ = ("_sequences", "tokens")

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.tokens: list[int] = []

    def add(self, sequence: Sequence, token: int) -> None:
        sequence.tokens.append(token)
        self._sequences.append(sequence)
        self.tokens.append(token)

    def decoded(self) -> DecodedTokens:
        """To be asked before any of them gets another token."""
        sequences = self._sequences
        return DecodedTokens(
            tuple([one.request for one in sequences]),
            tuple([one.new.epoch for one in sequences]),
            tuple([one.new.choice for one in sequences]),
            tuple([len(one.tokens) - 1 - one.prompt_tokens for one in sequences]),
            0,
            self.tokens,
        )


@dataclass(slots=True)
class IterationResults:
    _sequences: SequenceTable
    _memory: SequenceMemory
    _lives: SequenceLives
    _chunk: SizeLimit
    _eos_token_ids: frozenset[int]

    def take(self, launched: Launched, result: StepResult) -> None:
        """Take an iteration's result. Sequences that have left since its launch are skipped."""
        self._take_loads(result)
        sampled = iter(result.sampled)
        logprobs = result.logprobs
        extended, usual = ExtendedSequences(), not (logprobs or result.out_of_memory or result.late)
        before = len(self._lives.outputs)
        decoding = zip(
            launched.decoding, launched.decodes.rows, launched.decodes.starts, launched.decoding_restarts, strict=True
        )
        for place, (sequence, row, start, restarts) in enumerate(decoding):
            token = next(sampled)
            sequence.pending -= 1
            if usual and token is not None and sequence.restarts == restarts and self._only_extends(sequence, token):
                extended.add(sequence, token)
                sequence.computed = start + 1
                if sequence.chain is not None and sequence.computed // sequence.page_tokens > sequence.chain.cached:
                    self._memory.add_to_cache(sequence)
            elif row in result.late:
                self._sits_out(sequence, restarts)
            elif self._is_computed(sequence, row, result):
                if sequence.restarts == restarts:
                    sequence.computed = start + 1
                    if sequence.suspect:
                        self._say_progress(sequence)
                self.sampled(sequence, token, logprobs.get(place) if logprobs else None)
        if extended.tokens:
            self._lives.add_before(before, extended.decoded())
        place = len(launched.decoding)
        for work, step, restarts in zip(launched.prefills, launched.steps, launched.restarts, strict=True):
            sequence = work.sequence
            sequence.pending -= work.samples
            token = next(sampled) if work.samples else None
            if self._is_computed(sequence, step.row, result):
                if sequence.restarts == restarts:
                    sequence.computed = work.start + work.count
                    if not work.samples or sequence.suspect:
                        self._say_progress(sequence)
                scored = not result.prompt_logprobs or self._take_scores(sequence, result.prompt_logprobs.get(step.row))
                if step.row in result.late and scored:
                    self._sits_out(sequence, restarts)
                elif work.samples and scored:
                    self.sampled(sequence, token, logprobs.get(place))
            place += work.samples
        if not result.retries:
            self._chunk.fitted(result.model_calls)
        elif launched.prefills:
            self._chunk.did_not_fit(self._chunk.size)

    # -- adapters ----------------------------------------------------------------------------------------------------

    def _take_loads(self, result: StepResult) -> None:
        adapters = self._memory.adapters
        for one in result.arrived:
            arrived = adapters.arrived(one)
            if arrived is not None:
                self._lives.may_serve(arrived)
        for number in result.silent:
            adapters.silent(number)
        for other in result.failed:
            adapter = adapters.failed(other.number, other.error)
            if adapter is not None:
                self._sequences.events.append(AdapterFailed(adapter, other.error))
                for sequence in self._users_of(adapter):
                    if sequence.state is State.LOADING:  # no others fail (PU-07)
                        self._lives.give_up(sequence, other.error)
        for number in result.left:
            adapters.left(number)
        if result.proved is not None and self._reloads(result.proved):
            return
        if result.proved is not None and (proved := adapters.proof_ended(result.proved)) is not None:
            self._lives.may_serve(proved)
            error = adapters.refusal(proved)
            if error is not None:
                for sequence in self._users_of(proved):
                    self._lives.give_up(sequence, error)
                adapters.leave(proved)

    def _reloads(self, proved: ProofResult) -> bool:
        """Whether an adapter is loaded and proved once more, because its slab may be what is wrong. Sequences that it
        was computed for end with the error."""
        adapters, error = self._memory.adapters, proved.found
        if isinstance(error, Proof) or (doubted := adapters.doubted(proved)) is None:
            return False
        adapter, served = doubted
        for sequence in self._users_of(adapter) if served else ():
            self._lives.give_up(sequence, error)
        adapters.leave(adapter)
        adapters.want(adapter)
        return True

    def _users_of(self, adapter: Digest) -> list[Sequence]:
        return [one for one in self._sequences if one.adapter == adapter]

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _is_computed(self, sequence: Sequence, row: int, result: StepResult) -> bool:
        """True if this result holds for a sequence: it may have left since the launch, or it leaves now."""
        if sequence not in self._sequences:
            return False
        if row not in result.out_of_memory:
            return True
        self._lives.give_up(sequence, Overloaded(_OUT_OF_MEMORY))
        return False

    def _say_progress(self, sequence: Sequence) -> None:
        percent = 100 * sequence.computed // len(sequence.tokens)
        changed = StateChanged(sequence.request, sequence.new.epoch, sequence.state, percent)
        self._sequences.events.append(changed)

    def _take_scores(self, sequence: Sequence, scores: PromptScores | None) -> bool:
        """Take log probabilities of the prompt that the client does not have yet: tokens that are computed again after
        a park may be scored again → False if the sequence cannot go on"""
        if scores is None:
            return True
        if not scores.finite:
            self._lives.give_up(sequence, NotFinite(_NOT_FINITE))
            return False
        first, news = sequence.to_score, list(scores.logprobs[sequence.to_score - scores.first :])
        if news:
            new, index = sequence.new, sequence.output_tokens
            output = SequenceOutput(new.request, new.epoch, new.choice, index, [], prompt_index=first)
            output.prompt_logprobs = news
            self._lives.outputs.append(output)
            sequence.to_score += len(news)
        return True

    def _only_extends(self, sequence: Sequence, token: int) -> bool:
        """True if this token ends nothing and announces nothing, so that `sampled` would only add it. To be asked for
        each sequence of each iteration."""
        new, length = sequence.new, len(sequence.tokens) + 1
        return (
            sequence.state is State.DECODE
            and length - sequence.prompt_tokens < new.sampling.max_tokens
            and token not in self._eos_token_ids
            and token not in new.sampling.stop_token_ids
            and (
                length + sequence.pending <= (sequence.promise - 1) * sequence.page_tokens
                or sequence.announced
                or sequence.promise >= sequence.most_pages
            )
            and sequence.restarts_after is None
            and not new.engines_lost
            and sequence in self._sequences
        )

    def sampled(self, sequence: Sequence, token: int | None, logprob: Logprobs | None = None) -> None:
        """Write the next token; if it is the last, the sequence leaves and its pages are free (S3-07, PU-11)."""
        lives, memory = self._lives, self._memory
        if token is None:
            masked = sequence.new.mask and sequence.new.mask.failure
            lives.give_up(sequence, masked or NotFinite(_NOT_FINITE))
            return
        new, tokens = sequence.new, sequence.tokens
        index = len(tokens) - sequence.prompt_tokens
        tokens.append(token)
        if sequence.chain is not None and sequence.computed // sequence.page_tokens > sequence.chain.cached:
            memory.add_to_cache(sequence)
        finish = self._finish(new.sampling, token, index + 1)
        logprobs = [] if logprob is None else [logprob]
        output = SequenceOutput(new.request, new.epoch, new.choice, index, [token], logprobs, finish)
        output.cached_tokens, sequence.cached_tokens = sequence.cached_tokens, None
        lives.outputs.append(output)
        if finish is not None:
            output.promise_number = sequence.promise_number
            lives.remove(sequence)
            return
        if sequence.restarts_after is not None and len(sequence.tokens) > sequence.restarts_after:
            memory.restart(sequence)
            lives.begin_keys(sequence)
        elif sequence.state is State.PREFILL:
            self._sequences.enter(sequence, State.DECODE)
        near_end = sequence.promise < sequence.most_pages and not sequence.announced
        if near_end and sequence.state is not State.PARKED:
            memory.announce_overflow(sequence)

    def _sits_out(self, sequence: Sequence, restarts: int) -> None:
        """Its newest token will be computed again once its mask is there, as if this iteration had left it out."""
        if sequence in self._sequences and sequence.restarts == restarts:
            if sequence.state is State.PARKED:
                self._memory.restart(sequence)  # its pages on the host are those of all tokens
            else:
                sequence.scheduled = sequence.computed = len(sequence.tokens) - 1
            if sequence.suspect:
                self._say_progress(sequence)
        self._sequences.sits_out(sequence)

    def _finish(self, sampling: Sampling, token: int, output_tokens: int) -> Finish | None:
        if token in sampling.stop_token_ids or (token in self._eos_token_ids and not sampling.ignore_eos):
            return Finish.STOP
        return Finish.LENGTH if output_tokens >= sampling.max_tokens else None
