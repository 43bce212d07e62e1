"""Templates on the event loop: they give the same text as in a process, and never take long."""

import asyncio
import contextlib
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import jinja2
import orjson
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from motet.errors import Internal, InvalidRequest
from motet_gateway.tokens import chat_renderer
from motet_gateway.tokens.chat_renderer import SHORT_BYTES, ChatRenderer
from motet_gateway.tokens.chat_template import CannotRender, ChatTemplate
from motet_gateway.tokens.metered_template import MeteredTemplate, metered_code
from motet_gateway.tokens.render_pool import RenderPool, TemplateText, encoded
from motet_gateway.tokens.template_meter import NotMeterable
from testbed.tree import ROOT
from tests.common.cpu_speed import cpu_unit_seconds
from tests.gateway.conftest import eventually
from tests.gateway.test_renderers import HELLO, TOO_LARGE, WITHOUT_END, children
from tests.support.garbage import uncollected

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


@cache
def metered_alike(name: str) -> MeteredTemplate:
    return metered_template(ALIKE[name], {"bos_token": "<s>"})


@cache
def plain_alike(name: str) -> ChatTemplate:
    return ChatTemplate.from_text(ALIKE[name], {"bos_token": "<s>"})


def metered_template(text: str, special_tokens: dict[str, str]) -> MeteredTemplate:
    return MeteredTemplate(metered_code(text), special_tokens)


def outcome(render: Any) -> tuple[str, str]:
    try:
        return "text", render()
    except NotMeterable as error:
        return "unmetered", error.why
    except CannotRender as error:
        return "refused", error.why


@pytest.mark.parametrize("name", ALIKE)
@given(chat=messages, tools=st.sampled_from([None, [TOOL], [TOOL, TOOL]]))
def test_the_event_loop_renders_the_same_as_a_process(
    name: str, chat: list[dict[str, Any]], tools: list[Any] | None
) -> None:
    metered, plain = metered_alike(name), plain_alike(name)
    context = encoded(chat, extra={"tools": tools})
    expected = outcome(lambda: plain.render(**orjson.loads(context)))
    assert outcome(lambda: metered.render(context)) == expected


@pytest.mark.parametrize("name", ALIKE)
def test_ten_turns_are_well_within_the_budget(name: str) -> None:
    turns = [{"role": ("user", "assistant")[n % 2], "content": "Tell me more. " * 40} for n in range(11)]
    context = encoded(turns, extra={"tools": [TOOL] * 3})
    assert len(context) < SHORT_BYTES
    assert metered_alike(name).render(context)


DOUBLED_LIST = (
    "{% set n = namespace(x=['a']) %}{% for c in messages[0].content[:60] %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)
TWO_DOUBLED_LISTS = DOUBLED_LIST + DOUBLED_LIST.replace("n.x", "m.x").replace("n =", "m =")
DOUBLED_TUPLE = DOUBLED_LIST.replace("[n.x, n.x]", "(n.x, n.x)").replace("['a']", "('a',)")
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
    "{% set a = " + "namespace(" * 5 + "messages[0].content" + ")" * 5 + " %}{{ a }}",
    "deep brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep lists": "{{ " + "[" * 5_000 + "]" * 5_000 + " }}",
    "filters that join": "{{ messages[0].content" + " | list | join('-----------------------------')" * 4 + " }}",
    "filters that join what is kept": "{% set a = messages[0].content"
    + " | list | join(', -------------')" * 6
    + " %}",
    "a constant of many": "{{ 'ab'" + " | list | join('----------------------------------------------')" * 6 + " }}",
    "a constant of many in a condition": "{{ 1 if 'ab'" + " | list | join('------------------------')" * 9 + " }}",
    "a constant of many in a name": "{% set a = 'ab'" + " | list | join('------------------------')" * 9 + " %}",
    "indented JSON": "{% set n = namespace(x=messages[0].content | list) %}"
    "{% for c in messages[0].content %}{{ n.x | tojson(indent=8) }}{% endfor %}",
    "indented JSON of many levels": "{% set n = namespace(x=1) %}{% for c in messages[0].content %}"
    "{% set n.x = [n.x] %}{% endfor %}" + "{{ n.x | tojson(indent=8) }}" * 400,
    "JSON of JSON": "{{ messages[0].content" + " | tojson" * 30 + " }}",
    "lists in lists in one expression": "{% set a = messages[0].content | list %}{% set b = [a,a,a,a,a,a,a,a,a,a] %}"
    "{% set c = [b,b,b,b,b,b,b,b,b,b] %}{{ c | string | length }}",
    "lists as text beside each other": "{% set a = messages[0].content | list %}" + "{{ [a, a, a] ~ [a, a] }}" * 9,
    "slices": "{% set a = messages[0].content %}{% for c in a %}{% for d in a %}{% set b = [a[1:], a[2:], a[3:]] %}"
    "{% endfor %}{% endfor %}",
    "searches": "{% set a = messages[0].content %}" + "{{ (a ~ 'x') in (a ~ a) }}" * 300,
    "searches by methods": "{% set a = messages[0].content %}" + "{{ (a ~ a).find(a ~ 'x') }}" * 300,
    "a search in lists": TWO_DOUBLED_LISTS + "{{ n.x in [m.x] }}",
    "a comparison of lists": DOUBLED_LIST
    + DOUBLED_LIST.replace("n.x", "m.x").replace("n =", "m =")
    + "{{ n.x == m.x }}",
    "the hash of a tuple": DOUBLED_TUPLE + "{{ {'a': 1}[n.x] }}",
    "the hash of a tuple in a mapping": DOUBLED_TUPLE + "{{ {n.x: 1} }}",
    "the hash of a tuple by a method": DOUBLED_TUPLE + "{{ {'a': 1}.get(n.x) }}",
    "the hash of a tuple in a search": DOUBLED_TUPLE + "{{ n.x in {'a': 1} }}",
    "the hash of a macro's arguments": "{% macro f(n) %}{% set n.x = varargs %}{% endmacro %}"
    "{% set n = namespace(x=1) %}{% for c in messages[0].content[:60] %}{{ f(n, n.x, n.x) }}{% endfor %}"
    "{{ messages[0][n.x] }}",
    "a test that formats": "{{ '%99999999d' is odd }}",
    "a test that formats a name": "{% set f = '%99999999d' %}{{ f is divisibleby 1 }}",
    "a test that converts": DOUBLED_LIST + "{{ n.x is lower }}",
    "a refusal that grows": DOUBLED_LIST + "{{ raise_exception(n.x) }}",
    "a date of many": "{% for c in messages[0].content %}{{ strftime_now('%c%c%c%c%c%c%c') }}{% endfor %}",
    "parts of a text": "{% set a = messages[0].content %}" + "{% set b = a.split('%') %}" * 90,
    "lines of a text": "{% set a = messages[0].content %}" + "{% set b = a.splitlines() %}" * 90,
    "letters": "{% set a = messages[0].content %}" + "{% set b = a | list %}" * 90,
    "escapes": "{{ ("
    + "'&' | safe + " * 12
    + "messages[0].content) | string"
    + " | list | join('<<<<<<<<<')" * 6
    + " }}",
    "a mapping copied": "{% for c in messages[0].content %}{% for d in messages[0].content %}"
    "{% set n = namespace(messages[0]) %}{% endfor %}{% endfor %}",
    "many names": "{% set a = messages[0].content %}" + "{% set b = a ~ a %}" * 2500,
    "a recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
}
ENDLESS = WITHOUT_END | TOO_LARGE | FED_BACK
MAX_SHORT = 10_000
LONG = [{"role": "user", "content": "%d" * 1500}]


@pytest.mark.parametrize("name", ENDLESS)
def test_the_work_of_every_template_is_limited(name: str) -> None:
    text = ENDLESS[name]
    try:
        metered = metered_template(text, {})
    except ValueError:
        return
    with uncollected():
        began = time.thread_time()
        with pytest.raises(CannotRender):
            metered.render(encoded(LONG))
        spent = time.thread_time() - began
    assert spent < 0.02 or spent < cpu_unit_seconds()
    tracemalloc.start()
    try:
        with pytest.raises(CannotRender):
            metered.render(encoded(LONG))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    filters = (
        "list",
        "join('--------')",
        "join(a)",
        "tojson",
        "tojson(indent=8)",
        "string",
        "safe",
        "upper",
        "trim(a)",
    )
    methods = ("split('%')", "split()", "upper()", "find(a)", "splitlines()", "strip(a)", "title()", "partition('d')")
    return st.one_of(
        st.builds("({} | {})".format, inner, st.sampled_from(filters)),
        st.builds("({}).{}".format, inner, st.sampled_from(methods)),
        st.builds("({} {} {})".format, inner, st.sampled_from(["~", "+", "*", "%", "in", "==", "<"]), inner),
        st.lists(inner, min_size=1, max_size=4).map(lambda items: f"[{', '.join(items)}]"),
        st.builds("f({})".format, inner),
        st.builds("({})[{}:]".format, inner, st.integers(-3, 3)),
        st.builds("({} if a else {})".format, inner, inner),
    )


expressions = st.recursive(st.sampled_from(["a", "n.x", "messages", "'b'", "9", "c"]), nested, max_leaves=12)
statements = st.recursive(
    st.one_of(
        st.builds("{{{{ {} }}}}".format, expressions),
        st.builds("{{% set n.x = {} %}}".format, expressions),
        st.builds("{{% set a = {} %}}".format, expressions),
    ),
    lambda inner: st.one_of(
        st.builds("{{% for c in {} %}}{}{{% endfor %}}".format, expressions, inner),
        st.lists(inner, max_size=4).map("".join),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, expressions, inner),
    ),
    max_leaves=8,
)


@given(body=statements, of_a_macro=expressions)
def test_whatever_a_template_says_its_memory_and_its_code_stay_small(body: str, of_a_macro: str) -> None:
    text = "{% set a = messages[0].content %}{% set n = namespace(x='ab') %}{% set c = 1 %}"
    text += "{% macro f(a) %}{{ " + of_a_macro.replace("f(", "(").replace("n.x", "a") + " }}{% endmacro %}" + body
    code = metered_code_or_none(text)
    if code is None:
        return
    assert len(code) < 4096 + 64 * len(text)
    metered = MeteredTemplate(code, {})
    tracemalloc.start()
    try:
        outcome(lambda: metered.render(encoded(LONG)))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20


def metered_code_or_none(text: str) -> bytes | None:
    try:
        return metered_code(text)
    except ValueError:
        return None


@pytest.mark.parametrize("name", [name for name, text in ENDLESS.items() if len(text) < MAX_SHORT])
def test_nothing_is_computed_when_a_template_is_compiled(name: str) -> None:
    """Not the long ones: each repeats a short text, and takes seconds while memory is traced."""
    text = ENDLESS[name]
    tracemalloc.start()
    try:
        code = metered_code_or_none(text)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert code is None or len(code) < 4096 + 64 * len(text)
    assert most < (16 << 20) + 4096 * len(text)


def test_a_template_cannot_change_its_own_cost() -> None:
    for text in ("{{ -9999 | motet }}", "{{ 1 | pay }}", "{{ (0, -99) | keep }}"):
        with pytest.raises(ValueError, match="filter"):
            metered_template(text, {})


def test_an_invalid_template_has_its_own_error() -> None:
    with pytest.raises(ValueError, match="cannot be parsed"):
        metered_template("{% if %}", {})
    with pytest.raises(ValueError, match="longer than"):
        metered_template("x" * 70_000, {})


@asynccontextmanager
async def renderer(*known: TemplateText, cpu_seconds: float = 0.3) -> AsyncIterator[ChatRenderer]:
    """A renderer that has rendered these templates."""
    made = ChatRenderer(RenderPool(processes=2, cpu_seconds=cpu_seconds, memory_bytes=64 << 20))
    try:
        for template in known:
            await made.render(template, encoded(HELLO))
        await eventually(lambda: not made.compiling)
        yield made
    finally:
        await made.close()


async def end_processes() -> None:
    for child in children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            child.kill()
    await eventually(lambda: not children())


async def test_short_messages_are_rendered_on_the_event_loop_once_the_template_is_known() -> None:
    bundled = TemplateText(BUNDLED, {})
    async with renderer(bundled) as here:
        await end_processes()
        asked = (here.render(bundled, encoded(HELLO)) for _ in range(50))
        assert set(await asyncio.gather(*asked)) == {"<|user|>Hello<|end|><|assistant|>"}
        assert not children()


async def test_templates_are_compiled_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a template is compiled here")

    monkeypatch.setattr(jinja2.Environment, "compile", never)
    bundled, endless = TemplateText(BUNDLED, {}), TemplateText("{{" + "1+" * 30_000 + "1 }}", {})
    async with renderer(bundled) as here:
        await end_processes()
        assert await here.render(bundled, encoded(HELLO)) == "<|user|>Hello<|end|><|assistant|>"
        assert not children()
        with contextlib.suppress(InvalidRequest, Internal):
            await here.render(endless, encoded(HELLO))
        await eventually(lambda: not here.compiling)
        assert here.metered[endless.digest] is None


async def test_a_template_that_takes_too_long_to_compile_is_named_in_the_log() -> None:
    long = TemplateText("{{a}}" * 12_000, {})
    with capture_logs() as said:
        async with renderer(cpu_seconds=0.05) as here:
            with contextlib.suppress(InvalidRequest):
                await here.render(long, encoded(HELLO))
            await eventually(lambda: not here.compiling)
    (line,) = (one for one in said if one["event"] == "chat_template_not_metered")
    assert line["reason"] == "it takes more than 0.05 s of CPU time to compile it"


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
        await end_processes()
        assert await here.render(filters, encoded(HELLO)) == "Hello"
        assert await here.render(replaces, encoded(HELLO)) == "HeLLo"
        assert children()


async def test_a_template_without_end_meets_the_limits_of_a_process() -> None:
    async with renderer() as here:
        endless = TemplateText(WITHOUT_END["macros"], {})
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"0.3 s of CPU time"):
                await here.render(endless, encoded(HELLO))


async def test_a_template_that_is_slow_stays_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_renderer, "SLOW_SECONDS", 0.0)
    bundled = TemplateText(BUNDLED, {})
    async with renderer(bundled) as here:
        await end_processes()
        for children_then in (0, 1):
            await here.render(bundled, encoded(HELLO))
            assert len(children()) == children_then


async def test_a_template_that_the_garbage_collector_interrupts_stays_here() -> None:
    """Otherwise every template would soon be rendered in processes, which costs each request several times as much."""
    bundled = TemplateText(BUNDLED, {})

    def collect(_phase: str, _info: object) -> None:
        until = time.thread_time() + 1.5 * chat_renderer.SLOW_SECONDS
        while time.thread_time() < until:
            pass

    async with renderer(bundled) as here:
        await end_processes()
        metered = here.metered[bundled.digest]
        assert metered is not None
        plain = metered.render

        def interrupted(context: bytes) -> str:
            metered.render = plain  # type: ignore[method-assign]
            gc.collect(0)
            return plain(context)

        metered.render = interrupted  # type: ignore[method-assign]
        gc.callbacks.append(collect)
        try:
            await here.render(bundled, encoded(HELLO))
        finally:
            gc.callbacks.remove(collect)
        assert metered.render == plain, "it was interrupted"
        await here.render(bundled, encoded(HELLO))
        assert not children()


async def test_a_templates_refusal_reaches_the_client_in_both_ways_of_rendering() -> None:
    bundled = TemplateText(BUNDLED, {})
    async with renderer(bundled) as here:
        for text in ("Hello", "x" * SHORT_BYTES):
            with pytest.raises(InvalidRequest, match=r"unknown role .cook.") as caught:
                await here.render(bundled, encoded([{"role": "cook", "content": text}]))
            assert caught.value.param == "messages"
