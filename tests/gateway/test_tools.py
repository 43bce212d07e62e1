"""Tools in chats: OpenAI's unmodified client, over a real socket. The runner writes what the user says."""

import json
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import orjson
import pytest
from openai.types.chat import ChatCompletion

from motet.api.v1 import scheduler_pb2
from motet.errors import InvalidRequest, MotetError
from motet.grammars.grammar import GrammarForm
from motet.tool_calls.formats import FORMATS
from motet_gateway.answers.messages.conversation import chat_messages as conversation_of_messages
from motet_gateway.answers.responses.conversation import chat_messages as conversation_of_responses
from motet_gateway.parameters import ChatBody, parse
from motet_gateway.tools.parameters import MAX_TOOLS
from motet_gateway.tools.written_out import written_out
from testbed.fake_services import TEMPLATE, fake_services, model_assets
from tests.gateway.conftest import Served, eventually, serve

READS_TOOLS = "{%- if tools %}{% endif -%}"
TEMPLATES = {
    "hermes": "{#- <tool_call> -#}" + READS_TOOLS,
    "llama3": "{#- <|python_tag|> -#}" + READS_TOOLS,
    "mistral": "{#- [TOOL_CALLS] -#}" + READS_TOOLS,
    "pythonic": "{#- [func_name1( -#}" + READS_TOOLS,
}
ANSWERS = {
    "hermes": 'So: <tool_call>\n{"name": "look_up", "arguments": {"q": "a b"}}\n</tool_call>\n'
    '<tool_call>{"name": "send", "arguments": {}}</tool_call>',
    "llama3": 'So: <|python_tag|>{"name": "look_up", "parameters": {"q": "a b"}}; {"name": "send", "parameters": {}}',
    "mistral": 'So: [TOOL_CALLS] [{"name": "look_up", "arguments": {"q": "a b"}}, {"name": "send", "arguments": {}}]',
    "pythonic": "[look_up(q='a b'), send()]",
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | more}


SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
TOOLS = [tool("look_up", parameters=SCHEMA), tool("send")]


@pytest.fixture(params=[*TEMPLATES])
async def asked(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, Served]]:
    async with (
        fake_services(assets=model_assets(template=TEMPLATES[request.param] + TEMPLATE)) as cluster,
        serve(cluster) as served,
    ):
        yield request.param, served


@pytest.fixture
async def hermes() -> AsyncIterator[Served]:
    template = "{#- <tool_call> -#}{{ messages[-1].content }}{% if tools %}{{ ' ' ~ tools | length }}{% endif %}"
    async with fake_services(assets=model_assets(template=template)) as cluster, serve(cluster) as served:
        yield served


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def of(answer: ChatCompletion) -> tuple[str | None, list[tuple[str, Any]], str]:
    (choice,) = answer.choices
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
    return choice.message.content, calls, choice.finish_reason


async def test_calls_of_each_format_arrive_whole_and_streamed(asked: tuple[str, Served]) -> None:
    form, served = asked
    said: dict[str, Any] = {"model": "tiny", "messages": says(ANSWERS[form]), "tools": TOOLS}
    content, calls, finish = of(await served.openai.chat.completions.create(**said))
    assert calls == [("look_up", {"q": "a b"}), ("send", {})]
    assert (content, finish) == (None if form == "pythonic" else "So:", "tool_calls")
    async with served.openai.chat.completions.stream(**said) as stream:
        whole = await stream.get_final_completion()
    assert of(whole) == (content or whole.choices[0].message.content, calls, finish)
    assert not whole.choices[0].message.content or content
    assert len({call.id for call in whole.choices[0].message.tool_calls or []}) == 2


async def test_without_a_call_an_answer_is_as_it_would_be_without_tools(asked: tuple[str, Served]) -> None:
    _, served = asked
    for text in ("The quick brown fox", '<tool_call>{"name": "other"}', '{"name": "Ann"}', "[TOOL_CALLS]", "[a(b)]"):
        answer = await served.openai.chat.completions.create(model="tiny", messages=says(text), tools=TOOLS)
        assert of(answer) == (text + " ", [], "stop")


async def test_one_call_ends_the_answer_if_calls_may_not_be_parallel(asked: tuple[str, Served]) -> None:
    form, served = asked
    answer = await served.openai.chat.completions.create(
        model="tiny", messages=says(ANSWERS[form]), tools=TOOLS, parallel_tool_calls=False
    )
    assert of(answer)[1:] == ([("look_up", {"q": "a b"})], "tool_calls")


async def test_what_comes_behind_the_only_call_is_not_counted(hermes: Served) -> None:
    """All tokens of the answer come in one step."""
    call = '<tool_call>{"name": "send", "arguments": {}}</tool_call>'
    size = len(hermes.cluster.tokenizer.encode(call).ids)
    hermes.cluster.runners[0].tokens_per_step = 500
    said: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "parallel_tool_calls": False, "logprobs": True}
    answer = await hermes.openai.chat.completions.create(messages=says(call + " and so on"), **said)
    (choice,) = answer.choices
    assert answer.usage is not None
    assert choice.logprobs is not None
    assert answer.usage.completion_tokens == len(choice.logprobs.content or []) <= size


@pytest.mark.parametrize("at_once", [1, 500])
async def test_the_only_call_may_take_all_tokens_of_an_answer(hermes: Served, at_once: int) -> None:
    """Mutation: the runner's reason is told, as the limit is reached with the call's last token."""
    call = '<tool_call>{"name": "send", "arguments": {}}</tool_call>'
    most = len(hermes.cluster.tokenizer.encode(call).ids)
    hermes.cluster.runners[0].tokens_per_step = at_once
    answer = await hermes.openai.chat.completions.create(
        model="tiny", messages=says(call), tools=TOOLS, parallel_tool_calls=False, max_tokens=most
    )
    assert of(answer)[1:] == ([("send", {})], "tool_calls")


async def test_an_answer_that_is_cut_within_a_call_says_so(asked: tuple[str, Served]) -> None:
    form, served = asked
    text = ANSWERS[form]
    most = len(served.cluster.tokenizer.encode(text[: text.index("a b") + 1]).ids)
    answer = await served.openai.chat.completions.create(
        model="tiny", messages=says(text), tools=TOOLS, max_tokens=most
    )
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "length"
    assert call.function.arguments.startswith('{"q": "a')
    assert not call.function.arguments.endswith("}")


async def test_a_stop_string_ends_only_the_text_beside_calls(asked: tuple[str, Served]) -> None:
    form, served = asked
    for stop, calls in (("b", 2), ("So", 2 if form == "pythonic" else 0)):
        answer = await served.openai.chat.completions.create(
            model="tiny", messages=says(ANSWERS[form]), tools=TOOLS, stop=[stop]
        )
        assert len(of(answer)[1]) == calls


async def test_the_template_gets_the_tools_unless_none_may_be_called(hermes: Served) -> None:
    for choice, text in (("auto", "Yes 2"), ("none", "Yes")):
        answer = await hermes.openai.chat.completions.create(
            model="tiny", messages=says("Yes"), tools=TOOLS, tool_choice=choice
        )
        assert of(answer) == (text, [], "stop")


async def test_a_model_whose_template_shows_no_calls_refuses_tools(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"shows none of the formats.*spec\.chat\.toolFormat") as caught:
        await served.openai.chat.completions.create(model="tiny", messages=says("x"), tools=TOOLS)
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    counted = await served.http.post("/tokenize", json={"model": "tiny", "messages": says("x"), "tools": TOOLS})
    assert (counted.status_code, counted.json()["error"]["param"]) == (400, "tools")


async def test_the_format_that_an_adapter_declares_goes_before_its_pools_and_that_before_the_templates() -> None:
    template = TEMPLATES["hermes"] + TEMPLATE
    async with fake_services(assets=model_assets(template=template)) as cluster, serve(cluster) as served:
        cluster.add_adapter("plain")
        cluster.add_adapter("own", chat=scheduler_pb2.ChatFormats(tool="pythonic"))
        for declared, of_base in (("", "hermes"), ("mistral", "mistral")):
            cluster.scheduler.chat = scheduler_pb2.ChatFormats(tool=declared)
            cluster.scheduler.publish()
            await eventually(lambda declared=declared: declares(served, declared))
            for model, form in (("tiny", of_base), ("plain", of_base), ("own", "pythonic")):
                answer = await served.openai.chat.completions.create(
                    model=model, messages=says(ANSWERS[form]), tools=TOOLS
                )
                assert of(answer)[1:] == ([("look_up", {"q": "a b"}), ("send", {})], "tool_calls")


def declares(served: Served, form: str) -> bool:
    catalog = served.gateway.catalog.current
    return len(catalog.adapters) == 2 and catalog.groups[0].chat.tool == form


async def test_a_template_that_reads_no_tools_gets_them_and_their_calls_as_text(served: Served) -> None:
    served.cluster.scheduler.chat = scheduler_pb2.ChatFormats(tool="pythonic")
    served.cluster.scheduler.publish()
    await eventually(lambda: served.gateway.catalog.current.groups[0].chat.tool)
    calls = [{"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": "sea"}'}}]
    chat: list[Any] = [
        {"role": "system", "content": "Be brief."},
        *says("A."),
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "Blue."},
    ]
    answer = await served.openai.chat.completions.create(model="tiny", messages=chat, tools=TOOLS)
    shown = "\n".join(orjson.dumps(one["function"]).decode() for one in TOOLS)
    assert of(answer)[0] == (
        f"Be brief.\n\nYou can call these tools:\n{shown}\n\nTo call one, write it like this:\n"
        "[name_of_the_tool(parameter='value')]A.[look_up(q='sea')]Result of look_up:\nBlue. "
    )
    without = await served.openai.chat.completions.create(model="tiny", messages=chat)
    assert of(without)[0] == "Be brief.A.[look_up(q='sea')]Result of look_up:\nBlue. "
    named = {"type": "function", "function": {"name": "send"}}
    with pytest.raises(openai.InternalServerError, match="has no call"):
        await served.openai.chat.completions.create(model="tiny", messages=says("x"), tools=TOOLS, tool_choice=named)
    assert json.loads(served.cluster.runners[0].submits[-1].sampling.tool_calls)["format"] == "pythonic"


STRICT = (
    "{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant') %}{{ raise_exception('no role ' ~ message.role) }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not in turn') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}"
    "{% endfor %}"
)
SILENT = (
    "{% for message in messages if message.role != 'system' %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)


@pytest.mark.parametrize("template", [STRICT, SILENT])
async def test_a_template_that_takes_no_system_message_gets_tools_before_the_first_of_the_user(template: str) -> None:
    async with fake_services(assets=model_assets(template=template)) as cluster, serve(cluster) as served:
        cluster.scheduler.chat = scheduler_pb2.ChatFormats(tool="pythonic")
        cluster.scheduler.publish()
        await eventually(lambda: served.gateway.catalog.current.groups[0].chat.tool)
        calls = [{"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": "sea"}'}}]
        chat: list[Any] = [
            *says("A."),
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "Blue."},
            *says("And why?"),
        ]
        for _ in range(2):  # the second time it is rendered on the event loop
            answer = await served.openai.chat.completions.create(model="tiny", messages=chat, tools=TOOLS)
            said = of(answer)[0] or ""
            assert said.startswith("<user>You can call these tools:\n")
            assert said.endswith(
                "[name_of_the_tool(parameter='value')]\n\nA.<assistant>[look_up(q='sea')]"
                "<user>Result of look_up:\nBlue.\n\nAnd why?"
            )
        system: Any = {"role": "system", "content": "Be brief."}
        if template is STRICT:
            with pytest.raises(openai.BadRequestError, match="no role system"):
                await served.openai.chat.completions.create(model="tiny", messages=[system, *chat], tools=TOOLS)
        else:  # what the client says there is not shown without tools either
            answer = await served.openai.chat.completions.create(model="tiny", messages=[system, *chat], tools=TOOLS)
            assert of(answer)[0] == said


PARTS = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.content[0].type == 'image' %}{{ raise_exception('no image') }}{% endif %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% if not loop.last or add_generation_prompt %}<end>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("form", ["", "pythonic"])
async def test_a_template_that_reads_parts_alone_shows_what_comes_as_a_string_too(form: str) -> None:
    async with fake_services(assets=model_assets(template=PARTS)) as cluster, serve(cluster) as served:
        cluster.scheduler.chat = scheduler_pb2.ChatFormats(tool=form)
        cluster.scheduler.publish()
        await eventually(lambda: [group.chat.tool for group in served.gateway.catalog.current.groups] == [form])
        for content in ("Hi", [{"type": "text", "text": "Hi"}]):
            said: list[Any] = [{"role": "user", "content": content}]
            answer = await served.openai.chat.completions.create(model="tiny", messages=said)
            assert of(answer)[0] == "<user>Hi<end>"
            begun = [*said, {"role": "assistant", "content": "Yes"}]
            more = {"continue_final_message": True, "add_generation_prompt": False}
            answer = await served.openai.chat.completions.create(model="tiny", messages=begun, extra_body=more)
            assert of(answer)[0] == "<user>Hi<end><assistant>Yes"
        response = await served.openai.responses.create(model="tiny", input="Hi", instructions="Be brief.")
        assert response.output_text == "<system>Be brief.<end><user>Hi<end>"
        if form:
            answer = await served.openai.chat.completions.create(model="tiny", messages=says("Hi"), tools=TOOLS)
            assert (of(answer)[0] or "").startswith("<system>You can call these tools:\n")


@pytest.mark.parametrize(
    ("roles", "takes_system", "shown"),
    [
        ("system user", True, "system+tools user"),
        ("system developer user", True, "system+tools developer user"),
        ("user", True, "tools(system) user"),
        ("developer user", True, "developer tools+user"),
        ("system user", False, "system tools+user"),
        ("developer system user assistant", False, "developer system tools+user assistant"),
        ("user user", False, "tools+user user"),
        ("system", False, "system tools(user)"),
        ("assistant user", False, "tools(user) assistant user"),
        ("system assistant", False, "system tools(user) assistant"),
        ("", False, "tools(user)"),
    ],
)
def test_tools_stand_where_the_template_shows_them(roles: str, takes_system: bool, shown: str) -> None:
    messages = [{"role": role, "content": role} for role in roles.split()]
    seen = []
    for one in written_out(messages, TOOLS, FORMATS["pythonic"], takes_system=takes_system):
        texts = ["tools" if text.startswith("You can call") else text for text in _paragraphs(one["content"])]
        seen.append("+".join(texts) if one["role"] in texts else f"{texts[0]}({one['role']})")
    assert " ".join(seen) == shown


def _paragraphs(text: str) -> list[str]:
    return [one for one in text.split("\n\n") if not one.startswith("To call one")]


async def test_whether_a_template_takes_a_system_message_is_asked_with_the_variables_of_the_request() -> None:
    """Mutations: without them; an answer is kept; the case of letters matters."""
    template = (
        "{{ day | upper }}{% for message in messages if message.role != 'system' or day.shown %}"
        "<{{ message.role }}>{{ message.content | upper }}{% endfor %}"
    )
    async with fake_services(assets=model_assets(template=template)) as cluster, serve(cluster) as served:
        cluster.scheduler.chat = scheduler_pb2.ChatFormats(tool="pythonic")
        cluster.scheduler.publish()
        await eventually(lambda: served.gateway.catalog.current.groups[0].chat.tool)
        for shown in (False, True, False):
            body = {"chat_template_kwargs": {"day": {"shown": shown}}}
            answer = await served.openai.chat.completions.create(
                model="tiny", messages=says("A."), tools=TOOLS, extra_body=body
            )
            assert ("<system>YOU CAN CALL" in (of(answer)[0] or "")) is shown


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ('{"q": "%s"}' % ("{[," * 120_000), 200),
        ('{"q": "%s"}' % ('\\"{' * 120_000), 200),
        ('{"q": [%s1]}' % ("{}," * 100_001), 400),
        ('{"q": [%s1]}' % ('"",' * 100_001), 400),
    ],
    ids=["braces in a string", "quotes in a string", "objects", "strings"],
)
async def test_earlier_arguments_have_the_bounds_of_a_body(hermes: Served, arguments: str, status: int) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}]
    chat = [{"role": "assistant", "content": None, "tool_calls": calls}, *says("x")]
    answer = await hermes.http.post("/v1/chat/completions", json={"model": "tiny", "messages": chat, "max_tokens": 2})
    assert answer.status_code == status, answer.text[:300]
    if status == 400:
        assert answer.json()["error"]["param"] == "messages[0].tool_calls[0].function.arguments"


async def test_a_format_of_a_newer_version_is_refused_by_name(served: Served) -> None:
    served.cluster.scheduler.chat = scheduler_pb2.ChatFormats(tool="newer")
    served.cluster.scheduler.publish()
    await eventually(lambda: served.gateway.catalog.current.groups[0].chat.tool)
    with pytest.raises(openai.BadRequestError, match=r"spec\.chat\.toolFormat of this model is 'newer'"):
        await served.openai.chat.completions.create(model="tiny", messages=says("x"), tools=TOOLS)


async def test_a_runner_gets_the_grammar_of_calls_that_have_to_be_made(hermes: Served) -> None:
    named = {"type": "function", "function": {"name": "send"}}
    call = says('<tool_call>{"name": "send", "arguments": {}}</tool_call>')
    await hermes.openai.chat.completions.create(model="tiny", messages=call, tools=TOOLS, tool_choice=named)
    (submit,) = hermes.cluster.runners[0].submits
    rules = json.loads(submit.sampling.tool_calls)
    assert (rules["format"], [*rules["tools"]], rules["must"], rules["parallel"]) == ("hermes", ["send"], True, False)


async def test_an_answer_that_had_to_call_and_did_not_is_an_error(hermes: Served) -> None:
    """As a runner answers that knows no tools."""
    said: dict[str, Any] = {"model": "tiny", "messages": says("Yes"), "tools": TOOLS, "tool_choice": "required"}
    with pytest.raises(openai.InternalServerError, match="has no call"):
        await hermes.openai.chat.completions.create(**said)
    with pytest.raises(openai.APIError, match="has no call"):
        async for _ in await hermes.openai.chat.completions.create(**said, stream=True):
            pass
    cut = await hermes.openai.chat.completions.create(**said, max_tokens=1)
    assert cut.choices[0].finish_reason == "length"


async def test_a_tool_whose_schema_cannot_be_served_is_refused_by_name(hermes: Served) -> None:
    odd = tool("odd", strict=True, parameters={"type": "object", "properties": {"x": {"uniqueItems": True}}})
    with pytest.raises(openai.BadRequestError, match=r"tools: .*tool odd: .*uniqueItems") as caught:
        await hermes.openai.chat.completions.create(model="tiny", messages=says("x"), tools=[*TOOLS, odd])
    assert caught.value.param == "tools"


async def test_earlier_calls_reach_the_template_with_arguments_as_objects() -> None:
    template = (
        "{#- <tool_call> -#}{%- if tools %}{% endif -%}{% for message in messages %}"
        "{% for call in message.tool_calls or [] %}"
        "{{ call.function.name ~ call.function.arguments.q }}{% endfor %}{{ message.content }}{% endfor %}"
    )
    calls = [{"id": "123456789", "type": "function", "function": {"name": "look_up", "arguments": '{"q": "sea"}'}}]
    chat: list[Any] = [
        *says("A."),
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "123456789", "content": "Blue."},
    ]
    async with fake_services(assets=model_assets(template=template)) as cluster, serve(cluster) as served:
        answer = await served.openai.chat.completions.create(model="tiny", messages=chat, tools=TOOLS)
        assert of(answer)[0] == "A.look_upseaBlue."


async def test_integers_of_earlier_arguments_reach_the_template_with_all_their_digits() -> None:
    template = (
        "{#- <tool_call> -#}{%- if tools %}{% endif -%}{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    )
    async with fake_services(assets=model_assets(template=template)) as cluster, serve(cluster) as served:
        for number, shown in (
            (18446744073709551615, "18446744073709551615"),
            (-9223372036854775808, "-9223372036854775808"),
            (18446744073709551616, '"18446744073709551616"'),
            (-9223372036854775809, '"-9223372036854775809"'),
            (10**40, f'"{10**40}"'),
        ):
            call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": json.dumps({"n": number})}}
            chat: list[Any] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
            answer = await served.openai.chat.completions.create(model="tiny", messages=chat)
            assert of(answer)[0] == f'{{"n": {shown}}}'


def test_the_arguments_of_earlier_calls_are_bounded_together() -> None:
    """They are parsed where all other requests wait for it, and a body's bounds do not count what is in strings."""
    arguments = "[" + "{}," * 60_000 + "{}]"
    call = {"id": "a", "type": "function", "function": {"name": "send", "arguments": arguments}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    ChatBody(model="m", messages=[*says("x"), asked]).plain_messages()
    with pytest.raises(InvalidRequest) as caught:
        ChatBody(model="m", messages=[*says("x"), asked, asked]).plain_messages()
    assert caught.value.param == "messages[2].tool_calls[0].function.arguments"


def conversations(value: object) -> dict[str, Callable[[], object]]:
    """With a call whose arguments have the value, in each API."""
    arguments, text = {"n": value}, json.dumps({"n": value})
    called = {"id": "1", "type": "function", "function": {"name": "send", "arguments": text}}
    use = {"type": "tool_use", "id": "1", "name": "send", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
    messages = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    item = {"type": "function_call", "call_id": "1", "name": "send", "arguments": text}
    chat = ChatBody(model="m", messages=[{"role": "assistant", "tool_calls": [called]}])
    return {
        "messages[0].tool_calls[0].function.arguments": chat.plain_messages,
        "messages[0].content[0].input": lambda: conversation_of_messages(None, messages),
        "input[0].arguments": lambda: conversation_of_responses(None, [item]),
    }


@pytest.mark.parametrize("where", conversations(0))
def test_no_function_is_called_for_each_value_of_earlier_arguments(where: str) -> None:
    """That blocks all other requests: a second for two million values."""
    read, calls = conversations([1] * 150_000)[where], list[str]()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        read()
    finally:
        sys.setprofile(None)
    assert len(calls) < 1000


@pytest.mark.parametrize("where", conversations(0))
def test_few_values_are_looked_at_for_integers_that_are_too_long(where: str) -> None:
    assert str(2**64) in json.dumps(conversations([1, 2**64])[where]())
    with pytest.raises(InvalidRequest, match="send these integers as strings") as caught:
        conversations([1] * 150_000 + [2**64])[where]()
    assert caught.value.param == where


@pytest.mark.parametrize("where", conversations(0))
def test_integers_that_are_too_long_are_bounded_together(where: str) -> None:
    """Writing 2,000 of the longest as strings blocks all other requests for half a second."""
    longest = 10**4299
    assert str(longest) in str(conversations([longest] * 50)[where]())
    with pytest.raises(InvalidRequest, match=r"more than 1048576 bits together; send these integers as") as caught:
        conversations([longest] * 100)[where]()
    assert caught.value.param == where


async def test_a_chat_goes_on_behind_a_call_with_broken_arguments(hermes: Served) -> None:
    text = '<tool_call>{"name": "look_up", "arguments": {"q": x}}</tool_call>'
    answer = await hermes.openai.chat.completions.create(model="tiny", messages=says(text), tools=TOOLS)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls or []
    assert (choice.finish_reason, call.function.arguments) == ("stop", '{"q": x}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "Bad."}
    chat: list[Any] = [*says("x"), choice.message.model_dump(exclude_none=True), result]
    answer = await hermes.openai.chat.completions.create(model="tiny", messages=chat, tools=TOOLS)
    assert of(answer)[0] == "Bad. 2"


def body(**fields: Any) -> ChatBody:
    parsed = parse(ChatBody, orjson.dumps({"model": "m", "messages": says("x")} | fields))
    parsed.refuse_unsupported()
    parsed.plain_messages()
    return parsed


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(name) for name in names]}}


@pytest.mark.parametrize(
    ("fields", "may", "must", "bound"),
    [
        ({}, {"look_up", "send"}, False, False),
        ({"tool_choice": "auto"}, {"look_up", "send"}, False, False),
        ({"tool_choice": "required"}, {"look_up", "send"}, True, True),
        ({"tool_choice": tool("send")}, {"send"}, True, True),
        ({"tool_choice": allowed("auto", "send")}, {"send"}, False, True),
        ({"tool_choice": allowed("auto", "send", "look_up")}, {"look_up", "send"}, False, False),
        ({"tool_choice": allowed("required", "look_up")}, {"look_up"}, True, True),
        ({"tools": [tool("a", strict=True), tool("b")]}, {"a", "b"}, False, True),
    ],
)
def test_a_choice_says_which_tools_may_and_which_have_to_be_called(
    fields: dict[str, Any], may: set[str], must: bool, bound: bool
) -> None:
    offered = body(**({"tools": TOOLS} | fields)).tools_offered
    assert offered is not None
    assert (offered.schemas.keys(), offered.must, offered.bound) == (may, must, bound)
    grammar = offered.grammar("hermes", None)
    assert (grammar is not None and grammar.form is GrammarForm.TOOL_CALLS) is bound


def message_with(*calls: Any) -> dict[str, Any]:
    return {"messages": [*says("x"), {"role": "assistant", "tool_calls": list(calls)}]}


@pytest.mark.parametrize(
    ("fields", "param", "says_why"),
    [
        ({"tools": {}}, "tools", "must be a list"),
        ({"tools": [tool("a")] * (MAX_TOOLS + 1)}, "tools", "up to 128"),
        ({"tools": [5]}, "tools[0].type", "must be 'function'"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "not 'custom'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "letters"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name", "rename one"),
        ({"tools": [tool("a", description=5)]}, "tools[0].function.description", "must be a string"),
        ({"tools": [tool("a", parameters=5)]}, "tools[0].function.parameters", "must be a JSON schema"),
        ({"tools": [tool("a", parameters={"type": "array"})]}, "tools[0].function.parameters.type", "'object'"),
        ({"tools": [tool("a", description=[])]}, "tools[0].function.description", "must be a string"),
        ({"tools": [tool("a", strict=1)]}, "tools[0].function.strict", "true or false"),
        ({"tools": [tool("a", strict="yes")]}, "tools[0].function.strict", "true or false"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "must be one of none, auto, required"),
        ({"tools": TOOLS, "tool_choice": tool("other")}, "tool_choice.function.name", "no tool of the request"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name", "required"),
        ({"tools": TOOLS, "tool_choice": allowed("any", "send")}, "tool_choice.allowed_tools.mode", "must be"),
        (
            {"tools": TOOLS, "tool_choice": allowed("auto", "other")},
            "tool_choice.allowed_tools.tools[0].function.name",
            "no tool",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "valid boolean"),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "with tools only a JSON schema"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "leave it out"),
        ({"functions": [{}]}, "functions", "use tools"),
        (message_with(5), "messages[1].tool_calls[0].type", "must be 'function'"),
        (message_with({"function": {}}), "messages[1].tool_calls[0].function.name", "required"),
        (
            message_with({"function": {"name": "a", "arguments": []}}),
            "messages[1].tool_calls[0].function.arguments",
            "must be a JSON object",
        ),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls", "assistant"),
        ({"messages": [{"role": "tool", "content": "", "tool_call_id": 5}]}, "messages[0].tool_call_id", "string"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, says_why: str) -> None:
    with pytest.raises(MotetError, match=says_why) as caught:
        body(**fields)
    assert caught.value.param == param


def test_schemas_that_are_too_deep_or_too_large_are_refused() -> None:
    depth = 10_000
    deep = '{"model":"m","messages":[],"tools":[' + '{"items":' * depth + "1" + "}" * depth + "]}"
    with pytest.raises(InvalidRequest, match="recursion limit"):
        parse(ChatBody, deep.encode())
    deepest = json.loads('{"not":' * 252 + "{}" + "}" * 252)
    with_answer = body(tools=TOOLS, guided_json=json.dumps(deepest))
    assert with_answer.tools_offered is not None
    assert with_answer.tools_offered.grammar("hermes", deepest) is not None
    large = {"properties": {f"name{n}": {"type": "string"} for n in range(10_000)}}
    offered = body(tools=[tool("a", parameters=large)], tool_choice="required").tools_offered
    assert offered is not None
    with pytest.raises(InvalidRequest, match="their schemas have more than"):
        offered.grammar("hermes", None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            b'"tool_choice":"required","tools":[{"type":"function","function":{"name":"a","parameters":SCHEMA}}]',
            "tools",
        ),
        (b'"guided_json":SCHEMA', "guided_json"),
    ],
)
def test_an_integer_that_cannot_be_written_again_is_refused(fields: bytes, param: str) -> None:
    schema = b'{"properties":{"a":{"maximum":%d}}}' % 10**30
    with pytest.raises(InvalidRequest, match=f"{param}: .*64 bits") as caught:
        said = fields.replace(b"SCHEMA", schema)
        parsed = parse(ChatBody, b'{"model":"m","messages":[{"role":"user","content":"x"}],' + said + b"}")
        assert parsed.grammar_asked or parsed.tools_offered is None or parsed.tools_offered.grammar("hermes", None)
    assert caught.value.param == param
