"""A gateway's process, and who asks it. It resolves names and waits as `motet_gateway.answers` does, without HTTP."""

import math
from collections.abc import Callable
from functools import cache

from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, predictor_pb2, runner_pb2
from motet.domain import Digest
from motet.errors import MotetError
from motet.prefix_hints import prefix_salt, prompt_hints
from motet.surroundings import Surroundings
from motet.task_group import run_together
from motet.time_split import TimePart, TimeSplit
from motet_gateway.catalog import CurrentCatalog, Target
from motet_gateway.choice_record import ChoiceRecord
from motet_gateway.estimator import scope_name
from motet_gateway.held_requests import HeldRequests
from motet_gateway.identity.caller import Caller
from motet_gateway.links import Links
from motet_gateway.live_choice import GenerationRequest
from motet_gateway.metrics import Metrics
from motet_gateway.settings import Settings
from motet_simulator.trials.addresses import ADDRESSES
from motet_simulator.trials.clients import Client
from motet_simulator.trials.operator import POOL, TENANT
from motet_simulator.trials.served import ServedRevisions
from motet_simulator.world import Process

MAX_LIVE_IN_MESSAGE = 3
"""So few that a new scheduler hears in parts what runs."""


class Gateway:
    def __init__(
        self,
        process: Process,
        around: Surroundings,
        *,
        served: ServedRevisions,
        object_to: Callable[[str], None],
    ) -> None:
        self.process = process
        self.estimator, self.dispatcher = Links.of(
            process.name,
            _settings(),
            ADDRESSES,
            Metrics(CollectorRegistry(), clock=around.clock),
            catalog=CurrentCatalog(),
            held=HeldRequests(lambda: None, around.clock),
            surroundings=around,
        )
        self.dispatcher.max_live_in_message = MAX_LIVE_IN_MESSAGE
        self.clients: list[Client] = []
        self.unasked: list[Client] = []
        """They wait for another catalog: for a first one, or one in which their model is ready."""
        self._clock = around.clock
        self._served = served
        self._object_to = object_to
        self.dispatcher.catalog.listen(self._on_catalog)

    async def run(self) -> None:
        await run_together(self.dispatcher.run(), self.estimator.run())

    def ask(self, client: Client) -> None:
        self.clients.append(client)
        loop = self.process.loop
        loop.call_soon(self._ask, client)
        if client.ask.cancel_after is not None:
            loop.call_later(client.ask.cancel_after, self._leave, client)

    def _on_catalog(self) -> None:
        if problem := self._served.problem_of(self.dispatcher.catalog.current):
            self._object_to(f"{self.process.name} {problem}")
        waiting, self.unasked = self.unasked, []
        for client in waiting:
            self._ask(client)

    def _ask(self, client: Client) -> None:
        """As the gateway's answers do: resolve the name of the model, and wait until it can be served."""
        catalog, ask = self.dispatcher.catalog, client.ask
        if client.over:
            return
        if not catalog.known:
            self.unasked.append(client)
            return
        model = f"{TENANT}/{ask.adapter}" if ask.adapter else "demo"
        try:
            target = catalog.current.resolve(model, Caller(ask.tenant))
            waits = target.not_ready_reason() or client.waits_for_another(target, catalog.current)
        except MotetError as error:
            client.target = None
            client.end(error)
            return
        if waits:
            self.unasked.append(client)
            return
        client.starts(target)
        split = TimeSplit(TimePart.OVERHEAD, self._clock())
        self.process.loop.create_task(self._start(client, target, split), name=client.request)

    def ask_again(self, client: Client) -> None:
        assert client.target is not None
        self.process.loop.call_soon(self._ask, client)

    async def _start(self, client: Client, target: Target, split: TimeSplit) -> None:
        ask, request = client.ask, client.request
        prompt = predictor_pb2.Prompt(
            request=request,
            tenant=ask.tenant,
            adapter=scope_name(target.adapter_name, target.base_digest),
            prompt_tokens=len(ask.prompt),
            max_tokens=ask.max_tokens,
        )
        (estimate,) = await self.estimator.estimate([prompt])
        if client.left:
            return
        if ask.unreadable:
            estimate.rank = math.nan
        salt = prefix_salt(Digest(target.base_digest), Digest(target.adapter_digest), ask.tenant)
        order = GenerationRequest(
            request=request,
            tenant=ask.tenant,
            group=str(POOL),
            adapter=target.adapter_name,
            adapter_digest=target.adapter_digest,
            base_digest=target.base_digest,
            request_class=common_pb2.RequestClass.ValueType(ask.request_class),
            prompt_ids=list(ask.prompt),
            choice=0,
            sampling=runner_pb2.Sampling(max_tokens=ask.max_tokens, ignore_eos=True),
            seed=ask.seed,
            estimate=estimate,
            deadline_seconds=ask.deadline,
            prefix_hints=prompt_hints(salt, ask.prompt),
        )
        outcome = predictor_pb2.Outcome(
            request=request, tenant=ask.tenant, adapter=prompt.adapter, output_tokens=ask.max_tokens, estimate=estimate
        )
        client.ended = lambda: self.estimator.observe(outcome)
        client.split = split
        self.dispatcher.start(order, client, ChoiceRecord(split))

    def _leave(self, client: Client) -> None:
        if not client.over:
            client.leave()
            self.dispatcher.cancel(client.request, "the client went away")
            client.check_split()


@cache
def _settings() -> Settings:
    """Made once, because to look into the environment takes long."""
    return Settings()
