"""The parts of the gateway, put together. The routes call it."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Protocol

from motet.errors import EngineRestarted, MotetError, NotAuthenticated
from motet.keys import KEYS_MADE_FILE
from motet.settings import Addresses, ProcessSettings
from motet.surroundings import Surroundings
from motet_gateway.admission import Admission
from motet_gateway.asset_searches import Owner
from motet_gateway.assets import MODEL_ASSETS, TEMPLATES, AssetStore
from motet_gateway.catalog import CurrentCatalog, NotReadyReason, Target, Weights
from motet_gateway.direct_writes import WritesOfTurn
from motet_gateway.explanations import Explanations
from motet_gateway.features_key import FEATURES_KEY_FILE, read_key
from motet_gateway.grammars.trials import GrammarTrials
from motet_gateway.held_requests import HeldRequests
from motet_gateway.histories import Histories
from motet_gateway.identity.access import KeyAccess
from motet_gateway.identity.caller import Caller
from motet_gateway.identity.key_sources import KeySource, NoKeys
from motet_gateway.links import Links
from motet_gateway.metrics import Metrics
from motet_gateway.prompt_features import PromptFeatures
from motet_gateway.request_bodies import BodyBudget
from motet_gateway.settings import Settings
from motet_gateway.tokens.chat_renderer import ChatRenderer
from motet_gateway.tokens.encoder import Encoder
from motet_gateway.tokens.render_pool import RenderPool
from motet_gateway.tokens.text_model import ModelTokenizer

_STOPPING = "The gateway is stopping; send the request again."


class LiveAnswer(Protocol):
    """An answer in progress."""

    @property
    def caller(self) -> Caller:
        """Whose request it answers."""

    def abort(self, error: MotetError) -> None: ...


class Gateway:
    def __init__(
        self,
        settings: Settings,
        process: ProcessSettings,
        addresses: Addresses,
        metrics: Metrics,
        *,
        surroundings: Surroundings,
        keys: KeySource | None = None,
    ) -> None:
        """`keys`: where API keys are read from. None: there are none."""
        self.settings = settings
        self.process = process
        self.metrics = metrics
        self.around = surroundings
        self.name = f"gateway-{surroundings.new_id(4)}"
        """Unique per start, since a restarted gateway has no requests of the process before."""
        self.access = KeyAccess(
            settings,
            keys or NoKeys(),
            gone=self._keys_gone,
            memory=process.data_dir / KEYS_MADE_FILE,
            clock=surroundings.clock,
            today=lambda: datetime.fromtimestamp(surroundings.wall(), UTC),
        )
        metrics.keys_read_age.set_function(self.access.read_age)
        self.catalog = CurrentCatalog()
        self.answers: set[LiveAnswer] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self._drained = False
        self.writes = WritesOfTurn()
        self.listeners: dict[Callable[[], None], Callable[[], tuple[str, Owner] | None]] = {}
        """With the chat template that each waits for"""
        self.held = HeldRequests(self._on_held, surroundings.clock)
        self._held_reported = True
        self.assets = AssetStore(
            process.cache_dir / "assets",
            self._notify_listeners,
            network=surroundings.network,
            kind=MODEL_ASSETS,
            addresses=self._addresses,
        )
        self.templates = AssetStore(
            process.cache_dir / "templates",
            self._on_template,
            network=surroundings.network,
            kind=TEMPLATES,
            addresses=self._addresses,
            missing=self.held.templates_missing,
            ask_again=self._ask_for_templates,
        )
        self.bodies = BodyBudget(settings.max_bodies_bytes, seconds=settings.body_seconds)
        self.encoder = Encoder(threaded_bytes=settings.threaded_prompt_bytes)
        self.grammars = GrammarTrials()
        self.renderer = ChatRenderer(
            RenderPool(
                processes=settings.template_processes,
                cpu_seconds=settings.template_cpu_seconds,
                memory_bytes=settings.template_memory_bytes,
                idle_bytes=settings.template_idle_bytes,
            )
        )
        self.catalog.listen(self._on_catalog)
        self.features = PromptFeatures(
            read_key(
                settings.features_key_file or process.data_dir / FEATURES_KEY_FILE,
                named="MOTET_GATEWAY_FEATURES_KEY_FILE",
            )
        )
        self.histories = Histories(settings.histories, surroundings.clock)
        self.estimator, self.dispatcher = Links.of(
            self.name,
            settings,
            addresses,
            metrics,
            catalog=self.catalog,
            held=self.held,
            surroundings=surroundings,
            time_scale=process.time_scale,
        )
        self.explanations = Explanations(
            self.histories, surroundings.network, lambda: self.dispatcher.scheduler.connected_to, surroundings.clock
        )
        self.admission = Admission(
            settings.max_live_requests,
            choices=lambda: self.dispatcher.live,
            held=self.held,
            answers=self.answers,
        )

    async def run(self) -> None:
        """Keep the streams to the other services. Ends by cancellation."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.dispatcher.run(), name="dispatcher")
                tasks.create_task(self.estimator.run(), name="estimator")
                tasks.create_task(self.access.run(), name="access")
        finally:
            self.encoder.close()
            await self.renderer.close()
            await self.grammars.close()
            await self.assets.close()
            await self.templates.close()

    async def drain(self) -> None:
        """Wait until running answers end. After `drain_seconds` end them with an error. Then no other answer begins:
        its body may have arrived late, or it waited behind another one on its connection."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_seconds):
                await self._idle.wait()
        self._drained = True
        for answer in list(self.answers):
            answer.abort(EngineRestarted(_STOPPING))

    @contextlib.contextmanager
    def answering(self, answer: LiveAnswer) -> Iterator[None]:
        """Count `answer` as in progress, and abort it if its key has ended. Raises EngineRestarted after the drain."""
        if self._drained:
            raise EngineRestarted(_STOPPING)
        self.answers.add(answer)
        self._idle.clear()
        if why := self.access.ended_reason(answer.caller):  # the key may have ended while the body arrived
            answer.abort(_ended(why))
        try:
            yield
        finally:
            self.answers.discard(answer)
            if not self.answers:
                self._idle.set()

    def _keys_gone(self, gone: Mapping[str, str]) -> None:
        for answer in list(self.answers):
            if why := gone.get(answer.caller.key_id):
                answer.abort(_ended(why))

    @property
    def healthy(self) -> bool:
        """At least one group has a runner."""
        return not self.draining and self.catalog.known and any(g.runners for g in self.catalog.current.groups)

    def find(self, model: str, caller: Caller) -> tuple[Target, ModelTokenizer] | NotReadyReason:
        """The model and its tokenizer, or what the request has to wait for.

        Raises ModelNotFound, or the adapter's own error.
        """
        if not self.catalog.known:
            return NotReadyReason("waiting for the scheduler", soon=True)
        target = self.catalog.current.resolve(model, caller)
        group, runners = target.group.group, bool(target.group.runners)
        if waits_for := target.not_ready_reason():
            return NotReadyReason(waits_for, group, runners)
        if (text := self.assets.get(target.asset_digest)) is not None:
            return self._with_own_template(target, text, runners)
        self.assets.fetch(target.asset_digest, Owner(group))
        # Only a runner sends the tokenizer, so a group without runners has to start one first.
        return NotReadyReason(
            f"fetching the tokenizer of {target.group.served_name}", "" if runners else group, runners, soon=runners
        )

    def _with_own_template(
        self, target: Target, text: ModelTokenizer, runners: bool
    ) -> tuple[Target, ModelTokenizer] | NotReadyReason:
        """With the chat template that the adapter's revision brings. If the name means another revision before the
        prompt is placed, the scheduler refuses it, and the call begins again with that one's (`ModelOfCall`)."""
        if not (digest := target.template_digest) or target.adapter is None:
            return target, text
        group, namespace = target.group.group, target.adapter.ref.namespace
        if (template := self.templates.get(digest)) is not None:
            return target, text.with_template(template, namespace)
        owner = Owner(group, target.adapter_digest, namespace)
        self.templates.fetch(digest, owner, at_hand=target.is_in_memory)
        why = f"fetching the chat template of {target.adapter_name}"
        return NotReadyReason(why, "" if runners else group, runners, soon=runners, template=(digest, owner))

    def weights_of(self, model: str, caller: Caller) -> Weights | None:
        """What a name means at the moment; None: nothing. Unlike `find` it fetches nothing."""
        try:
            return self.catalog.current.resolve(model, caller).weights
        except MotetError:
            return None

    def listen(
        self, listener: Callable[[], None], waits_for: Callable[[], tuple[str, Owner] | None] = lambda: None
    ) -> Callable[[], None]:
        """Call `listener` whenever the result of `find` may have changed. Call the returned function to stop.
        `waits_for`: see `NotReadyReason.template`."""
        self.listeners[listener] = waits_for

        def stop() -> None:
            self.listeners.pop(listener, None)

        return stop

    def hold(self, request: str, group: str) -> None:
        """Let a request wait for a runner of its group. Raises Overloaded if the gateway takes no more."""
        if request not in self.held:
            self.admission.check_choices(1)
        self.held.enter(request, group)

    def _on_held(self) -> None:
        if self._held_reported:  # one report for all changes of this iteration of the event loop
            self._held_reported = False
            asyncio.get_running_loop().call_soon(self._report_held)

    def _report_held(self) -> None:
        self._held_reported = True
        self.dispatcher.report_held()

    def _on_catalog(self) -> None:
        if uids := self.catalog.current.namespaces:  # else what was said before still holds
            self.access.namespaces_are(uids)
        # Fetch before the first request, so that it does not have to wait.
        for group in self.catalog.current.groups:
            self.assets.fetch(group.asset_digest, Owner(group.group))
        self.assets.forget_unwanted()
        self.templates.forget_unwanted()
        self._notify_listeners()

    def _addresses(self, group: str) -> list[str]:
        return [r.address for g in self.catalog.current.groups if g.group == group for r in g.runners]

    def _on_template(self) -> None:
        """Thousands of requests may wait for other things, and tenants decide how often templates are read."""
        for listener, waits_for in list(self.listeners.items()):
            if (template := waits_for()) is not None and not self.templates.is_sought(*template):
                listener()

    def _ask_for_templates(self) -> None:
        for listener, waits_for in list(self.listeners.items()):
            if waits_for() is not None:
                listener()

    def _notify_listeners(self) -> None:
        for listener in list(self.listeners):
            listener()


def _ended(why: str) -> NotAuthenticated:
    how = "has expired" if why == "expired" else f"was {why}"
    return NotAuthenticated(
        f"The API key of this request {how} during the answer, so the answer ends here. Ask for a new key."
    )
