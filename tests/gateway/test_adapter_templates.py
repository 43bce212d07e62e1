"""Adapters that bring a chat template: who is asked by it, what bounds it, and what a change of revision does."""

import asyncio
import gc
import math
import sys
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motet.adapter_template import AdapterTemplate, digest_of_template
from motet.api.v1 import scheduler_pb2
from motet.errors import InvalidRequest, Overloaded
from motet_gateway import asset_searches, assets, gateway
from motet_gateway.asset_searches import Owner
from motet_gateway.assets import TEMPLATE, AssetKind, AssetStore, Bounds
from motet_gateway.tokens import namespace_turns, render_pool
from motet_gateway.tokens.chat_renderer import ChatRenderer
from motet_gateway.tokens.namespace_turns import NamespaceTurns
from motet_gateway.tokens.own_template import OwnTemplate
from motet_gateway.tokens.render_parent import FORK_BYTES
from motet_gateway.tokens.render_pool import RenderPool, TemplateText, encoded
from testbed.fake_services import GROUP, FakeServices, fake_services
from tests.gateway.conftest import Served, eventually, serve
from tests.gateway.test_renderers import HELLO, WITHOUT_END, children, rendering
from tests.support.surroundings import REAL

SAYS = [{"role": "user", "content": "Hi"}]
NEW = "sha256:" + "e" * 64


def bring(
    cluster: FakeServices, name: str, text: str, *, tenant: str = "default", sent: bool = True, **more: Any
) -> scheduler_pb2.CatalogAdapter:
    """An adapter whose revision has this template. `sent`: a runner has it."""
    adapter = next((one for one in cluster.scheduler.adapters if one.ref.name == name), None)
    adapter = adapter or cluster.add_adapter(name, tenant=tenant)
    content = AdapterTemplate(text=text, special_tokens={"eos_token": "<end>"}, **more).encode()
    adapter.template_digest = digest_of_template(content)
    if sent:
        cluster.runners[0].templates[adapter.digest, adapter.template_digest] = content
    return adapter


@pytest.fixture
async def own() -> AsyncIterator[Served]:
    async with fake_services() as cluster:
        cluster.add_adapter("plain")
        bring(cluster, "own", "{{ messages[0].content }}!{{ eos_token }}")
        async with serve(cluster, template_cpu_seconds=0.3) as running:
            yield running


async def publish(served: Served, name: str) -> None:
    """Until the gateway knows this adapter"""
    served.cluster.scheduler.publish()
    await eventually(lambda: any(one.ref.name == name for one in served.gateway.catalog.current.adapters))


def last_prompt(served: Served) -> str:
    text: str = served.cluster.tokenizer.decode(list(served.cluster.runners[0].submits[-1].prompt_ids))
    return text


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAYS, "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/v1/messages": {"messages": SAYS, "max_tokens": 2},
}


@pytest.mark.parametrize("path", BODIES)
async def test_each_api_of_conversations_uses_the_adapters_template(own: Served, path: str) -> None:
    for model, prompt in (("own", "Hi!<end>"), ("plain", "Hi "), ("tiny", "Hi "), ("own", "Hi!<end>")):
        answer = await own.http.post(path, json={"model": model, **BODIES[path]})
        assert answer.status_code == 200, answer.text
        assert last_prompt(own) == prompt


async def test_tokens_are_counted_as_they_are_sent(own: Served) -> None:
    def tokens(text: str) -> list[int]:
        return list(own.cluster.tokenizer.encode(text, add_special_tokens=False).ids)

    counted = await own.http.post("/tokenize", json={"model": "own", "messages": SAYS})
    assert counted.json()["tokens"] == tokens("Hi!<end>")
    counted = await own.http.post("/v1/messages/count_tokens", json={"model": "own", "messages": SAYS})
    assert counted.json()["input_tokens"] == len(tokens("Hi!<end>"))


async def test_a_plain_prompt_is_taken_as_it_is(own: Served) -> None:
    answer = await own.http.post("/v1/completions", json={"model": "own", "prompt": "The quick", "max_tokens": 2})
    assert answer.status_code == 200
    assert last_prompt(own) == "The quick"


async def test_tools_are_written_and_read_as_the_adapters_template_shows() -> None:
    text = "{{ tools | length }} <tool_call>{{ messages[-1].content }}"
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": SAYS, "tools": [tool], "max_tokens": 2}
    async with fake_services() as cluster:
        cluster.add_adapter("plain")
        bring(cluster, "caller", text, shows_tools=True)
        async with serve(cluster) as served:
            assert (await served.http.post("/v1/chat/completions", json={"model": "plain", **body})).status_code == 400
            answer = await served.http.post("/v1/chat/completions", json={"model": "caller", **body})
            assert answer.status_code == 200, answer.text
            assert last_prompt(served) == "1 <tool_call>Hi"
            cluster.scheduler.chat = scheduler_pb2.ChatFormats(tool="llama3")
            cluster.scheduler.publish()
            answer = await served.http.post("/v1/chat/completions", json={"model": "caller", **body})
            assert answer.status_code == 200, "what a manifest declares goes before"


async def test_a_pool_that_permits_templates_of_requests_takes_them_for_such_adapters_too(own: Served) -> None:
    own.cluster.scheduler.chat = scheduler_pb2.ChatFormats(request_templates=True)
    own.cluster.scheduler.publish()
    body = {
        "model": "own",
        **BODIES["/v1/chat/completions"],
        "chat_template": "{{ eos_token }}: {{ messages | length }}",
    }
    await eventually(lambda: own.gateway.catalog.current.groups[0].chat.request_templates)
    assert (await own.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert last_prompt(own) == "<end>: 1", "with the adapter's special tokens"


# ------------------------------------------------------------------------------------------------------------ revisions


async def test_a_prompt_is_rendered_for_the_revision_that_is_placed(own: Served) -> None:
    """The revision changes after the prompt was rendered, and before it is placed."""
    cluster = own.cluster
    cluster.predictor.slow_seconds = 0.2
    asked = cluster.predictor.asked
    body = {"model": "own", **BODIES["/v1/chat/completions"]}
    answers = [asyncio.create_task(own.http.post("/v1/chat/completions", json=body)) for _ in range(4)]
    await eventually(lambda: cluster.predictor.asked > asked)
    adapter = next(one for one in cluster.scheduler.adapters if one.ref.name == "own")
    cluster.scheduler.retired.add(adapter.digest)
    adapter.digest = NEW
    bring(cluster, "own", "{{ messages[0].content }}? (new)")
    cluster.scheduler.publish()
    for answer in await asyncio.gather(*answers):
        assert answer.status_code == 200
    submits = cluster.runners[0].submits
    assert {submit.adapter_digest for submit in submits} == {NEW}
    assert {cluster.tokenizer.decode(list(submit.prompt_ids)) for submit in submits} == {"Hi? (new)"}
    assert cluster.scheduler.enqueued[0].adapter_digest != NEW, "it was rendered and enqueued for the old one"


async def test_a_template_that_no_runner_has_is_asked_of_the_scheduler(own: Served) -> None:
    cluster = own.cluster
    adapter = bring(cluster, "cold", "cold: {{ messages[0].content }}", sent=False)
    await publish(own, "cold")
    body = {"model": "cold", **BODIES["/v1/chat/completions"]}
    answer = asyncio.create_task(own.http.post("/v1/chat/completions", json=body))
    await eventually(lambda: cluster.scheduler.held_templates)
    assert cluster.scheduler.held_templates[-1] == {GROUP: [adapter.digest]}
    assert not answer.done()
    bring(cluster, "cold", "cold: {{ messages[0].content }}")
    assert (await answer).status_code == 200
    assert last_prompt(own) == "cold: Hi"
    await eventually(lambda: cluster.scheduler.held_templates[-1] == {})


async def test_a_template_is_asked_for_as_soon_as_its_adapter_is_loaded(
    own: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its namespace misses so much that its runners are asked rarely"""
    monkeypatch.setattr(asset_searches, "SECONDS_PER_ASK", 1e6)
    cluster, text = own.cluster, "{{ messages[0].content }} later"
    bring(cluster, "cold", text, sent=False).state = scheduler_pb2.ADAPTER_READINESS_COLD
    await publish(own, "cold")
    body = {"model": "cold", **BODIES["/v1/chat/completions"]}
    answer = asyncio.create_task(own.http.post("/v1/chat/completions", json=body))
    await eventually(lambda: cluster.scheduler.held_templates)
    bring(cluster, "cold", text).state = scheduler_pb2.ADAPTER_READINESS_READY
    cluster.scheduler.publish()
    assert (await answer).status_code == 200
    assert last_prompt(own) == "Hi later"


async def test_a_template_that_comes_wakes_only_those_that_wait_for_it(
    cluster: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands may wait for something else."""
    bounds = replace(assets.TEMPLATES.bounds, unwanted_seconds=math.inf)
    monkeypatch.setattr(gateway, "TEMPLATES", replace(assets.TEMPLATES, bounds=bounds))
    adapter = bring(cluster, "comes", "comes")
    comes, never = ((digest, Owner(GROUP, adapter.digest, "default")) for digest in (adapter.template_digest, NEW))
    async with serve(cluster) as served:
        woken: list[str] = []
        for name, template in {"nothing": None, "never": never, "comes": comes}.items():
            served.gateway.listen(
                lambda name=name: woken.append(name),  # type: ignore[misc]
                lambda template=template: template,  # type: ignore[misc]
            )
        served.gateway.templates.fetch(*never)
        await eventually(lambda: cluster.scheduler.held_templates)
        woken.clear()
        served.gateway.templates.fetch(*comes)
        await eventually(lambda: woken)
        assert woken == ["comes"]


async def test_a_new_scheduler_is_told_which_templates_are_missing(own: Served) -> None:
    cluster = own.cluster
    adapter = bring(cluster, "cold", "cold", sent=False)
    await publish(own, "cold")
    answer = asyncio.create_task(
        own.http.post("/v1/chat/completions", json={"model": "cold", **BODIES["/v1/chat/completions"]})
    )
    await eventually(lambda: cluster.scheduler.held_templates)
    cluster.scheduler.held_templates.clear()
    await cluster.scheduler.restart()
    await eventually(lambda: cluster.scheduler.held_templates)
    assert cluster.scheduler.held_templates[0] == {GROUP: [adapter.digest]}
    answer.cancel()


async def test_a_template_of_another_digest_than_named_is_not_used(own: Served) -> None:
    cluster, runner = own.cluster, own.cluster.runners[0]
    adapter = bring(cluster, "cold", "right")
    runner.templates[adapter.digest, adapter.template_digest] = AdapterTemplate(text="wrong").encode()
    asked = runner.asset_requests
    await publish(own, "cold")
    answer = asyncio.create_task(
        own.http.post("/v1/chat/completions", json={"model": "cold", **BODIES["/v1/chat/completions"]})
    )
    await eventually(lambda: runner.asset_requests > asked + 1)
    assert not answer.done()
    bring(cluster, "cold", "right")
    assert (await answer).status_code == 200
    assert last_prompt(own) == "right"


async def test_what_is_no_template_refuses_the_requests_of_its_adapter_alone(own: Served) -> None:
    cluster = own.cluster
    adapter = cluster.add_adapter("broken")
    adapter.template_digest = digest_of_template(b'{"text": 7}')
    cluster.runners[0].templates[adapter.digest, adapter.template_digest] = b'{"text": 7}'
    cluster.scheduler.publish()
    body = BODIES["/v1/chat/completions"]
    await eventually(lambda: any(one.ref.name == "broken" for one in own.gateway.catalog.current.adapters))
    assert (await own.http.post("/v1/chat/completions", json={"model": "broken", **body})).status_code == 500
    assert (await own.http.post("/v1/chat/completions", json={"model": "own", **body})).status_code == 200


# -------------------------------------------------------------------------------------------------------------- hostile


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (WITHOUT_END["nested loops"], "the adapter's chat template takes more than 0.3 s of CPU time"),
        ("{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "the adapter's chat template "),
        ("{{ 'x' * 10 ** 12 }}", "the adapter's chat template "),
        ("{{ raise_exception('no') }}", "the adapter's chat template refused the messages: no"),
        ("{{ messages.__class__.__mro__ }}", "the adapter's chat template cannot render"),
        ("{{ cycler.__init__.__globals__.os.getpid() }}", "the adapter's chat template cannot render"),
        ("{{ ''|attr('format')|attr('__globals__') }}", "empty"),
        ("{{ messages.append(1) }}", "the adapter's chat template cannot render"),
        ("{% include 'x' %}", "the adapter's chat template cannot render"),
        ("{{ 1 / 0 }}", "the adapter's chat template cannot render"),
        ("{{ '' }}", "empty"),
    ],
)
async def test_a_hostile_template_is_refused_and_hurts_no_other_adapter(own: Served, text: str, says: str) -> None:
    bring(own.cluster, "hostile", text)
    own.cluster.scheduler.publish()
    body = BODIES["/v1/chat/completions"]
    await eventually(lambda: any(one.ref.name == "hostile" for one in own.gateway.catalog.current.adapters))
    answer = await own.http.post("/v1/chat/completions", json={"model": "hostile", **body})
    assert answer.status_code == 400
    assert says in answer.text
    for model in ("own", "plain"):
        assert (await own.http.post("/v1/chat/completions", json={"model": model, **body})).status_code == 200


def template(text: str, namespace: str) -> TemplateText:
    return TemplateText(text, {}, adapter_of=namespace)


async def test_no_code_of_an_adapter_runs_in_the_gateway() -> None:
    async with rendering(processes=2) as processes:
        renderer = ChatRenderer(processes)
        for _ in range(3):
            assert await renderer.render(template("Hi", "a"), encoded(HELLO)) == "Hi"
        assert not renderer.metered
        assert len(children()) == 1


async def test_namespaces_share_no_process_and_the_adapters_of_one_do() -> None:
    async with rendering(processes=4) as renderer:
        for text, namespace in (("1", "a"), ("2", "a"), ("1", "b"), ("2", "a")):
            assert await renderer.render(template(text, namespace), encoded(HELLO)) == text
        assert len(children()) == 2


async def test_each_of_eight_namespaces_keeps_its_process() -> None:
    pool = RenderPool(processes=2, cpu_seconds=1.0, memory_bytes=64 << 20, idle_bytes=16 * FORK_BYTES)
    try:
        first: set[int] = set()
        for _ in range(2):
            for namespace in "abcdefgh":
                assert await pool.render(template("Hi", namespace), encoded(HELLO)) == "Hi"
            first = first or {child.pid for child in children()}
        assert len(first) == 8
        assert {child.pid for child in children()} == first
    finally:
        await pool.close()


async def test_what_waits_for_work_takes_a_bounded_part_of_memory() -> None:
    """Mutation: the bytes of what waits have no bound."""
    pool = RenderPool(processes=2, cpu_seconds=1.0, memory_bytes=64 << 20, idle_bytes=5 * FORK_BYTES)
    try:
        assert await pool.render(TemplateText("the model's", {}), encoded(HELLO))
        (models,) = {child.pid for child in children()}
        for namespace in "abcdefgh":
            assert await pool.render(template("Hi", namespace), encoded(HELLO)) == "Hi"
            await eventually(lambda: len(children()) <= 5)
        assert models in {child.pid for child in children()}, "it goes last"
    finally:
        await pool.close()


async def test_a_process_that_has_become_large_does_not_wait_for_work() -> None:
    kept = "\N{GRINNING FACE}" * 50_000  # four bytes each
    pool = RenderPool(processes=2, cpu_seconds=5.0, memory_bytes=256 << 20, idle_bytes=8 * FORK_BYTES)
    try:
        assert await pool.render(template("small", "b"), encoded(HELLO)) == "small"
        (others,) = {child.pid for child in children()}
        seen: set[int] = set()
        for number in range(16):
            large = template(f"{{% if unset %}}{kept}{{% endif %}}{number}", "a")
            assert await pool.render(large, encoded(HELLO)) == f"{number}"
            seen |= {child.pid for child in children()} - {others}
        assert len(seen) >= 2, "it has been replaced"
        assert others in {child.pid for child in children()}
    finally:
        await pool.close()


async def test_only_work_for_a_namespace_counts_as_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until the models' templates leave a process. Mutation: that counts too."""
    took: list[tuple[str, float]] = []
    async with rendering(processes=2, cpu_seconds=1.0) as renderer:
        assert await renderer.render(template("Hi", "a"), encoded(HELLO)) == "Hi"
        monkeypatch.setattr(renderer.turns, "took", lambda *said: took.append(said))
        text = WITHOUT_END["nested loops"]
        models = [
            asyncio.create_task(renderer.render(TemplateText(f"{text}{number}", {}), encoded(HELLO)))
            for number in range(2)
        ]
        await eventually(lambda: len(children()) == 3)
        assert await renderer.render(template("Hi", "a"), encoded(HELLO)) == "Hi"
        assert any(one.done() for one in models), "it has waited"
        await asyncio.gather(*models, return_exceptions=True)
    ((namespace, seconds),) = took
    assert namespace == "a"
    assert seconds < namespace_turns.SLOW_SECONDS


async def test_a_namespace_waits_for_one_slow_turn_and_not_for_several() -> None:
    turns, said = NamespaceTurns(2, lambda: 100.0), list[str]()
    for slow in ("slow 1", "slow 2", "slow 3"):
        turns.took(slow, 0.6)
    turns.close()  # no rest

    async def turn(namespace: str) -> None:
        async with turns.turn(namespace):
            said.append(namespace)
            await asyncio.sleep(0)

    async with turns.free:  # taken
        tasks = [asyncio.create_task(turn(one)) for one in ("slow 1", "slow 2", "slow 3", "good")]
        for _ in range(9):
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert said == ["slow 1", "good", "slow 2", "slow 3"]


async def test_slow_namespaces_rest_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_turns, "MAX_REST_SECONDS", 3600.0)
    now = 100.0
    turns, said = NamespaceTurns(2, lambda: now), list[str]()
    turns.took("quick", namespace_turns.SLOW_SECONDS)
    turns.took("slow", 3600.0)

    async def turn(namespace: str) -> None:
        async with turns.turn(namespace):
            said.append(namespace)

    resting = asyncio.create_task(turn("slow"))
    await turn("quick")
    assert said == ["quick"]
    assert not resting.done()
    turns.close()
    await resting
    now += 2 * namespace_turns.SLOW_FOR_SECONDS
    turns.took("other", 3600.0)
    assert turns.slow == {"other"}, "what is over is forgotten"


async def test_where_too_many_wait_the_tenant_with_most_is_refused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_turns, "MAX_WAITING", 4)
    async with rendering(processes=2) as renderer:
        waiting = [
            asyncio.create_task(renderer.render(template("Hi", "a"), encoded(HELLO), tenant=tenant))
            for tenant in ("greedy", "greedy", "modest", "greedy", "other", "other")
        ]
        said = await asyncio.gather(*waiting, return_exceptions=True)
        assert [one if isinstance(one, str) else type(one) for one in said] == [
            "Hi",
            "Hi",
            "Hi",
            Overloaded,
            "Hi",
            Overloaded,
        ]
        assert await renderer.render(template("Hi", "a"), encoded(HELLO)) == "Hi"


def test_a_template_of_many_namespaces_takes_its_memory_once() -> None:
    text = "\x01" * (1 << 20)  # six bytes each in JSON
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        own = OwnTemplate(AdapterTemplate(text=text))
        texts = [own.text_of(f"namespace {number}") for number in range(64)]
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < 1.1 * own.bytes
    assert own.bytes < 1.1 * (taken + len(text))
    assert len({one.digest for one in texts}) == 64, "no two share a process"


async def test_endless_templates_of_one_namespace_leave_the_others_their_processes() -> None:
    async with rendering(processes=2, cpu_seconds=0.3) as renderer:
        endless = [
            asyncio.create_task(
                renderer.render(template(f"{WITHOUT_END['nested loops']}{number}", "bad"), encoded(HELLO))
            )
            for number in range(20)
        ]
        await eventually(children)
        for _ in range(3):
            assert await renderer.render(TemplateText("the model's", {}), encoded(HELLO)) == "the model's"
            assert await renderer.render(template("good", "good"), encoded(HELLO)) == "good"
        assert sum(not one.done() for one in endless) > 10, "they wait for each other"
        for one in endless:
            one.cancel()
        await asyncio.gather(*endless, return_exceptions=True)


async def test_the_time_of_a_turn_is_bounded_also_for_many_conversations_at_once() -> None:
    """Each of them takes less than may be, and all of them together more: then one after the other has its turn."""
    slow = template("{% for a in range(3000) %}{% for b in range(900) %}{% endfor %}{% endfor %}done", "a")
    async with rendering(processes=2, cpu_seconds=0.6) as renderer:
        answers = await asyncio.gather(
            *(renderer.render(slow, encoded(HELLO)) for _ in range(6)), return_exceptions=True
        )
        assert all(one == "done" or isinstance(one, InvalidRequest) for one in answers)


async def test_only_so_many_conversations_of_a_namespace_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_turns, "MAX_WAITING", 3)
    async with rendering(processes=2) as renderer:
        waiting = [asyncio.create_task(renderer.render(template("Hi", "a"), encoded(HELLO))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await renderer.render(template("Hi", "a"), encoded(HELLO))
        assert await renderer.render(template("Hi", "b"), encoded(HELLO)) == "Hi"
        assert await asyncio.gather(*waiting) == ["Hi"] * 3
        assert await renderer.render(template("Hi", "a"), encoded(HELLO)) == "Hi"


async def test_who_leaves_takes_no_turn_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutations: what was abandoned is rendered; it stays in memory until its turn, or in the queue of its template."""
    rendered = []
    process = render_pool._RenderProcess  # noqa: SLF001
    ask = process.ask

    async def recorded(self: Any, text: TemplateText, contexts: list[bytes]) -> list[bytes]:
        rendered.append(text.text)
        return await ask(self, text, contexts)

    monkeypatch.setattr(process, "ask", recorded)
    context = encoded([{"role": "user", "content": "said " * 100}])
    held = sys.getrefcount(context)

    async def begun(text: str, context: bytes, count: int = 1) -> list[asyncio.Task[str]]:
        some = [asyncio.create_task(renderer.render(template(text, "a"), context)) for _ in range(count)]
        for _ in range(3):  # until their queue waits for its turn
            await asyncio.sleep(0)
        return some

    async def leave(some: list[asyncio.Task[str]]) -> None:
        for task in some:
            task.cancel()
        await asyncio.gather(*some, return_exceptions=True)

    async with rendering(processes=2) as renderer:
        async with renderer.turns.turn("a"):
            (stays,) = await begun("stays", encoded(HELLO))
            await leave(await begun("leaves", context))
            for _ in range(40):
                await leave(await begun("stays", context, count=50))
            queues = renderer._queues.values()  # noqa: SLF001
            assert max(len(queue.jobs) for queue in queues) <= 2 * render_pool.MAX_BATCH
            await asyncio.sleep(0)  # the loop has its own last result until then
            gc.collect()
            assert sys.getrefcount(context) == held
        assert await stays == "stays"
    assert rendered == ["stays"]


# --------------------------------------------------------------------------------------------------------------- bounds


def kind(**bounds: Any) -> AssetKind[OwnTemplate]:
    return AssetKind(
        (TEMPLATE,),
        TEMPLATE,
        "there is none",
        1 << 20,
        lambda folder: digest_of_template((folder / TEMPLATE).read_bytes()),
        lambda folder: OwnTemplate.from_file(folder / TEMPLATE),
        lambda found: found.bytes,
        Bounds(**bounds),
    )


def store_in(folder: Path, cluster: FakeServices, **bounds: Any) -> AssetStore[OwnTemplate]:
    return AssetStore(
        folder,
        lambda: None,
        network=REAL.network,
        kind=kind(**bounds),
        addresses=lambda group: [runner.address for runner in cluster.runners] if group == GROUP else [],
    )


async def fetch(store: AssetStore[OwnTemplate], cluster: FakeServices, text: str, namespace: str) -> str:
    content, adapter = AdapterTemplate(text=text).encode(), f"sha256:{namespace}"
    digest = digest_of_template(content)
    cluster.runners[0].templates[adapter, digest] = content
    store.fetch(digest, Owner(GROUP, adapter, namespace))
    await eventually(lambda: store.get(digest) is not None)
    return digest


async def test_templates_of_one_namespace_leave_memory_for_those_of_others(
    cluster: FakeServices, tmp_path: Path
) -> None:
    bounds = {"kept_bytes": 40_000, "kept_bytes_of_namespace": 8_000, "disk_entries": 1000, "disk_bytes": 1 << 20}
    store = store_in(tmp_path, cluster, **bounds)
    first = await fetch(store, cluster, "a" * 500, "modest")
    many = [await fetch(store, cluster, f"{number}" * 500, "greedy") for number in range(10, 20)]
    assert store.get(first) is not None
    kept = [one for one in many if store.get(one) is not None]
    assert kept == many[-len(kept) :], "those that were wanted last"
    assert 1 <= len(kept) <= 3
    asked = cluster.runners[0].asset_requests
    store.fetch(many[0], Owner(GROUP))
    await eventually(lambda: store.get(many[0]) is not None)
    assert cluster.runners[0].asset_requests == asked, "it is on the disk"
    await store.close()


@pytest.mark.parametrize(
    "bounds", [{"disk_entries": 4, "disk_bytes": 1 << 20}, {"disk_entries": 99, "disk_bytes": 250}]
)
async def test_the_disk_has_a_bounded_number_of_templates(
    bounds: dict[str, int], cluster: FakeServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the times at which it is tidied anyway"""
    monkeypatch.setattr(assets, "TIDY_SECONDS", 1e9)
    store = store_in(tmp_path, cluster, **bounds)
    found = [await fetch(store, cluster, f"text {number}", "a") for number in range(9)]
    await eventually(lambda: len([*tmp_path.iterdir()]) <= 5)
    assert all(store.get(digest) is not None for digest in found), "in memory they stay"
    await store.close()
