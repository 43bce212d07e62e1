"""All that a gateway talks to, over real gRPC: a scheduler that places at once, runners that echo, a predictor.

Each part works, and a test can make it misbehave in several ways. For tests and benchmarks of the gateway.
"""

import asyncio
import functools
import itertools
import json
import math
import shutil
import tempfile
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from motet.api.v1 import (
    common_pb2,
    predictor_pb2,
    predictor_pb2_grpc,
    runner_pb2,
    runner_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from motet.digest import ContentDigest
from motet.domain import Digest
from motet.errors import BaseModelReplaced, ModelNotFound, MotetError
from motet.kept_prompts import KeptPrompts
from motet.rpc import Session, Sessions
from motet.transport.over_grpc import GrpcServerStream, serving
from motet_runner.accepted_requests import AcceptedRequests
from motet_runner.generate_service import sequence_of

BASE_DIGEST = "sha256:" + "b" * 64
GROUP = "default/tiny"
EOS = "<|end|>"
END = 0
"""Its token."""
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'forbidden' %}{{ raise_exception('roles must be user or assistant') }}{% endif %}"
    "{{ message.content }}{% if message.role == 'system' %}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %} {% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog while the choir sings a motet in five voices.",
    "Several voices sing different texts at the same time; each tenant brings adapters of its own.",
    "naïve café 東京 🙂 – “quotes”, {json: [1, 2, 3]}, and\nlines.",
]


@functools.cache
def byte_tokenizer(vocabulary: int = 400) -> Tokenizer:
    """A byte-level tokenizer: it decodes any text without loss, and some characters need several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def tokenizer_file(vocabulary: int) -> bytes:
    return byte_tokenizer(vocabulary).to_str().encode()


def model_assets(*, template: str | None = TEMPLATE, vocabulary: int = 400) -> dict[str, bytes]:
    assets = {
        "tokenizer.json": tokenizer_file(vocabulary),
        "tokenizer_config.json": json.dumps({"eos_token": EOS}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": 0}).encode(),
        "config.json": json.dumps({"max_position_embeddings": 512}).encode(),
    }
    return assets | ({"chat_template.jinja": template.encode()} if template is not None else {})


def assets_digest(assets: Mapping[str, bytes]) -> Digest:
    content = ContentDigest()
    for name, data in sorted(assets.items()):
        content.begin(name, len(data))
        content.update(data)
    return content.digest()


Stream = Session[int, runner_pb2.GenerateDown]
"""One connection of a gateway to a runner."""

Gateway = Session[int, scheduler_pb2.ServeDown]
"""One connection of a gateway to the scheduler."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass
class Running:
    submit: runner_pb2.Submit
    output: deque[int]
    index: int
    session: Stream
    scored: int
    """Tokens of the prompt whose log probabilities were sent."""


class FakeRunner(runner_pb2_grpc.RunnerServicer):
    """Answers with the prompt's own tokens and then the end token; with `ignore_eos`, it repeats the prompt. A stop
    token ends the answer sooner, and with `min_tokens` it repeats the prompt until it has that many.

    Tokens depend only on prompt and index, so a moved request continues with the same tokens. Unless a test makes it
    misbehave, it passes the tests of the real runner in `tests/contract/test_runners.py`, and a gateway that uses it
    passes those of the whole stack in `tests/contract/test_http.py`.
    """

    def __init__(self, folder: Path, instance: str, assets: dict[str, bytes]) -> None:
        self.instance = instance
        self.address = f"unix:{folder}/{instance}.sock"
        self.incarnation = f"{instance}-1"
        self.assets = assets
        self.base_digest = BASE_DIGEST
        self.asset_digest = assets_digest(assets)
        self.step_seconds = 0.0
        self.tokens_per_step = 1
        self.scores_per_step = 1 << 30
        """Log probabilities of the prompt; with the last of them comes the first token."""
        self.cached_tokens: int | None = 0
        """Of a prompt, as it says with the first token. None: as a runner of an earlier version, which does not."""
        self.submits: list[runner_pb2.Submit] = []
        self.prompt_tokens = 0
        """That came over its streams"""
        self.cancels: list[runner_pb2.CancelGeneration] = []
        self.asset_requests = 0
        self.templates: dict[tuple[str, str], bytes] = {}
        """Of adapters: by their digest and the template's"""
        self.keeps_record = True
        # Ways to misbehave.
        self.silent = False
        self.repeats_steps = False
        self.speaks_of_the_past = False
        self.skips_an_index_at: int | None = None
        self.dies_after: int | None = None
        self.declines: list[common_pb2.Failure] = []
        self.fails_after: tuple[int, common_pb2.Failure] | None = None
        self.progress: list[runner_pb2.SequenceProgress] = []
        kinds = (runner_pb2.Submit, runner_pb2.Sampling)
        self.fields = [field.name for kind in kinds for field in kind.DESCRIPTOR.fields]
        """That it says it knows."""
        self.requests: dict[str, Running] = {}
        self._book = AcceptedRequests()
        self._prompts = defaultdict[int, KeptPrompts](KeptPrompts)
        """Of each stream"""
        self._numbers = itertools.count(1)
        self.sessions: Sessions[int, runner_pb2.GenerateUp, runner_pb2.GenerateDown] = Sessions(
            hello=lambda up: next(self._numbers) if up.hello.gateway else None, received=self._hear, closed=self._lose
        )
        self.work = asyncio.Event()
        self.stack: AsyncExitStack | None = None
        self._steps = 0

    @property
    def running(self) -> int:
        return len(self.requests)

    async def start(self) -> None:
        self.stack = AsyncExitStack()
        add = functools.partial(runner_pb2_grpc.add_RunnerServicer_to_server, self)
        await self.stack.enter_async_context(serving(self.address, add, grace=0))
        loop = asyncio.create_task(self._loop())

        async def end() -> None:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)

        self.stack.push_async_callback(end)

    async def stop(self) -> None:
        """Like kill -9: streams break, and no message says so."""
        if self.stack is not None:
            stack, self.stack = self.stack, None
            self.requests.clear()
            self._book = AcceptedRequests()
            await stack.aclose()

    async def restart(self) -> None:
        name, _, start = self.incarnation.rpartition("-")
        # First: what the scheduler places again while this one stops is for its next life.
        self.incarnation = f"{name}-{int(start) + 1}"
        await self.stop()
        await self.start()

    async def Generate(  # type: ignore[override] # it writes to the context, and yields nothing
        self, request_iterator: AsyncIterator[runner_pb2.GenerateUp], context: Context
    ) -> None:
        await self.sessions.serve(GrpcServerStream(request_iterator, context))

    async def Assets(self, request: runner_pb2.AssetsRequest, context: Context) -> AsyncIterator[runner_pb2.AssetChunk]:
        self.asset_requests += 1
        if request.adapter:
            if (content := self.templates.get((request.adapter, request.digest))) is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no template {request.digest!r} here")
            yield runner_pb2.AssetChunk(name="template.json", data=content, last=True)
            return
        if request.digest != self.asset_digest:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there are no assets {request.digest!r} here")
        for name, data in self.assets.items():
            half = len(data) // 2
            yield runner_pb2.AssetChunk(name=name, data=data[:half])
            yield runner_pb2.AssetChunk(name=name, data=data[half:], last=True)

    def _hear(self, session: Stream, message: runner_pb2.GenerateUp) -> None:
        match message.WhichOneof("message"):
            case "hello":
                identity = common_pb2.RunnerIdentity(instance=self.instance, incarnation=self.incarnation)
                welcome = runner_pb2.GenerateWelcome(runner=identity, fields=self.fields)
                session.send(runner_pb2.GenerateDown(welcome=welcome))
            case "submit":
                self._submit(message.submit, session)
            case "cancel":
                self.cancels.append(message.cancel)
                self._end(message.cancel.request, message.cancel.epoch)

    def _lose(self, session: Stream) -> None:
        for name in [name for name, running in self.requests.items() if running.session is session]:
            del self.requests[name]

    def _end(self, request: str, epoch: int) -> None:
        running = self.requests.get(request)
        if running is None or running.submit.epoch != epoch:
            return
        del self.requests[request]
        step = runner_pb2.Step(number=self._steps)
        step.sequences.add(request=request, epoch=epoch, index=running.index, finish=common_pb2.FINISH_REASON_CANCELLED)
        running.session.send(runner_pb2.GenerateDown(step=step))

    def _submit(self, submit: runner_pb2.Submit, session: Stream) -> None:
        if self.keeps_record:
            self.submits.append(submit)
        try:
            self.prompt_tokens += len(submit.prompt_ids)
            prompt = self._prompts[session.peer].note(submit.prompt_number, tuple(submit.prompt_ids))
            submit.prompt_ids[:] = prompt
            self._book.check(submit)
            sequence_of(submit, prompt, base_digest=Digest(self.base_digest))
        except MotetError as error:
            self._decline(submit, error.to_proto(), session)
            return
        self._book.expect(submit.request, submit.epoch)
        if self.declines:
            self._decline(submit, self.declines.pop(0), session)
            return
        old = self.requests.get(submit.request)
        if old is not None:
            if old.submit.epoch == submit.epoch and old.session is session:
                return
            self._end(submit.request, old.submit.epoch)
        have = len(submit.choices[0].delivered_ids)
        output = deque(answer_of(submit)[have:])
        prompt_is_scored = len(submit.prompt_ids) if not submit.sampling.HasField("prompt_logprobs") else 1
        scored = max(prompt_is_scored, submit.choices[0].scored)
        self.requests[submit.request] = Running(submit, output, have, session, scored)
        self.work.set()

    @staticmethod
    def _decline(submit: runner_pb2.Submit, failure: common_pb2.Failure, session: Stream) -> None:
        declined = runner_pb2.SubmitDeclined(
            request=submit.request, epoch=submit.epoch, term=submit.term, failure=failure
        )
        session.send(runner_pb2.GenerateDown(declined=declined))

    async def _loop(self) -> None:
        while True:
            if not self.requests or self.silent:
                self.work.clear()
                await self.work.wait()
            await asyncio.sleep(self.step_seconds)
            if not self.silent:
                await self._step()

    async def _step(self) -> None:
        self._steps += 1
        steps: dict[int, tuple[Stream, list[runner_pb2.SequenceStep]]] = {}
        for running in list(self.requests.values()):
            _, sequences = steps.setdefault(running.session.peer, (running.session, []))
            sequences.extend(self._advance(running))
        for session, sequences in steps.values():
            step = runner_pb2.Step(number=self._steps, sequences=sequences, progress=self.progress)
            for _ in range(2 if self.repeats_steps else 1):
                session.send(runner_pb2.GenerateDown(step=step))
        self.progress = []
        if self.dies_after is not None and self._steps >= self.dies_after:
            self.dies_after = None
            self.requests.clear()
            asyncio.get_running_loop().create_task(self.stop())

    def _advance(self, running: Running) -> Sequence[runner_pb2.SequenceStep]:
        submit = running.submit
        prompt = submit.prompt_ids
        if running.scored < len(prompt):
            places = range(running.scored, min(len(prompt), running.scored + self.scores_per_step))
            running.scored = places.stop
            scores = [score_of(prompt[place], place, submit.sampling.prompt_logprobs) for place in places]
            step = runner_pb2.SequenceStep(
                request=submit.request,
                epoch=submit.epoch,
                index=running.index,
                prompt_index=places.start,
                prompt_logprobs=scores,
            )
            return [step] if running.scored < len(prompt) else [step, *self._answer(running)]
        return self._answer(running)

    def _answer(self, running: Running) -> Sequence[runner_pb2.SequenceStep]:
        submit = running.submit
        tokens = [running.output.popleft() for _ in range(min(self.tokens_per_step, len(running.output)))]
        step = runner_pb2.SequenceStep(request=submit.request, epoch=submit.epoch, index=running.index, tokens=tokens)
        if self.cached_tokens is not None and running.index == len(submit.choices[0].delivered_ids):
            step.cached_tokens = self.cached_tokens
        if submit.sampling.logprobs:
            top = range(submit.sampling.top_logprobs)
            for token in tokens:
                step.logprobs.append(
                    runner_pb2.TokenLogprobs(
                        logprob=-0.5, top_ids=[token + i for i in top], top_logprobs=[-0.5 - i for i in top]
                    )
                )
        running.index += len(tokens)
        if self.fails_after is not None and running.index >= self.fails_after[0]:
            step.finish = common_pb2.FINISH_REASON_FAILED
            step.failure.CopyFrom(self.fails_after[1])
            self.fails_after = None
        elif not running.output:
            step.finish = common_pb2.FINISH_REASON_STOP if ends(submit, tokens) else common_pb2.FINISH_REASON_LENGTH
        if step.finish:
            self.requests.pop(submit.request, None)
        sent = [step]
        if self.speaks_of_the_past:
            past = runner_pb2.SequenceStep(
                request=submit.request, epoch=submit.epoch - 1, index=step.index, tokens=[5, 6, 7]
            )
            sent.insert(0, past)
        if self.skips_an_index_at is not None and running.index > self.skips_an_index_at:
            self.skips_an_index_at = None
            sent.remove(step)
        return sent


def score_of(token: int, place: int, alternatives: int) -> runner_pb2.TokenLogprobs:
    """The log probability of a prompt's token, which is the most likely one at every other place."""
    best = token + place % 2
    top = range(alternatives)
    return runner_pb2.TokenLogprobs(
        logprob=-(place + place % 2) / 8,
        top_ids=[best + one for one in top],
        top_logprobs=[-(place + 4 * one) / 8 for one in top],
        rank=1 + place % 2,
    )


def answer_of(submit: runner_pb2.Submit) -> list[int]:
    """The whole answer to a prompt: every runner gives the same."""
    sampling = submit.sampling
    # To read all of a long one would delay the answers to others.
    prompt = submit.prompt_ids[: max(1, sampling.max_tokens)]
    if sampling.ignore_eos:
        answer = prompt * (sampling.max_tokens // len(prompt) + 1)
    else:
        answer = [*prompt * max(1, math.ceil(sampling.min_tokens / len(prompt))), END]
    if stops := set(sampling.stop_token_ids):
        over = (at + 1 for at in range(sampling.min_tokens, len(answer)) if answer[at] in stops)
        answer = answer[: next(over, len(answer))]
    return answer[: sampling.max_tokens]


def ends(submit: runner_pb2.Submit, tokens: Sequence[int]) -> bool:
    """Whether an answer that ends with these tokens is complete."""
    sampling = submit.sampling
    return bool(tokens) and (tokens[-1] in sampling.stop_token_ids or (tokens[-1] == END and not sampling.ignore_eos))


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Places at once, on the first runner that is up and that the request need not avoid. Unless a test makes it
    misbehave, it passes the tests of the real scheduler in `tests/contract/test_schedulers.py`."""

    def __init__(self, folder: Path, runners: Sequence[FakeRunner]) -> None:
        self.address = f"unix:{folder}/scheduler.sock"
        self.runners = list(runners)
        self.term = 1
        self.adapters: list[scheduler_pb2.CatalogAdapter] = []
        self.groups: list[scheduler_pb2.CatalogGroup] | None = None
        self.chat = scheduler_pb2.ChatFormats()
        self.namespaces: dict[str, str] = {}
        """Uids by name. Empty: the operator does not say them."""
        self.max_model_length = 512
        self.tenants = ["*"]
        self.max_classes: dict[str, common_pb2.RequestClass.ValueType] = {}
        self.hellos: list[scheduler_pb2.GatewayHello] = []
        self.enqueued: list[scheduler_pb2.Enqueue] = []
        self.cancelled: list[scheduler_pb2.CancelRequest] = []
        self.finished: list[scheduler_pb2.Finished] = []
        self.lost: list[scheduler_pb2.Lost] = []
        self.held: list[dict[str, int]] = []
        self.held_templates: list[dict[str, list[str]]] = []
        """By group: adapters whose template no runner has, in each message"""
        self.explained: list[scheduler_pb2.ExplainRequest] = []
        self.tells_all = False
        """As a scheduler that does not know of tenants in this call."""
        self.stories: dict[str, scheduler_pb2.ExplainResponse] = {}
        """What it says of requests, by id."""
        self.keeps_record = True
        # Ways to misbehave.
        self.explains = asyncio.Event()
        """Cleared: it does not answer questions."""
        self.explains.set()
        self.holds = False
        self.refuses: common_pb2.Failure | None = None
        self.refuses_lost: common_pb2.Failure | None = None
        """Requests that their runner has lost, or did not take"""
        self.weight = 0
        self.accounts: list[scheduler_pb2.AccountLevel] = []
        self.admits = False
        self.claim: scheduler_pb2.Claim | None = None
        """Of whom it refuses."""
        self.used_up: list[int] = []
        """Claims of whom it places."""
        self.levels: list[scheduler_pb2.AccountLevel] = []
        self.claims: list[scheduler_pb2.Claim] = []
        self.retired: set[str] = set()
        """Digests of revisions that are no longer served."""
        self.places_at: FakeRunner | None = None
        self.epochs: dict[str, int] = {}
        self._bases: dict[str, str] = {}
        """The digest of each request's base model."""
        self._numbers = itertools.count(1)
        self.sessions: Sessions[int, scheduler_pb2.ServeUp, scheduler_pb2.ServeDown] = Sessions(
            hello=lambda up: next(self._numbers) if up.hello.gateway else None,
            received=self._hear,
            closed=lambda _: None,
        )
        self.stack: AsyncExitStack | None = None

    async def start(self) -> None:
        self.stack = AsyncExitStack()
        add = functools.partial(scheduler_pb2_grpc.add_SchedulerServicer_to_server, self)
        await self.stack.enter_async_context(serving(self.address, add, grace=0))

    async def stop(self) -> None:
        if self.stack is not None:
            stack, self.stack = self.stack, None
            await stack.aclose()

    async def restart(self) -> None:
        await self.stop()
        self.term += 1
        await self.start()

    async def Serve(  # type: ignore[override] # it writes to the context, and yields nothing
        self, request_iterator: AsyncIterator[scheduler_pb2.ServeUp], context: Context
    ) -> None:
        await self.sessions.serve(GrpcServerStream(request_iterator, context))

    async def Explain(self, request: scheduler_pb2.ExplainRequest, context: Context) -> scheduler_pb2.ExplainResponse:
        self.explained.append(request)
        await self.explains.wait()
        story = self.stories.get(request.request)
        if story is None or (request.tenant not in ("", story.tenant) and not self.tells_all):
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown")
        assert story is not None
        return story

    def catalog(self) -> scheduler_pb2.Catalog:
        runners = [
            scheduler_pb2.CatalogRunner(instance=runner.instance, address=runner.address) for runner in self.runners
        ]
        group = scheduler_pb2.CatalogGroup(
            group=GROUP,
            served_name="tiny",
            base_digest=self.runners[0].base_digest if runners else "",
            asset_digest=self.runners[0].asset_digest if runners else "",
            max_model_length=self.max_model_length,
            runners=runners,
            model_uri="file:///models/tiny",
            pools=[GROUP],
            tenants=self.tenants,
            max_classes=self.max_classes,
            chat=self.chat,
        )
        return scheduler_pb2.Catalog(
            groups=[group] if self.groups is None else self.groups,
            adapters=self.adapters,
            namespaces=[scheduler_pb2.Namespace(name=name, uid=uid) for name, uid in self.namespaces.items()],
        )

    def publish(self) -> None:
        self.say(scheduler_pb2.ServeDown(catalog=self.catalog()))

    def say(self, message: scheduler_pb2.ServeDown) -> None:
        self.sessions.broadcast(message)

    def release(self) -> None:
        """Place all held requests."""
        self.holds = False
        for enqueue in self.enqueued:
            if enqueue.request not in self.epochs:
                for session in self.sessions:
                    self.place(enqueue.request, 0, session)

    def place(
        self,
        request: str,
        epoch: int,
        session: Gateway,
        avoid: Sequence[str] = (),
    ) -> None:
        self.epochs[request] = epoch = max(epoch, self.epochs.get(request, 0)) + 1
        able = [r for r in self.runners if r.stack is not None and r.instance not in avoid] or self.runners
        runner = self.places_at or able[0]
        session.send(scheduler_pb2.ServeDown(placed=self.placed(request, epoch, runner)))

    def placed(self, request: str, epoch: int, runner: FakeRunner) -> scheduler_pb2.Placed:
        return scheduler_pb2.Placed(
            term=self.term,
            request=request,
            epoch=epoch,
            instance=runner.instance,
            incarnation=runner.incarnation,
            address=runner.address,
            promise=common_pb2.Promise(pages=4, tokens=64),
            base_digest=runner.base_digest,
            accounts=self.accounts,
            weight=self.weight,
            claims=self.used_up,
        )

    def refusal(self, request: str, epoch: int, failure: common_pb2.Failure) -> scheduler_pb2.ServeDown:
        refused = scheduler_pb2.Refused(
            term=self.term,
            request=request,
            epoch=epoch,
            failure=failure,
            accounts=self.accounts,
            claim=self.claim,
        )
        return scheduler_pb2.ServeDown(refused=refused)

    def _hear(self, session: Gateway, message: scheduler_pb2.ServeUp) -> None:
        match message.WhichOneof("message"):
            case "hello":
                self.hellos.append(message.hello)
                session.send(scheduler_pb2.ServeDown(welcome=common_pb2.Welcome(term=self.term)))
                session.send(scheduler_pb2.ServeDown(catalog=self.catalog()))
            case "levels":
                self.levels += message.levels.accounts
                self.claims += message.levels.claims
            case "enqueue":
                self._enqueue(message.enqueue, session)
            case "cancel":
                self.cancelled.append(message.cancel)
            case "held":
                self.held.append({one.group: one.requests for one in message.held.groups if one.requests})
                self.held_templates.append({one.group: list(one.templates) for one in message.held.groups})
            case "finished" if self.keeps_record:
                self.finished.append(message.finished)
            case "finished":
                self.epochs.pop(message.finished.request, None)
            case "lost":
                self.lost.append(message.lost)
                if self.refuse_replaced(message.lost.request, message.lost.epoch):
                    return
                if self.refuses_lost is not None:
                    session.send(self.refusal(message.lost.request, message.lost.epoch, self.refuses_lost))
                    return
                runner = next((r.instance for r in self.runners if r.stack is None), "")
                self.place(message.lost.request, message.lost.epoch, session, avoid=[runner])

    def _serves(self, digest: str) -> bool:
        return not digest or digest in {adapter.digest for adapter in self.adapters} - self.retired

    def refuse_replaced(self, request: str, epoch: int = 0) -> bool:
        """Refuse a request if no runner has its base model."""
        if self._bases.get(request, "") in ("", *(runner.base_digest for runner in self.runners)):
            return False
        self.say(self.refusal(request, epoch, BaseModelReplaced("the base model was replaced").to_proto()))
        return True

    def _enqueue(self, enqueue: scheduler_pb2.Enqueue, session: Gateway) -> None:
        if self.keeps_record:
            self.enqueued.append(enqueue)
            self._bases[enqueue.request] = enqueue.base_digest
        if self.refuses is not None:
            session.send(self.refusal(enqueue.request, enqueue.epoch, self.refuses))
        elif self.refuse_replaced(enqueue.request, enqueue.epoch):
            return
        elif not self._serves(enqueue.adapter_digest):
            gone = ModelNotFound("this revision of the adapter is no longer served").to_proto()
            session.send(self.refusal(enqueue.request, enqueue.epoch, gone))
        elif self.holds:
            position = scheduler_pb2.Position(request=enqueue.request, position=3, admitted=self.admits)
            session.send(scheduler_pb2.ServeDown(position=position))
        else:
            self.place(enqueue.request, enqueue.epoch, session, avoid=enqueue.avoid)


class FakePredictor(predictor_pb2_grpc.PredictorServicer):
    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/predictor.sock"
        self.outcomes: list[predictor_pb2.Outcome] = []
        self.calls: list[int] = []
        """How many prompts each had."""
        self.answered = 0
        self.answer = common_pb2.Estimate(q50=10, q80=20, q90=30, q95=40, rank=10, source="model:v1")
        self.prompts: list[predictor_pb2.Prompt] = []
        self.slow_seconds = 0.0
        self.slow_seconds_a_prompt = 0.0
        self.slow_seconds_an_outcome = 0.0
        self.accepts_at_once = 1_000_000
        self.keeps_record = True
        self.stack: AsyncExitStack | None = None

    async def start(self) -> None:
        self.stack = AsyncExitStack()
        add = functools.partial(predictor_pb2_grpc.add_PredictorServicer_to_server, self)
        await self.stack.enter_async_context(serving(self.address, add, grace=0))

    async def stop(self) -> None:
        if self.stack is not None:
            stack, self.stack = self.stack, None
            await stack.aclose()

    @property
    def asked(self) -> int:
        return len(self.calls)

    async def Predict(self, request: predictor_pb2.PredictRequest, context: Context) -> predictor_pb2.PredictResponse:
        if request.prompts:
            self.calls.append(len(request.prompts))
        if self.keeps_record:
            self.prompts.extend(request.prompts)
        await asyncio.sleep(self.slow_seconds + self.slow_seconds_a_prompt * len(request.prompts))
        self.answered += bool(request.prompts)
        return predictor_pb2.PredictResponse(estimates=[self.answer] * len(request.prompts), model_version="v1")

    async def Observe(self, request: predictor_pb2.ObserveRequest, context: Context) -> predictor_pb2.ObserveResponse:
        learned = request.outcomes[: self.accepts_at_once]
        await asyncio.sleep(self.slow_seconds_an_outcome * len(request.outcomes))
        if self.keeps_record:
            self.outcomes.extend(learned)
        return predictor_pb2.ObserveResponse(accepted=len(learned))

    async def ExplainEstimate(
        self, request: predictor_pb2.ExplainEstimateRequest, context: Context
    ) -> predictor_pb2.ExplainEstimateResponse:
        raise NotImplementedError  # gateways never ask it


@dataclass
class FakeServices:
    folder: Path
    runners: list[FakeRunner]
    scheduler: FakeScheduler
    predictor: FakePredictor
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)

    def add_adapter(self, name: str, *, tenant: str = "default", **more: Any) -> scheduler_pb2.CatalogAdapter:
        """An adapter of the group, ready unless `more` says otherwise."""
        facts: dict[str, Any] = {
            "ref": common_pb2.AdapterRef(namespace=tenant, name=name, generation=1),
            "group": GROUP,
            "model_name": name,
            "state": scheduler_pb2.ADAPTER_READINESS_READY,
            "digest": "sha256:" + format(len(self.scheduler.adapters) + 1, "064x"),
            "rank": 8,
            "source": f"file:///adapters/{name}",
        }
        adapter = scheduler_pb2.CatalogAdapter(**(facts | more))
        self.scheduler.adapters.append(adapter)
        return adapter


@asynccontextmanager
async def fake_services(
    *, runners: int = 1, assets: dict[str, bytes] | None = None, predictor: bool = True
) -> AsyncIterator[FakeServices]:
    # A socket's path has at most 107 bytes, and pytest's own folders can be longer.
    folder = Path(tempfile.mkdtemp(prefix="motet-"))
    try:
        assets = model_assets() if assets is None else assets
        parts = [FakeRunner(folder, f"runner-{i}", assets) for i in range(runners)]
        scheduler = FakeScheduler(folder, parts)  # type: ignore[abstract] # gRPC refuses calls that the class does not implement
        cluster = FakeServices(folder, parts, scheduler, FakePredictor(folder))
        async with AsyncExitStack() as stack:
            every: list[FakeRunner | FakeScheduler | FakePredictor] = [*parts, cluster.scheduler, cluster.predictor]
            for part in every:
                if part is not cluster.predictor or predictor:
                    await part.start()
                stack.push_async_callback(part.stop)
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)
