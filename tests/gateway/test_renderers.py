"""Chat templates are rendered in a process with limits of time and memory."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from motet.errors import Internal, InvalidRequest, Overloaded
from motet_gateway.tokens import render_parent
from motet_gateway.tokens.render_pool import RenderPool, TemplateText, encoded
from testbed.fake_services import FakeServices
from tests.common.waiting import PATIENCE_S
from tests.gateway.conftest import eventually, serve
from tests.support.forked_renderers import SERVER

HELLO = [{"role": "user", "content": "Hello"}]
SAYS = TemplateText("{% for m in messages %}{{ m.content }}{% endfor %}", {})

WITHOUT_END = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "a power": "{{ (9 ** 99999999) % 7 }}",
    "a power of names": "{% set n = namespace(x=9) %}{{ (n.x ** 99999999) % 7 }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a search": "{{ ('a' * 9999999 ~ 'b') in ('a' * 99999999) }}"
    "{% for i in range(99999) %}{{ ('a' * 99999 ~ 'b') in ('a' * 999999) }}{% endfor %}",
    "a sort": "{% for i in range(99999) %}{{ (range(99999) | sort(reverse=true))[0] }}{% endfor %}",
    "a digit sum": "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
}

TOO_LARGE = {
    "a product": "{{ 'a' * 10 ** 10 }}",
    "a product of names": "{% set n = namespace(x='a') %}{{ n.x * 10 ** 10 }}",
    "a list": "{{ [0] * 10 ** 10 }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "adding": "{% set n = namespace(x='a') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a width": "{{ '%10000000000d' | format(1) }}",
    "a width in braces": "{{ '{:10000000000}'.format(1) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "indent": "{{ 'a\\nb' | indent(10 ** 10) }}",
    "replacing": "{{ ('a' * 99999) | replace('a', 'a' * 99999) }}",
    "joining": "{{ range(99999) | join('a' * 99999) }}",
    "json": "{{ [1] | tojson(indent=10 ** 10) }}",
    "batches": "{{ [1] | batch(10 ** 10, 'a') | list }}",
    "slices": "{{ [1] | slice(10 ** 10) | list }}",
    "wrapping": "{{ ('a' * 10 ** 7) | wordwrap(1, wrapstring='a' * 10 ** 5) }}",
    "tabs": "{{ '\\t'.expandtabs(10 ** 10) }}",
    "lorem": "{{ lipsum(n=10 ** 9) }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 10, 'big') }}",
}


@contextlib.asynccontextmanager
async def rendering(*, processes: int = 4, cpu_seconds: float = 0.3, mebibytes: int = 64) -> AsyncIterator[RenderPool]:
    renderers = RenderPool(processes=processes, cpu_seconds=cpu_seconds, memory_bytes=mebibytes << 20)
    try:
        yield renderers
    finally:
        await renderers.close()


async def rendered(renderers: RenderPool, template: TemplateText, messages: list[dict[str, Any]]) -> str:
    return await renderers.render(template, encoded(messages))


def parents() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if child.pid != SERVER.pid and any("tokens.render_forks" in word for word in child.cmdline()):
                found.append(child)
    return found


def children() -> list[psutil.Process]:
    """Those that render"""
    found = []
    for parent in parents():
        with contextlib.suppress(psutil.Error):
            found += parent.children()
    return found


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def resident() -> int:
    total = 0
    for child in children():
        with contextlib.suppress(psutil.Error):
            total += child.memory_info().rss
    return total


async def test_time_and_memory_of_every_template_are_limited() -> None:
    async with rendering() as renderers:
        for name, text in (WITHOUT_END | TOO_LARGE).items():
            with pytest.raises((InvalidRequest, Internal)) as caught:
                await rendered(renderers, TemplateText(text, {}), HELLO)
            assert "chat template" in caught.value.message, name
            assert resident() < 256 << 20, name
        assert await rendered(renderers, SAYS, HELLO) == "Hello"


async def test_a_template_without_end_is_stopped_at_its_cpu_time() -> None:
    async with rendering() as renderers:
        for text in (WITHOUT_END["nested loops"], WITHOUT_END["a power of names"]):
            with pytest.raises(InvalidRequest, match=r"more than 0.3 s of CPU time") as caught:
                await rendered(renderers, TemplateText(text, {}), HELLO)
            assert caught.value.param == "messages"


async def test_a_template_without_end_delays_no_other() -> None:
    async with rendering(cpu_seconds=3600) as renderers:
        hostile = TemplateText(WITHOUT_END["nested loops"], {})
        stuck = [asyncio.create_task(rendered(renderers, hostile, HELLO)) for _ in range(8)]
        for _ in range(3):
            assert await rendered(renderers, SAYS, HELLO) == "Hello"
        assert len(children()) == 2  # the eight wait for each other
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        assert await rendered(renderers, SAYS, HELLO) == "Hello"


async def test_long_conversations_do_not_stand_before_short_ones() -> None:
    slow_when_long = TemplateText(
        "{% if messages[0].content | length > 9 %}" + WITHOUT_END["nested loops"] + "{% endif %}short", {}
    )
    async with rendering(cpu_seconds=3600) as renderers:
        long = asyncio.create_task(rendered(renderers, slow_when_long, [{"role": "user", "content": "x" * 100_000}]))
        for _ in range(3):
            assert await rendered(renderers, slow_when_long, HELLO) == "short"
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)


async def test_long_conversations_of_tenants_have_their_turns() -> None:
    """Mutation: all are rendered in the order in which they came."""
    said: list[str] = []

    async def render(renderers: RenderPool, tenant: str) -> None:
        context = encoded([{"role": "user", "content": "x" * 100_000}])
        await renderers.render(SAYS, context, tenant=tenant)
        said.append(tenant)

    async with rendering() as renderers:
        await asyncio.gather(*(render(renderers, tenant) for tenant in ("a", "a", "a", "b")))
    assert said == ["a", "b", "a", "a"]


async def test_one_process_renders_several_requests_in_turn() -> None:
    async with rendering() as renderers:
        texts = [[{"role": "user", "content": f"é{i}"}] for i in range(50)]
        assert await asyncio.gather(*(rendered(renderers, SAYS, text) for text in texts)) == [
            f"é{i}" for i in range(50)
        ]
        assert len(children()) == 1


async def test_in_a_batch_only_messages_that_fail_are_refused() -> None:
    text = "{% if messages[0].content == 'time' %}" + WITHOUT_END["nested loops"] + "{% endif %}"
    text += "{% if messages[0].content == 'memory' %}" + TOO_LARGE["a product of names"] + "{% endif %}ok"
    template = TemplateText(text, {})
    contents = ["a", "time", "b", "memory", "c"]
    async with rendering() as renderers:
        asked = (rendered(renderers, template, [{"role": "user", "content": one}]) for one in contents)
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [answer if isinstance(answer, str) else type(answer) for answer in answers] == [
        "ok",
        InvalidRequest,
        "ok",
        InvalidRequest,
        "ok",
    ]
    assert "CPU time" in str(answers[1])
    assert "MiB" in str(answers[3])


async def test_messages_that_a_process_has_no_memory_to_read_are_refused() -> None:
    async with rendering(mebibytes=32) as renderers:
        with pytest.raises(InvalidRequest, match="MiB") as caught:
            await rendered(renderers, SAYS, [{"role": "user", "content": "x" * 9_000_000}])
        assert caught.value.param == "messages"


async def test_no_message_is_refused_for_memory_that_others_of_its_batch_use() -> None:
    text = "{% for m in messages %}{{ m.content * m.times }}{% endfor %}"
    template = TemplateText(text, {})
    async with rendering() as renderers:
        asked = (rendered(renderers, template, [{"content": "x" * 1000, "times": 4000}]) for _ in range(32))
        answers = await asyncio.gather(*asked)
    assert [len(answer) for answer in answers] == [4_000_000] * 32


async def test_who_leaves_while_messages_use_up_the_memory_holds_up_nobody() -> None:
    text = "{% if messages[0].content == 'memory' %}" + TOO_LARGE["a product of names"] + "{% endif %}ok"
    template = TemplateText(text, {})
    async with rendering(processes=1) as renderers:
        leaves, stays = (
            asyncio.create_task(rendered(renderers, template, [{"role": "user", "content": content}]))
            for content in ("memory", "")
        )
        await asyncio.sleep(0.005)  # a process starts for both
        leaves.cancel()
        async with asyncio.timeout(PATIENCE_S):
            assert await stays == "ok"


async def test_no_message_is_refused_for_memory_that_other_templates_use() -> None:
    """Mutation: a process that has no memory any more is not replaced by a new one."""
    kept = "\N{GRINNING FACE}" * 400_000  # four bytes each
    async with rendering(processes=1) as renderers:
        for number in range(12):
            assert await rendered(renderers, SAYS, [{"role": "user", "content": "x" * 3_000_000}])
            assert await rendered(renderers, TemplateText(f"{{% if unset %}}{kept}{{% endif %}}{number}", {}), HELLO)


async def test_a_process_that_dies_while_it_waits_costs_no_request() -> None:
    async with rendering() as renderers, asyncio.timeout(PATIENCE_S):
        await rendered(renderers, SAYS, HELLO)
        (child,) = children()
        child.send_signal(signal.SIGKILL)
        assert await rendered(renderers, SAYS, HELLO) == "Hello"  # not known yet
        (child,) = children()
        child.send_signal(signal.SIGKILL)
        await eventually(lambda: not children())
        assert await rendered(renderers, SAYS, HELLO) == "Hello"  # it was known before the first request


async def test_a_render_process_that_dies_gives_a_server_error() -> None:
    async with rendering(cpu_seconds=3600) as renderers, asyncio.timeout(PATIENCE_S):
        asked = asyncio.create_task(rendered(renderers, TemplateText(WITHOUT_END["nested loops"], {}), HELLO))
        died = set()
        while len(died) < 2:
            await eventually(lambda: any(child.pid not in died for child in children()))
            for child in children():
                if child.pid not in died:
                    died.add(child.pid)
                    child.send_signal(signal.SIGKILL)
        with pytest.raises(Overloaded, match="Try again"):
            await asked
        assert await rendered(renderers, SAYS, HELLO) == "Hello"


async def test_who_has_sent_no_slow_messages_stands_behind_one_of_those_at_most() -> None:
    text = "{% if messages[0].content == 'time' %}" + WITHOUT_END["nested loops"] + "{% endif %}ok"
    template, said = TemplateText(text, {}), list[str]()

    async def render(renderers: RenderPool, tenant: str, content: str) -> None:
        with contextlib.suppress(InvalidRequest):
            await renderers.render(template, encoded([{"role": "user", "content": content}]), tenant=tenant)
        said.append(tenant)

    async with rendering() as renderers:
        slow = [asyncio.create_task(render(renderers, "greedy", "time")) for _ in range(6)]
        await eventually(children)  # it has all of them
        await render(renderers, "modest", "")
        assert said.count("greedy") <= 2
        await asyncio.gather(*slow)
        assert said.count("greedy") == 6


async def test_processes_start_again_after_the_one_that_forks_them_has_died() -> None:
    async with rendering() as renderers, asyncio.timeout(PATIENCE_S):
        for kind in ("the model's", "once more"):
            await rendered(renderers, SAYS, HELLO)
            (parent,), (child,) = parents(), children()
            parent.kill()
            assert await rendered(renderers, TemplateText(kind, {}), HELLO) == kind
            await eventually(lambda child=child: has_ended(child))


@pytest.mark.parametrize("template", ["another one", WITHOUT_END["nested loops"]])
async def test_the_one_that_forks_them_is_replaced_if_it_is_stuck(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts no process, and tells of none that it has ended."""
    monkeypatch.setattr(render_parent, "STUCK_SECONDS", 4.0)
    async with rendering() as renderers, asyncio.timeout(PATIENCE_S):
        await rendered(renderers, SAYS, HELLO)
        (parent,), (child,) = parents(), children()
        parent.suspend()
        if template in WITHOUT_END.values():
            with pytest.raises(InvalidRequest, match="CPU time"):
                await rendered(renderers, TemplateText(template, {}), HELLO)
        else:
            other = TemplateText(template, {}, adapter_of="a")
            assert await rendered(renderers, other, HELLO) == template
        await eventually(lambda: has_ended(child))
        assert await rendered(renderers, SAYS, HELLO) == "Hello"
        assert parents() != [parent]


async def test_whoever_waits_for_a_process_gets_an_error_when_none_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_parent.sys, "executable", "/nowhere/python")
    async with rendering() as renderers:
        with pytest.raises(Overloaded, match="Try again"):
            await rendered(renderers, SAYS, HELLO)


async def test_a_process_is_confined_and_holds_nothing_of_others() -> None:
    async with rendering() as renderers:
        for namespace in ("a", "b"):
            await rendered(renderers, TemplateText("x", {}, adapter_of=namespace), HELLO)
        for child in children():
            opened = [str(file.readlink()) for file in Path(f"/proc/{child.pid}/fd").iterdir()]
            assert [file.partition(":")[0] for file in opened if file != os.devnull] == ["socket"]
            taken = child.memory_info().vms
            assert 0 < child.rlimit(psutil.RLIMIT_AS)[0] <= taken + (64 << 20)
            assert child.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)


async def test_the_processes_end_with_the_gateway() -> None:
    async with rendering() as renderers:
        await rendered(renderers, SAYS, HELLO)
        (child,) = children()
    await eventually(lambda: not child.is_running())


async def test_for_a_gateway_of_a_test_the_process_that_forks_them_is_forked_and_ends_with_it(
    cluster: FakeServices,
) -> None:
    async with serve(cluster) as served:
        answer = await served.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO})
        assert answer.status_code == 200, answer.text
        (parent,), forks = parents(), children()  # the one that has counted what the template does may still be there
        assert any(word.endswith("fork_server.py") for word in parent.cmdline())
        assert os.getsid(parent.pid) == parent.pid
    assert not parents()
    assert forks
    await eventually(lambda: all(map(has_ended, forks)))


async def test_a_process_inherits_no_settings_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_SECRET", "x")
    async with rendering() as renderers:
        await rendered(renderers, SAYS, HELLO)
        (child,) = children()
        assert "MOTET_SECRET" not in child.environ()
        assert os.getsid(child.pid) != os.getsid(0)


async def test_a_broken_template_gives_an_error_about_the_model() -> None:
    async with rendering() as renderers:
        for _ in range(2):
            with pytest.raises(Internal, match="broken chat template"):
                await rendered(renderers, TemplateText("{% if %}", {}), HELLO)


async def test_a_refusal_of_a_template_repeats_only_a_part_of_the_messages() -> None:
    refuses = TemplateText("{{ raise_exception('I do not like ' ~ messages[0].content) }}", {})
    async with rendering() as renderers:
        with pytest.raises(InvalidRequest, match="I do not like xxx") as caught:
            await rendered(renderers, refuses, [{"role": "user", "content": "x" * 90_000}])
        assert len(caught.value.message) < 2000


async def test_messages_that_no_template_can_render_are_refused() -> None:
    async with rendering() as renderers:
        with pytest.raises(InvalidRequest, match="messages"):
            await rendered(renderers, SAYS, [{"role": "user", "content": 2**70}])


async def test_many_templates_do_not_stay_in_one_process() -> None:
    async with rendering() as renderers:
        first = None
        for i in range(70):
            assert await rendered(renderers, TemplateText(f"{i}", {}), HELLO) == str(i)
            first = first or children()[0]
        assert first is not None
        await eventually(lambda: not first.is_running())


def test_rendering_works_on_uvloop() -> None:
    async def endless_and_short() -> str:
        async with rendering() as renderers:
            with pytest.raises(InvalidRequest):
                await rendered(renderers, TemplateText(WITHOUT_END["nested loops"], {}), HELLO)
            return await rendered(renderers, SAYS, HELLO)

    assert uvloop.run(endless_and_short()) == "Hello"
