"""`chat_template` of a request: only where the pool permits it, within the bounds of all templates, and no more."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import jinja2
import pytest

from motet.api.v1 import scheduler_pb2
from motet.errors import Overloaded
from motet_gateway.tokens.chat_renderer import ChatRenderer
from motet_gateway.tokens.render_pool import TemplateText, encoded
from motet_gateway.tokens.request_templates import MAX_WAITING
from testbed.fake_services import TEMPLATE, fake_services
from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import Served, eventually, serve
from tests.gateway.test_renderers import HELLO, children, rendering
from tests.support.for_each import for_each

SAYS = [{"role": "user", "content": "Hi"}]
ENDLESS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture
async def permitting() -> AsyncIterator[Served]:
    async with fake_services() as cluster:
        cluster.add_adapter("legal")
        cluster.scheduler.chat = scheduler_pb2.ChatFormats(request_templates=True)
        async with serve(cluster, template_cpu_seconds=0.3, template_processes=2) as running:
            yield running


async def ask(served: Served, template: Any, **more: Any) -> httpx2.Response:
    body = {"model": "tiny", "messages": SAYS, "max_tokens": 2, "chat_template": template, **more}
    return await served.http.post("/v1/chat/completions", json=body)


def prompt_of(served: Served) -> str:
    text: str = served.cluster.tokenizer.decode(list(served.cluster.runners[0].submits[-1].prompt_ids))
    return text


@pytest.mark.parametrize("model", ["tiny", "legal"])
async def test_it_replaces_the_models_own_where_the_pool_permits_it(permitting: Served, model: str) -> None:
    template = "{{ name }}: {{ messages[0].content }}{{ eos_token }}"
    answer = await ask(permitting, template, model=model, chat_template_kwargs={"name": "Ann"})
    assert answer.status_code == 200, answer.text
    assert prompt_of(permitting).startswith("Ann: Hi")
    counted = await permitting.http.post(
        "/tokenize", json={"model": model, "messages": SAYS, "chat_template": "{{ messages[0].content }}"}
    )
    plain = await permitting.http.post("/tokenize", json={"model": model, "prompt": "Hi"})
    assert counted.json()["tokens"] == plain.json()["tokens"]
    await ask(permitting, "", model=model)
    assert prompt_of(permitting) == "Hi ", "empty: the model's own"


async def test_where_the_pool_says_nothing_it_is_refused_with_the_way_out(served: Served) -> None:
    for path, body in (
        ("/v1/chat/completions", {"max_tokens": 2}),
        ("/tokenize", {}),
    ):
        answer = await served.http.post(path, json={"model": "tiny", "messages": SAYS, "chat_template": "x", **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "chat_template")
        assert "spec.chat.requestTemplates" in error["message"]


async def test_an_adapter_cannot_permit_it_for_itself(served: Served) -> None:
    """Only pools have the field. A pool's word counts for all that is served with it."""
    assert (await ask(served, "x", model="legal")).status_code == 400


@for_each(
    ("template", "why"),
    [
        ("{% for %}", "chat_template: the chat template cannot be parsed"),
        ("{{ raise_exception('no') }}", "chat_template: it refused the messages: no"),
        ("{{ messages[0].content.nothing.more }}", "chat_template: it cannot render these messages"),
        ("{{ messages.append(1) }}", "chat_template: it cannot render these messages"),
        ("{{ ''.__class__.__mro__ }}", "chat_template: it cannot render these messages"),
        ("{{ 'a' * 10 ** 10 }}", "chat_template: it needs more than"),
        (ENDLESS, "chat_template: it takes more than 0.3 s of CPU time"),
        ("{{ '' }}", "messages: the prompt is empty"),
        ("x" * (64 * 1024 + 1), "chat_template: "),
        (5, "chat_template: "),
    ],
)
async def test_a_bad_one_is_an_error_about_the_field(permitting: Served, template: Any, why: str) -> None:
    answer = await ask(permitting, template)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, why.partition(":")[0]), answer.text
    assert error["message"].startswith(why)
    assert "the model's" not in error["message"]


async def test_an_error_says_what_the_template_said(permitting: Served) -> None:
    """Also where it speaks of the model's chat template: its words stay as they are."""
    said = "the model's chat template is better"
    answer = await ask(
        permitting, "{{ raise_exception(messages[-1].content) }}", messages=[{**SAYS[0], "content": said}]
    )
    assert answer.json()["error"]["message"] == f"chat_template: it refused the messages: {said}"
    begun = [*SAYS, {"role": "assistant", "content": "I think"}]
    answer = await ask(permitting, "{{ messages[0].content }}", messages=begun, continue_final_message=True)
    error = answer.json()["error"]
    assert error["param"] == "continue_final_message"
    assert error["message"].startswith("continue_final_message: the chat template omits the final message")


async def test_a_tenants_slow_ones_keep_no_others_templates_waiting(permitting: Served) -> None:
    """With two processes, two endless templates at once would stop all others."""
    slow = [asyncio.create_task(ask(permitting, f"{ENDLESS}{number}")) for number in range(6)]
    await asyncio.sleep(0.1)
    long = [{"role": "user", "content": "x" * 300}] * 30  # too large for the event loop
    body = {"model": "tiny", "messages": long, "max_tokens": 2, "truncate_prompt_tokens": 100}
    answer = await permitting.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert sum(one.done() for one in slow) < 5
    assert {one.status_code for one in await asyncio.gather(*slow)} == {400}


def endless(number: int, *, tenant: str) -> TemplateText:
    return TemplateText(f"{ENDLESS}{number}", {}, brought_by=tenant)


async def hung_up(renderer: ChatRenderer, templates: list[TemplateText], after: float) -> None:
    asked = [asyncio.create_task(renderer.render(one, encoded(HELLO))) for one in templates]
    await asyncio.sleep(after)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_clients_that_hang_up_keep_no_others_templates_waiting() -> None:
    """Mutation: the turn ends with the request instead of with the work of its process."""
    async with rendering(processes=3, cpu_seconds=3600) as processes, asyncio.timeout(PATIENCE_S):
        renderer = ChatRenderer(processes)
        for number in range(6):
            await hung_up(renderer, [endless(number, tenant="a")], after=0.05)
        assert await renderer.render(TemplateText("b's", {}, brought_by="b"), encoded(HELLO)) == "b's"
        assert await renderer.render(TemplateText("the model's", {}), encoded(HELLO)) == "the model's"
        await renderer.close()


async def test_the_models_templates_keep_a_process_whatever_tenants_bring() -> None:
    async with rendering(processes=2, cpu_seconds=3600) as processes, asyncio.timeout(PATIENCE_S):
        renderer = ChatRenderer(processes)
        await hung_up(renderer, [endless(0, tenant=tenant) for tenant in "abc"], after=0.05)
        assert await renderer.render(TemplateText("the model's", {}), encoded(HELLO)) == "the model's"
        await renderer.close()


async def test_a_tenants_line_has_an_end_and_who_hangs_up_leaves_it() -> None:
    async with rendering(processes=3) as processes, asyncio.timeout(PATIENCE_S):
        renderer = ChatRenderer(processes)
        line = asyncio.create_task(hung_up(renderer, [endless(n, tenant="a") for n in range(MAX_WAITING)], after=0.1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        mine, others = (TemplateText("Hi", {}, brought_by=tenant) for tenant in "ab")
        with pytest.raises(Overloaded, match="Try again"):
            await renderer.render(mine, encoded(HELLO))
        assert await renderer.render(others, encoded(HELLO)) == "Hi"
        await line
        began = asyncio.get_running_loop().time()
        assert await renderer.render(mine, encoded(HELLO)) == "Hi"
        assert asyncio.get_running_loop().time() - began < PATIENCE_S / 2, "behind the one alone that is under way"
        await renderer.close()


async def test_each_has_a_process_of_its_own() -> None:
    async with rendering(processes=2) as processes:
        own, said = TemplateText("own", {}), encoded(HELLO)
        assert await processes.render(own, said) == "own"
        (models,) = {child.pid for child in children()}
        for text, tenant in (("x", "a"), ("y", "a"), ("y", "b")):
            before = {child.pid for child in children()}
            for _ in range(2):
                assert await processes.render(TemplateText(text, {}, brought_by=tenant), said) == text
            await eventually(lambda: len(children()) == 2)
            now = {child.pid for child in children()}
            assert models in now, "it renders the model's template on"
            assert now & before == {models}, "a new one for each template, and for each tenant"
        assert await processes.render(own, said) == "own"
        assert {child.pid for child in children()} == now


async def test_the_event_loop_reads_none(permitting: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take it up to a quarter of a second, and all streams with it."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a template is read here")

    monkeypatch.setattr(jinja2.Environment, "lex", never)
    monkeypatch.setattr(jinja2.Environment, "compile", never)
    permitting.cluster.scheduler.chat.tool = "hermes"
    permitting.cluster.scheduler.publish()
    await eventually(lambda: permitting.gateway.catalog.current.groups[0].chat.tool)
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    for offered in (tools, None):
        answer = await ask(permitting, "{# tools #}{{ messages[0].content }}", tools=offered)
        assert answer.status_code == 200, answer.text
        assert ("You can call these tools" in prompt_of(permitting)) is (offered is not None)
    await ask(permitting, "{{ tools[0].function.name }}", tools=tools)
    assert prompt_of(permitting) == "look_up"
    slow = await ask(permitting, "{# tools #}{{" + "(" * 60_000, tools=tools)
    assert (slow.status_code, slow.json()["error"]["param"]) == (400, "chat_template")


async def test_equal_prompts_share_cached_pages_whatever_wrote_them(permitting: Served) -> None:
    await ask(permitting, None)
    await ask(permitting, TEMPLATE)
    own, brought = permitting.cluster.runners[0].submits[-2:]
    assert (own.prompt_ids, own.cache_salt) == (brought.prompt_ids, brought.cache_salt)
    own, brought = permitting.cluster.scheduler.enqueued[-2:]
    assert own.prefix_hashes == brought.prefix_hashes


async def test_a_template_that_reads_tools_gets_them(permitting: Served) -> None:
    permitting.cluster.scheduler.chat.tool = "hermes"
    permitting.cluster.scheduler.publish()
    await eventually(lambda: permitting.gateway.catalog.current.groups[0].chat.tool)
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    await ask(permitting, "{{ tools[0].function.name }}: {{ messages[0].content }}", tools=tools)
    assert prompt_of(permitting) == "look_up: Hi"
    await ask(permitting, "{% for message in messages %}{{ message.content }}\n\n{% endfor %}", tools=tools)
    said = prompt_of(permitting)
    assert said.startswith("You can call these tools:\n")
    assert said.endswith("\n\nHi\n\n")


async def test_wrong_messages_are_refused_before_a_process_is_asked(permitting: Served) -> None:
    """Also where the template would be refused: it has no turn, and takes no time."""
    permitting.cluster.scheduler.chat.tool = "hermes"
    permitting.cluster.scheduler.publish()
    await eventually(lambda: permitting.gateway.catalog.current.groups[0].chat.tool)
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    before = children()
    for template in ("{# tools #}" + ENDLESS, ENDLESS, "{% for part in message.content %}{% endfor %}{# tools #}{%"):
        answer = await ask(permitting, template, tools=tools, messages=[*SAYS, {"role": "user"}])
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages[1].content"), answer.text
    assert children() == before


async def test_parts_are_written_out_with_the_tools(permitting: Served) -> None:
    """Also for a template that reads parts where it finds them."""
    permitting.cluster.scheduler.chat.tool = "hermes"
    permitting.cluster.scheduler.publish()
    await eventually(lambda: permitting.gateway.catalog.current.groups[0].chat.tool)
    template = (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}\n\n{% endfor %}"
    )
    said = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *SAYS]
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    answer = await ask(permitting, template, tools=tools, messages=said)
    assert answer.status_code == 200, answer.text
    assert prompt_of(permitting).startswith("Be brief.\n\nYou can call these tools:\n")
