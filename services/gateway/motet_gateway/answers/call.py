"""One call for an answer: its model, its prompts, the choices that it starts, and what is kept of it. It knows nothing
of HTTP: `answer.py` drives it, and writes what comes."""

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from motet.api.v1 import common_pb2, predictor_pb2, runner_pb2
from motet.chat_formats import ChatFormats
from motet.domain import Digest
from motet.errors import InvalidRequest, MotetError
from motet.grammars.grammar import Grammar
from motet.prefix_hints import prefix_salt, prompt_hints
from motet.reasoning.formats import ExpectedReasoning
from motet.reasoning.splitter import ReasoningSplitter
from motet.runner_info import RequestClass
from motet.trace_context import trace_of
from motet_gateway.answers.api import Api
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.echo import EchoedPrompt, echoed_prompts
from motet_gateway.answers.logprobs import CompletionLogprobs, LogprobsWriter
from motet_gateway.answers.model_of_call import ModelOfCall
from motet_gateway.answers.prompt_logprobs import ScoredPrompt
from motet_gateway.answers.prompts import UNKNOWN_CONTEXT, Tokenising, kept_tokens, max_answer_tokens
from motet_gateway.answers.score_limits import check_scores, limited_by_scores
from motet_gateway.answers.timings import RequestTimings
from motet_gateway.catalog import Target
from motet_gateway.choice_record import ChoiceRecord
from motet_gateway.estimator import longest, scope_name, scope_tenant
from motet_gateway.grammars.trial_processes import TrialModel
from motet_gateway.histories import ChoiceHistory
from motet_gateway.identity.caller import Caller
from motet_gateway.live_choice import GenerationRequest, whole_salt
from motet_gateway.noted import Noted
from motet_gateway.parameters import AskingBody, Body, Tokens, request_class, samplings, with_prompt_logprobs
from motet_gateway.reasoning import expected_reasoning
from motet_gateway.tokens.detokenizer import detokenizer
from motet_gateway.tokens.stop_strings import StopStrings
from motet_gateway.tokens.text_model import ModelTokenizer
from motet_gateway.tools.calls import CallableTools, callable_tools, formats_of, grammar_of_answer

if TYPE_CHECKING:
    from motet_gateway.gateway import Gateway

Result = TypeVar("Result")
Wait = Callable[[], Awaitable[None]]
"""Waits until something has changed. It raises if the call is over."""

_prompt_numbers = itertools.count(1)
_SEED_MASK = (1 << 64) - 1
SCORE_BYTES = 40
"""About what a log probability of a prompt takes until it is written."""
ENTRY_BYTES = 80
"""About what it takes as JSON in vLLM's form."""


@dataclass(frozen=True, slots=True)
class StartedChoice:
    text: ChoiceText
    order: GenerationRequest
    record: ChoiceRecord


class Call:
    def __init__(
        self,
        gateway: "Gateway",
        caller: Caller,
        api: Api[AskingBody],
        body: AskingBody,
        *,
        http_id: str,
        traceparent: str,
        take: Callable[[int], None],
        hold: Callable[[int], None],
        changed: Callable[[ChoiceText], None],
        wake: Callable[[], None],
    ) -> None:
        """`take` counts the bytes that the call holds, and raises Overloaded if all calls hold too many. `hold` does so
        from where nothing may be raised. `changed` gets a choice that has news, and `wake` is called for all other
        news."""
        self.id = secrets.token_hex(12)
        self.created = int(gateway.around.wall())
        """In seconds since 1970."""
        self.caller = caller
        self._namespace_uid = gateway.access.keyring.namespace_uid(caller.tenant)
        """As it was when it was first known, if the namespace is made again meanwhile"""
        self.body: Body = body
        self.gateway = gateway
        self._prompts_of: Callable[[Tokenising], Awaitable[list[Tokens]]] = partial(api.prompts, body)
        self._writer_of_logprobs = api.logprobs
        self._clock = gateway.around.clock
        self._take = take
        self._hold = hold
        self._changed = changed
        self._wake = wake
        self.timings = RequestTimings(self._clock)
        self.history = gateway.histories.begin(
            self.id, http_id, caller, body.model, self.timings, trace=trace_of(traceparent)
        )
        self._traceparent = traceparent
        self._model = ModelOfCall(gateway, caller, self.history, changed=wake)
        self._tokenising = False
        self._score_bytes = 0
        """What is counted for the prompts' log probabilities: once, also when a replaced model makes them come
        again."""
        self._grammar_bytes = 0
        self._grammar: Grammar | None = None
        """That the answer has to follow."""
        self._bad_words: Sequence[Tokens] = ()
        self._tools: CallableTools | None = None
        self._reasoning: ExpectedReasoning | None = None
        """Of its answers, if its model is declared to reason."""
        self.prompts: list[Tokens] = []
        self.echoes: list[EchoedPrompt] = []
        """One for each prompt, if they come back."""
        self.scored: list[ScoredPrompt] = []
        """One for each prompt, if the client wants log probabilities of prompts in vLLM's form."""
        self.started: list[StartedChoice] = []
        self.choices: list[ChoiceText] = []
        """Of `started`."""
        self.seed = 0
        """Of its draws. With it, the same answer comes again."""
        self.length_source = ""
        """Who estimated the length of the answer."""
        self.class_name = ""
        """Of all choices; empty until it is known. It stays when a replaced model clears the choices."""

    # -------------------------------------------------------------------------------------------------- what is known

    @property
    def target(self) -> Target | None:
        """The model, once it is known."""
        return self._model.target

    @property
    def lengths_tenant(self) -> str:
        """Whose lengths the answers are"""
        return scope_tenant(self.caller.tenant, self._namespace_uid)

    @property
    def error(self) -> MotetError | None:
        return next((choice.error for choice in self.choices if choice.error is not None), None)

    @property
    def over(self) -> bool:
        return all(choice.over for choice in self.choices)

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int | None:
        """Of all answers. None: nobody looks for reasoning in them."""
        counted = [choice.reasoning_tokens for choice in self.choices]
        return sum(filter(None, counted)) if any(one is not None for one in counted) else None

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def cached_tokens(self) -> int | None:
        """Of all prompts: the tokens that runners found in their prefix caches. The choice of a prompt that found least
        tells, as the others find what it has computed. None: of a prompt, no runner has said it."""
        found, each = 0, self.body.choices
        for at in range(0, len(self.started), each):
            said = [one.record.cached_tokens for one in self.started[at : at + each]]
            known = [one for one in said if one is not None]
            if not known:
                return None
            found += min(known)
        return found

    @property
    def waits_for(self) -> str:
        """Empty: for nothing."""
        if self._model.not_ready is not None:
            return self._model.waits_for
        if self._tokenising:
            return "its prompt waits behind others for its tokens"
        return next((choice.waiting_for for choice in self.choices if choice.waiting_for and not choice.over), "")

    @property
    def no_runner(self) -> bool:
        """Whether it waits for the first runner of its model."""
        return self._model.not_ready is not None and not self._model.not_ready.runners

    def prompt_of(self, choice: ChoiceText) -> Tokens:
        return self.prompts[choice.index // self.body.choices]

    def echo_of(self, choice: ChoiceText) -> EchoedPrompt | None:
        return self.echoes[choice.index // self.body.choices] if self.echoes else None

    def scored_of(self, choice: ChoiceText) -> bytes | bytearray:
        """The log probabilities of its prompt as JSON; empty if nobody asked for them."""
        return self.scored[choice.index // self.body.choices].json if self.scored else b""

    def note(self, kind: Noted, *arguments: object) -> None:
        self.history.timeline.note(self._clock(), kind, *arguments)

    # ------------------------------------------------------------------------------------------------ from start to end

    async def begin(self, wait: Wait) -> None:
        """Find the model, tokenise the prompts, and start the choices."""
        target, text = await self._model.find(wait)
        if not self._namespace_uid:  # no catalog had come yet when the request did
            self._namespace_uid = self.gateway.access.keyring.namespace_uid(self.caller.tenant)
        context = target.group.max_model_length or text.context_length or UNKNOWN_CONTEXT
        formats = formats_of(target, text)
        self._tools = callable_tools(self.body, formats)
        self.prompts = await self._finished(self._tokenised(text, formats, context), wait)
        limits = limited_by_scores(self.body, [max_answer_tokens(self.body, one, context) for one in self.prompts])
        check_scores(self.body, self.prompts, limits)
        self._count_scores()
        if self.body.prompt_comes_back:
            await self._echo(text, wait)
        if (top := self.body.scores_of_prompts) is not None:
            self.scored = [ScoredPrompt(prompt, text.token_bytes, top) for prompt in self.prompts]
        self._reasoning = None
        if self.body.may_reason:
            self._reasoning = expected_reasoning(formats, text, self.prompts[0], self.body.continued)
        if (asked := grammar_of_answer(self.body, self._tools)) is not None:
            await self._try_grammar(*asked, self.gateway.assets.get(target.group.asset_digest) or text, wait)
        if words := self.body.forbidden_words():
            make = partial(text.words, words)
            self._bad_words = await self._finished(self._in_thread(sum(map(len, words)), make), wait)
        await self._start(target, text, limits)

    def begin_again(self) -> bool:
        """Whether to begin again, because the adapter's revision or the base model was replaced before the first token.
        If so, cancels what was started for the old one."""
        if not self._model.may_retry(self.error) or any(choice.tokens for choice in self.choices):
            return False
        self._model.retry()
        self.cancel("its model was replaced")
        self.note(Noted.REPLACED)
        self.timings.take_back(self.started[0].record.split)
        self.started.clear()
        self.choices.clear()
        return True

    def cancel(self, why: str) -> None:
        for one in self.started:
            self.gateway.dispatcher.cancel(one.order.request, why)

    def end(self, code: str) -> None:
        self._model.close()
        # Of an attempt before, whose model was replaced, nobody got a token.
        for choice, of_choice in zip(self.choices, self.history.choices[-len(self.choices) :], strict=False):
            of_choice.tokens = choice.tokens
        self.gateway.histories.end(self.history, code)

    def let_go(self) -> None:
        """Of who refers back here: what the call holds is free at once then, and not when the garbage collector has
        found it."""
        self.started.clear()
        self.choices.clear()
        self._hold = self._changed = _ignored

    # --------------------------------------------------------------------------------------------------------- prompts

    async def _tokenised(self, text: ModelTokenizer, formats: ChatFormats, context: int) -> list[Tokens]:
        keep = kept_tokens(self.body, context)
        how = Tokenising(text, self.gateway.renderer, self.gateway.encoder, formats, keep, self.caller.tenant)
        prompts = await self._prompts_of(how)
        return prompts if keep.most is not None else [keep.cut(prompt) for prompt in prompts]

    async def _finished(self, work: Coroutine[Any, Any, Result], wait: Wait) -> Result:
        """The result of work on the prompts. It may wait behind others' work, and leaves when this call ends."""
        task = asyncio.create_task(work, name=f"prompt {self.id}")
        try:
            self._tokenising = True
            task.add_done_callback(lambda _: self._wake())
            while not task.done():
                await wait()
            return task.result()
        finally:
            self._tokenising = False
            task.cancel()

    def _in_thread(self, size: int, work: Callable[[], Result]) -> Coroutine[Any, Any, Result]:
        return self.gateway.encoder.run(size, work, tenant=self.caller.tenant)

    def _count_scores(self) -> None:
        body = self.body
        if body.prompt_logprobs_wanted is not None:
            each = SCORE_BYTES + (0 if body.scores_of_prompts is None else ENTRY_BYTES)
            size = each * self.prompt_tokens * (1 + body.prompt_logprobs_wanted)
            self._take(size - self._score_bytes)
            self._score_bytes = size

    async def _echo(self, text: ModelTokenizer, wait: Wait) -> None:
        body = self.body
        top = body.top_logprobs_wanted or 0
        writer = partial(CompletionLogprobs, text.token_bytes, top, ids=body.tokens_as_ids)
        echo = partial(echoed_prompts, body, self.prompts, text, writer=writer)
        self.echoes = await self._finished(self._in_thread(self.prompt_tokens, echo), wait)

    async def _try_grammar(self, field: str, grammar: Grammar, text: ModelTokenizer, wait: Wait) -> None:
        size = len(grammar.text) * len(self.prompts) * self.body.choices  # each choice is sent with its own copy
        self._take(size - self._grammar_bytes)
        self._grammar_bytes = size
        self._grammar = grammar = replace(grammar, behind=self._reasoning)
        try:
            model = TrialModel(text.file, text.vocabulary, tuple(sorted(text.eos_ids)))
            await self._finished(self.gateway.grammars.check(grammar, self.caller.tenant, model), wait)
        except InvalidRequest as error:
            raise InvalidRequest(f"{field}: {error.message}", param=field) from None

    # -------------------------------------------------------------------------------------------------------- starting

    async def _start(self, target: Target, text: ModelTokenizer, limits: Sequence[int]) -> None:
        body, gateway, tenant = self.body, self.gateway, self.caller.tenant
        wanted = samplings(body, text, limits, self._grammar, self._bad_words)
        wanted_class = request_class(body, target.max_class, target.max_class_of(tenant))
        self.class_name = RequestClass.from_proto(wanted_class).name.lower()
        stops = body.stops()
        gateway.admission.check_choices(len(self.prompts) * body.choices)
        features: list[list[int]] = [[] for _ in limits]
        if body.options.get("ignore_eos"):  # nothing that was learned from others says how long these become
            estimates = [longest(max(1, limit)) for limit in limits]
        else:
            numbers = _numbers(body.turns, wanted[0].temperature, len(stops))
            features = await self._features(limits, numbers, target.base_digest)
            estimates = await self._estimates(target, limits, features)
        self.length_source = estimates[0].source
        salted = whole_salt(self._namespace_uid, body.cache_salt or "")
        salt = prefix_salt(Digest(target.base_digest), Digest(target.adapter_digest), tenant, salted)
        hints = [prompt_hints(salt, prompt) for prompt in self.prompts]
        gateway.metrics.estimates.labels(self.length_source.partition(":")[0]).inc()
        self.note(Noted.PREPARED, self.prompt_tokens)
        self.timings.mark_enqueued()
        self.seed = seed = secrets.randbits(64) if body.seed is None else body.seed & _SEED_MASK
        # New ids, since late messages about the old ones may still arrive.
        name = f"{self.id}-{self._model.retries}" if self._model.retries else self.id
        hidden = frozenset(wanted[0].stop_token_ids) | (frozenset() if body.options.get("ignore_eos") else text.eos_ids)
        skips = body.skip_special_tokens is not False
        if skips and (signs := self._signs):  # some of them may be special tokens
            skips, hidden = False, hidden | text.specials_but(signs)
        parent, prompt_number, separates = "", 0, body.separates_reasoning
        gateway.admission.check_choices(len(self.prompts) * body.choices)  # others have begun since the first check
        for number in range(len(self.prompts) * body.choices):
            at, own = divmod(number, body.choices)
            request = f"{name}.{number}" if number else name
            if not own:
                parent, prompt_number = "", next(_prompt_numbers) if body.choices > 1 else 0
            order = GenerationRequest(
                request=request,
                tenant=tenant,
                group=target.group.group,
                adapter=target.adapter_name,
                adapter_digest=target.adapter_digest,
                base_digest=target.base_digest,
                request_class=wanted_class,
                prompt_ids=self.prompts[at],
                choice=own,
                sampling=wanted[at] if own else with_prompt_logprobs(wanted[at], body),
                seed=seed,
                seed_is_drawn=body.seed is None and not body.tells_seed,
                estimate=estimates[at],
                deadline_seconds=gateway.settings.deadline_seconds,
                parent=parent,
                prompt_number=prompt_number,
                choices=body.choices,
                prefix_hints=hints[at],
                features=features[at],
                key=self.caller.account,
                scores_only=body.scores_only,
                scores_for=body.scores_for,
                cache_salt=body.cache_salt or "",
                namespace_uid=self._namespace_uid,
                traceparent=self._traceparent,
            )
            parent = parent or request
            choice = ChoiceText(
                number,
                detokenizer(text.token_bytes, self.prompts[at], skip_special_tokens=skips),
                StopStrings(stops, include=bool(body.include_stop_str_in_output)) if stops else None,
                hidden_ids=hidden,
                stop_ids=frozenset(wanted[0].stop_token_ids),
                keeps_ids=body.token_ids_wanted,
                min_tokens=wanted[at].min_tokens,
                logprobs=self._logprobs_writer(text, at),
                splitter=ReasoningSplitter(self._reasoning) if self._reasoning is not None and separates else None,
                parser=self._tools.parser() if self._tools is not None else None,
                must_call=self._tools is not None and self._tools.offered.must,
                on_placed=self.timings.mark_placed,
                changed=self._on_change,
                stop_here=partial(gateway.dispatcher.stop, request),
                score=partial(self._score, at),
            )
            record = ChoiceRecord(self.timings.split.copy())
            self.choices.append(choice)
            self.started.append(StartedChoice(choice, order, record))
            self.history.choices.append(
                ChoiceHistory(request, len(self.prompts[at]), limits[at], estimates[at], record)
            )
            gateway.dispatcher.start(order, choice, record, asked_at=self.timings.enqueued)

    async def _features(self, limits: Sequence[int], numbers: Sequence[int], base: str) -> list[list[int]]:
        features = []
        for prompt, limit in zip(self.prompts, limits, strict=True):
            features.append(self.gateway.features.of(prompt, (*numbers, limit.bit_length()), base=base).tolist())
            await asyncio.sleep(0)  # those of 128 prompts take 10 ms together
        return features

    async def _estimates(
        self, target: Target, limits: Sequence[int], features: Sequence[Sequence[int]]
    ) -> list[common_pb2.Estimate]:
        return await self.gateway.estimator.estimate(
            [
                predictor_pb2.Prompt(
                    request=self.id,
                    tenant=self.lengths_tenant,
                    adapter=scope_name(target.adapter_name, target.base_digest),
                    prompt_tokens=len(prompt),
                    max_tokens=max(1, limit),
                    features=own,
                    feature_space=self.gateway.features.space,
                )
                for prompt, limit, own in zip(self.prompts, limits, features, strict=True)
            ],
            min_tokens=self.body.options.get("min_tokens", 0),
        )

    @property
    def _signs(self) -> list[str]:
        """What reasoning and calls are found by."""
        of_tools = self._tools.signs if self._tools is not None else ()
        of_reasoning = (self._reasoning.begin, self._reasoning.end) if self._reasoning is not None else ()
        return [*of_tools, *of_reasoning]

    def _logprobs_writer(self, text: ModelTokenizer, prompt: int) -> LogprobsWriter | None:
        if (top := self.body.top_logprobs_wanted) is None:
            return None
        before = self.echoes[prompt].characters if self.echoes else None
        ids = self.body.tokens_as_ids
        return self._writer_of_logprobs(text.token_bytes, top, hold=self._hold, characters=before, ids=ids)

    def _score(self, prompt: int, logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        if self.echoes:
            self.echoes[prompt].score(logprobs)
        if self.scored:
            self.scored[prompt].score(logprobs)

    def _on_change(self, choice: ChoiceText) -> None:
        if choice.over:
            self._model.refused(choice.error)
        else:
            self.timings.mark_tokens()
        self._changed(choice)


def _ignored(_: object) -> None: ...


def _numbers(turns: int, temperature: float, stops: int) -> tuple[int, ...]:
    """What else than its prompt says how long a request's answer will be: how many turns, and how it is sampled."""
    return min(turns, 31), round(4 * min(max(temperature, 0.0), 2.0)), min(stops, 4)
