"""Templates on the event loop: they give the same text as in a process, and never take long."""

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.errors import InvalidRequest
from motet_gateway.tokens import chat_renderer
from motet_gateway.tokens.chat_renderer import SHORT_BYTES, ChatRenderer
from motet_gateway.tokens.chat_template import CannotRender, ChatTemplate
from motet_gateway.tokens.metered_template import MeteredTemplate, NotMeterable
from motet_gateway.tokens.render_pool import RenderPool, TemplateText, encoded
from tests.common.cpu_speed import cpu_unit_seconds
from tests.gateway.conftest import eventually
from tests.gateway.test_renderers import HELLO, TOO_LARGE, WITHOUT_END, children
from tests.repo.tree import ROOT

BUNDLED = (ROOT / "cli/motet_cli/bundled/model/chat_template.jinja").read_text()
HEADERS = """
{{- bos_token }}
{%- set first = messages[0] -%}
{%- if first.role == 'system' -%}{%- set system = first.content | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{{- '<|start|>system\n' ~ system ~ '\n' ~ (date | default('today')) ~ '<|end|>' -}}
{%- for message in rest -%}
    {%- set head = '<|start|>' + message['role'] + '<|end|>\n\n' -%}
    {%- if loop.first and (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') -}}
    {%- endif -%}
    {{- head + message['content'] | trim + '<|eot|>' if not loop.last else head ~ message['content'] -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant\n' -}}{%- endif -%}
"""
TOOLS = """
{%- macro arguments(given) -%}
    {%- for name, value in given | items -%}{{- name }}={{ value | tojson(ensure_ascii=false) }};{%- endfor -%}
{%- endmacro -%}
{%- if tools -%}
    {{- 'Tools:\n' -}}
    {%- for tool in tools if tool.function -%}{{- tool | tojson(indent=4) ~ '\n' -}}{%- endfor -%}
{%- endif -%}
{%- set state = namespace(last=messages | length - 1, thinking=true, said=['user', 'assistant']) -%}
{%- for message in messages[::-1] -%}
    {%- set index = messages | length - 1 - loop.index0 -%}
    {%- if state.thinking and message.role == 'user' and message.content is string -%}
        {%- set state.thinking = false -%}{%- set state.last = index -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role not in state.said -%}{{- '[' ~ message.role ~ ']' -}}{%- continue -%}{%- endif -%}
    {%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}
    {{- loop.index0 ~ (':' if loop.index0 > state.last else '.') ~ content -}}
    {%- for call in message.tool_calls or [] -%}
        {{- call.function.name.upper() ~ '(' ~ arguments(call.function.arguments) ~ ')' -}}
    {%- endfor -%}
    {%- generation -%}{{- ', '.join if false else ([content, message.role] | join(', ')) -}}{%- endgeneration -%}
{%- else -%}nothing{%- endfor -%}
"""
ALIKE = {"bundled": BUNDLED, "headers": HEADERS, "tools": TOOLS}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "place": "Ö"}}}

contents = st.one_of(st.text(max_size=30), st.sampled_from([" a ", "x</think>\n\nb", ""]))
calls = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": contents, "arguments": st.dictionaries(contents, st.integers(0, 9), max_size=3)}
        )
    }
)
messages = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": contents}),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": st.none(), "tool_calls": st.lists(calls, max_size=2)}
        ),
    ),
    max_size=6,
)


def outcome(render: Any) -> tuple[str, str]:
    try:
        return "text", render()
    except NotMeterable as error:
        return "unmetered", error.message
    except CannotRender as error:
        return "refused", error.message


@pytest.mark.parametrize("name", ALIKE)
@given(chat=messages, tools=st.sampled_from([None, [TOOL], [TOOL, TOOL]]))
def test_the_event_loop_renders_the_same_as_a_process(
    name: str, chat: list[dict[str, Any]], tools: list[Any] | None
) -> None:
    special = {"bos_token": "<s>"}
    metered, plain = MeteredTemplate(ALIKE[name], special), ChatTemplate(ALIKE[name], special)
    context = encoded(chat, extra={"tools": tools})
    expected = outcome(lambda: plain.render(**orjson.loads(context)))
    assert outcome(lambda: metered.render(context)) == expected


@pytest.mark.parametrize("name", ALIKE)
def test_ten_turns_are_well_within_the_budget(name: str) -> None:
    turns = [{"role": ("user", "assistant")[n % 2], "content": "Tell me more. " * 40} for n in range(11)]
    context = encoded(turns, extra={"tools": [TOOL] * 3})
    assert len(context) < SHORT_BYTES
    assert MeteredTemplate(ALIKE[name], {"bos_token": "<s>"}).render(context)


FED_BACK = {
    "lists of lists": "{% set n = namespace(x=['a']) %}{% for m in messages %}{% for c in m.content %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{% endfor %}{{ n.x }}",
    "mappings of mappings": "{% set n = namespace(x='a') %}{% for c in messages[0].content %}"
    "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x | tojson }}",
    "namespaces of namespaces": "{% set n = namespace(x='a') %}{% for c in messages[0].content %}"
    "{% set o = namespace(a=n.x, b=n.x) %}{% set n.x = o %}{% endfor %}{{ n.x }}",
    "a namespace in itself": "{% set n = namespace(x=1) %}{% set n.x = n %}{{ n }}",
    "a namespace in a list": "{% set n = namespace(x=1) %}{% set n.x = [n] %}{{ n }}",
    "arguments": "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% endif %}{% endmacro %}{{ f('ab', 60) }}",
    "defaults": "{% macro f(n, x='ab', y=x ~ x) %}{% if n %}{{ f(n - 1, y) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "what a macro makes": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='ab') %}"
    "{% for c in messages[0].content %}{% set n.x = f(n.x) %}{% endfor %}{{ n.x | length }}",
    "numbers": "{% set n = namespace(x=9) %}{% for c in messages[0].content %}"
    "{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "loops in loops": "{% for a in messages[0].content %}" * 9 + "{% endfor %}" * 9,
    "loops of nothing but a condition": "{% for a in messages[0].content if " * 6 + "a %}" + "{% endfor %}" * 6,
    "conditions alone": "{% for a in messages[0].content %}{% for b in messages[0].content %}"
    "{% for c in messages[0].content if false %}{% endfor %}{% endfor %}{% endfor %}",
    "a block": "{% set x %}{% for m in messages %}a{% endfor %}{% endset %}{{ x }}",
    "a list of arguments": "{{ strftime_now(*['%Y']) }}",
    "words of the template": "{% for a in messages[0].content %}{% for b in messages[0].content %}"
    + "w" * 50_000
    + "{% endfor %}{% endfor %}",
    "a macro of words": "{% macro f(n) %}"
    + "w" * 50_000
    + "{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(400) | length }}",
    "comparisons": "{% for a in messages[0].content %}" + "{{ messages[0].content == a }}" * 2000 + "{% endfor %}",
    "formats": "{{ messages[0].content % 1 }}",
    "a format in a name": "{% set f = '%99999999d' %}{{ f % 1 }}",
    "a method of a list": "{{ messages.copy() }}",
    "a long separator": "{{ messages[0].content | join(messages[0].content) }}",
    "a filter by its name": "{{ ['a'] | map('center', 10 ** 9) | list }}",
    "a number of many digits": "{{ 9" + "9" * 4000 + " }}",
    "indented by a name": "{{ messages | tojson(indent=messages | length * 10 ** 8) }}",
    "a list of many": "{% set a = messages[0].content %}{{ [" + "a," * 15_000 + "] | join | length }}",
    "a chain of many": "{% set a = messages[0].content %}{{ (" + "a~" * 15_000 + "a) | length }}",
    "a sum of many": "{% set a = messages[0].content %}{{ (" + "a+" * 900 + "a) | length }}" + "{{ a }}" * 4000,
    "a mapping of many": "{% set a = messages[0].content %}{{ {" + "1:a," * 9_000 + "} | tojson | length }}",
    "a macro that says it often": "{% set a = messages[0].content %}{% macro f() %}"
    + "{{a}}" * 9_000
    + "{% endmacro %}{{ f() | length }}",
    "a macro with the name of namespaces": "{% macro namespace(x) %}{{ x }}{{ x }}{{ x }}{{ x }}{% endmacro %}"
    "{% set a = namespace(messages[0].content) %}{{ a }}",
    "deep brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep lists": "{{ " + "[" * 5_000 + "]" * 5_000 + " }}",
    "a recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
}
LONG = [{"role": "user", "content": "%d" * 1500}]


@pytest.mark.parametrize("name", [*WITHOUT_END, *TOO_LARGE, *FED_BACK])
def test_the_work_of_every_template_is_limited(name: str) -> None:
    text = (WITHOUT_END | TOO_LARGE | FED_BACK)[name]
    began = time.thread_time()
    try:
        metered = MeteredTemplate(text, {})
        with pytest.raises(CannotRender):
            metered.render(encoded(LONG))
    except ValueError:
        return
    assert time.thread_time() - began < 40 * cpu_unit_seconds()
    tracemalloc.start()
    try:
        with pytest.raises(CannotRender):
            metered.render(encoded(LONG))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20


def test_a_template_cannot_change_its_own_cost() -> None:
    for text in ("{{ -9999 | motet }}", "{{ 1 | pay }}", "{{ (0, -99) | keep }}"):
        with pytest.raises(ValueError, match="filter"):
            MeteredTemplate(text, {})


def test_an_invalid_template_has_its_own_error() -> None:
    with pytest.raises(ValueError, match="cannot be parsed"):
        MeteredTemplate("{% if %}", {})
    with pytest.raises(ValueError, match="longer than"):
        MeteredTemplate("x" * 70_000, {})


@asynccontextmanager
async def renderer(*known: TemplateText) -> AsyncIterator[ChatRenderer]:
    """A renderer that has rendered these templates."""
    made = ChatRenderer(RenderPool(processes=2, cpu_seconds=0.3, memory_bytes=64 << 20))
    try:
        for template in known:
            await made.render(template, encoded(HELLO))
        await eventually(lambda: not made._compiling)
        yield made
    finally:
        await made.close()


async def end_processes() -> None:
    for child in children():
        child.kill()
    await eventually(lambda: not children())


async def test_short_messages_are_rendered_on_the_event_loop_once_the_template_is_known() -> None:
    bundled = TemplateText(BUNDLED, {})
    async with renderer(bundled) as here:
        await end_processes()
        asked = (here.render(bundled, encoded(HELLO)) for _ in range(50))
        assert set(await asyncio.gather(*asked)) == {"<|user|>Hello<|end|><|assistant|>"}
        assert not children()


async def test_long_messages_go_to_a_process() -> None:
    bundled = TemplateText(BUNDLED, {})
    async with renderer(bundled) as here:
        await end_processes()
        text = "x" * SHORT_BYTES
        assert text in await here.render(bundled, encoded([{"role": "user", "content": text}]))
        assert len(children()) == 1


async def test_a_template_with_unknown_cost_goes_to_a_process() -> None:
    filters = TemplateText("{{ messages | map(attribute='content') | join }}", {})
    replaces = TemplateText("{{ messages[0].content.replace('l', 'L') }}", {})
    async with renderer(filters, replaces) as here:
        assert await here.render(filters, encoded(HELLO)) == "Hello"
        assert await here.render(replaces, encoded(HELLO)) == "HeLLo"
        assert len(children()) == 1


async def test_a_template_without_end_meets_the_limits_of_a_process() -> None:
    async with renderer() as here:
        endless = TemplateText(WITHOUT_END["macros"], {})
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"0.3 s of CPU time"):
                await here.render(endless, encoded(HELLO))


async def test_a_template_that_was_slow_once_stays_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_renderer, "SLOW_SECONDS", 0.0)
    bundled = TemplateText(BUNDLED, {})
    async with renderer(bundled) as here:
        await end_processes()
        for children_then in (0, 1):
            await here.render(bundled, encoded(HELLO))
            assert len(children()) == children_then


async def test_a_templates_refusal_reaches_the_client_in_both_ways_of_rendering() -> None:
    bundled = TemplateText(BUNDLED, {})
    async with renderer(bundled) as here:
        for text in ("Hello", "x" * SHORT_BYTES):
            with pytest.raises(InvalidRequest, match=r"unknown role .cook.") as caught:
                await here.render(bundled, encoded([{"role": "cook", "content": text}]))
            assert caught.value.param == "messages"
