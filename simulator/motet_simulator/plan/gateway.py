"""A simulated gateway: it plays a workload, and keeps what becomes of it."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy

from motet.domain import BASE, Digest, InstanceName, RequestId, Tenant
from motet.prefix_hints import prefix_salt, prompt_hints
from motet.runner_info import RequestClass
from motet_scheduler.policy import effects, events
from motet_simulator.plan.answer import Answer
from motet_simulator.plan.catalog import object_name
from motet_simulator.plan.clock import VirtualClock
from motet_simulator.plan.estimates import Estimates
from motet_simulator.plan.outcome import Outcome
from motet_simulator.plan.setup import GATEWAY, GROUP, MESSAGE_SECONDS, Setup
from motet_simulator.workloads.request import WorkloadRequest


class SimulatedGateway:
    def __init__(
        self,
        setup: Setup,
        clock: VirtualClock,
        requests: Iterator[WorkloadRequest],
        *,
        adapters: Mapping[str, Digest],
        outcome: Outcome,
        answers: dict[RequestId, Answer],
        tell_scheduler: Callable[[events.Event], None],
        submit: Callable[[InstanceName, Answer], None],
    ) -> None:
        """`answers`: of requests that have not ended. `adapters`: by their names. `submit`: to which runner."""
        self._setup = setup
        self._clock = clock
        self._requests = requests
        self._adapters = adapters
        self._outcome = outcome
        self._answers = answers
        self._tell_scheduler = tell_scheduler
        self._submit = submit
        self._estimates = Estimates(setup.lengths)
        self._number = 0
        self._all_asked = False
        self._next_at = 0.0

    def idle_until(self) -> float:
        """When its next request comes; 0 while an answer is open."""
        return 0.0 if self._answers else self._next_at

    @property
    def done(self) -> bool:
        """Whether all requests of its workload have ended."""
        return self._all_asked and not self._answers

    def ask_next(self) -> None:
        asked = next(self._requests, None)
        if asked is None:
            self._all_asked = True
            return
        self._next_at = max(self._clock.now, asked.at)
        self._clock.at(self._next_at, self._ask, asked)

    def _ask(self, asked: WorkloadRequest) -> None:
        self.ask_next()
        self._number += 1
        setup = self._setup
        request = RequestId(f"q{self._number}")
        most = asked.max_tokens or max(setup.max_tokens, asked.output_tokens)
        room = setup.profile.context_tokens - asked.prompt_tokens
        if not asked.max_tokens:
            most = max(asked.output_tokens, min(most, room))
        digest = self._adapters[asked.adapter] if asked.adapter else BASE
        answer = Answer(
            request,
            asked,
            name=(2 * self._number + 1) % (1 << 31),
            max_tokens=most,
            end_length=asked.prompt_tokens + min(asked.output_tokens, most),
            length=asked.prompt_tokens,
            digest=digest,
            estimate=self._estimates.of(asked, most),
        )
        if room >= 0:  # else it is refused, whatever it says
            answer.prompt = asked.prompt(self._number)
        hints: tuple[int, ...] = ()
        if asked.blocks and setup.profile.engine.prefix_cache:
            answer.salt = prefix_salt(Digest(""), digest, asked.tenant)
            hints = tuple(prompt_hints(answer.salt, answer.prompt))
        self._answers[request] = answer
        enqueued = events.Enqueued(
            gateway=GATEWAY,
            request=request,
            tenant=Tenant(asked.tenant),
            group=GROUP,
            digest=digest,
            adapter=object_name(asked.adapter),
            request_class=RequestClass[asked.request_class.upper()],
            prompt_tokens=asked.prompt_tokens,
            max_tokens=most,
            estimate=answer.estimate,
            prefix_hints=hints,
        )
        self._clock.after(setup.profile.overheads.arrival, self._tell_scheduler, enqueued)

    def placed(self, placed: effects.SendPlaced) -> None:
        answer = self._answers.get(placed.request)
        if answer is None or placed.epoch <= answer.epoch:
            return
        if answer.epoch:
            if not answer.left:
                return  # it has its last token, which its runner is about to tell
            answer = self._answers[answer.request] = copy(answer)  # the former runner may still count in its own
            answer.moved = placed.moved_reason != ""
        answer.epoch, answer.promise, answer.weight = placed.epoch, placed.promise, placed.weight
        if answer.placed_at < 0:
            answer.placed_at = self._clock.now
        self._submit(placed.instance, answer)

    def ended(self, answer: Answer) -> None:
        if self._answers.get(answer.request) is not answer:
            return
        del self._answers[answer.request]
        output = answer.delivered
        self._estimates.observe(answer.asked, output, answer.max_tokens)
        self._outcome.ended(answer, self._setup.profile.overheads.delivery)
        self._clock.after(
            MESSAGE_SECONDS,
            self._tell_scheduler,
            events.RequestFinished(GATEWAY, answer.request, answer.epoch, output, "stop"),
        )

    def declined(self, answer: Answer, why: str) -> None:
        if self._answers.get(answer.request) is answer:
            lost = events.RequestLost(GATEWAY, answer.request, answer.epoch, why, answer.delivered)
            self._clock.after(MESSAGE_SECONDS, self._tell_scheduler, lost)

    def refused(self, refused: effects.SendRefused) -> None:
        answer = self._answers.pop(refused.request, None)
        if answer is not None:
            answer.refusal = refused.failure.code
            self._outcome.refused(answer)
