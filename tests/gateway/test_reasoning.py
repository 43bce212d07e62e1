"""Reasoning in chats: OpenAI's unmodified client, over a real socket. The runner writes what the prompt says."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
from openai.types.chat import ChatCompletion
from tokenizers import Tokenizer

from motet.api.v1 import runner_pb2, scheduler_pb2
from motet.grammars.grammar import Grammar, GrammarForm
from motet.reasoning.formats import FORMATS, ExpectedReasoning
from motet.reasoning.splitter import ReasoningSplitter
from motet_gateway.answers.call import Call
from motet_gateway.answers.chat import ChatForm
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.logprobs import ChatLogprobs
from motet_gateway.answers.written import StreamEvents
from motet_gateway.grammars.trials import GrammarTrials
from motet_gateway.parameters import ChatBody, parse
from motet_gateway.tokens.detokenizer import detokenizer
from motet_gateway.tokens.text_model import ModelTokenizer
from testbed.fake_services import byte_tokenizer, fake_services, model_assets
from tests.common.cpu_speed import cpu_unit_seconds
from tests.gateway.conftest import Served, eventually, serve

LAST = "{{ messages[-1].content }}"
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]
OPENS = LAST + "{% if add_generation_prompt %}<think>\n{% endif %}"


@asynccontextmanager
async def reasoning(
    template: str = LAST,
    form: str = "think",
    tool: str = "",
    step: int = 1,
    assets: dict[str, bytes] | None = None,
) -> AsyncIterator[Served]:
    async with fake_services(assets=assets or model_assets(template=template)) as cluster:
        cluster.scheduler.chat = scheduler_pb2.ChatFormats(reasoning=form, tool=tool)
        cluster.runners[0].tokens_per_step = step
        async with serve(cluster) as served:
            await eventually(lambda: served.gateway.catalog.current.groups)
            yield served


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def ask(served: Served, text: str, **more: Any) -> ChatCompletion:
    answer = await served.openai.chat.completions.create(model="tiny", messages=says(text), **more)
    assert isinstance(answer, ChatCompletion)
    return answer


def of(answer: ChatCompletion) -> tuple[str | None, str | None]:
    message = answer.choices[0].message
    both = getattr(message, "reasoning_content", None), getattr(message, "reasoning", None)
    assert both[0] == both[1]
    return both[0], message.content


def tokens_of(answer: ChatCompletion) -> int:
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    return answer.usage.completion_tokens_details.reasoning_tokens or 0


async def streamed(served: Served, text: str, **more: Any) -> tuple[str, str]:
    reasoning, content = "", ""
    async for event in await served.openai.chat.completions.create(
        model="tiny", messages=says(text), stream=True, **more
    ):
        for choice in event.choices:
            piece = getattr(choice.delta, "reasoning_content", None)
            assert piece == getattr(choice.delta, "reasoning", None)
            reasoning += piece or ""
            content += choice.delta.content or ""
    return reasoning, content


@pytest.mark.parametrize("form", [*FORMATS])
@pytest.mark.parametrize("step", [1, 3, 500])
async def test_reasoning_and_content_of_each_format_arrive_whole_and_streamed(form: str, step: int) -> None:
    tags = FORMATS[form]  # type: ignore[index] # a test's parameter is any text
    async with reasoning(form=form, step=step) as served:
        text = f"{tags.begin}\nSo it is.\n{tags.end}\n\nYes."
        answer = await ask(served, text)
        assert of(answer) == await streamed(served, text) == ("So it is.", "Yes.")
        before = len(served.cluster.tokenizer.encode(text.removesuffix("\n\nYes.")).ids)
        assert abs(tokens_of(answer) - before) <= 1
        plain = await ask(served, "Yes.")
        assert (of(plain), tokens_of(plain)) == ((None, "Yes."), 0)


async def test_tags_that_are_special_tokens_are_read_and_other_special_tokens_stay_hidden() -> None:
    assets = model_assets(template=LAST)
    tokenizer = Tokenizer.from_str(assets["tokenizer.json"].decode())
    tokenizer.add_special_tokens(["[THINK]", "[/THINK]", "<|other|>"])
    assets |= {"tokenizer.json": tokenizer.to_str().encode()}
    async with reasoning(form="mistral", assets=assets) as served:
        text = "[THINK]So<|other|> it is.[/THINK]Yes<|other|>."
        assert of(await ask(served, text)) == await streamed(served, text) == ("So it is.", "Yes.")


async def test_an_answer_begins_inside_where_the_template_opens_the_tag() -> None:
    async with reasoning(OPENS) as served:
        text = "So it is.</think>Yes."
        assert of(await ask(served, text)) == ("So it is.", "Yes.<think>\n")
        assert await streamed(served, text) == ("So it is.", "Yes.<think>\n")
        sampling: dict[str, Any] = {"response_format": {"type": "json_object"}}
        await ask(served, text, **sampling)
        said = served.cluster.runners[0].submits[-1].sampling
        assert (said.reasoning.begin, said.reasoning.end, said.reasoning.begun) == ("<think>", "</think>", True)


async def test_an_answer_that_is_cut_within_its_reasoning_has_only_that() -> None:
    async with reasoning() as served:
        answer = await ask(served, "<think>one two three</think>Yes.", max_tokens=8)
        assert answer.choices[0].finish_reason == "length"
        thought, content = of(answer)
        assert thought
        assert "one two three".startswith(thought.strip())
        assert content is None
        assert tokens_of(answer) == 8


async def test_reasoning_stays_away_if_the_request_says_so() -> None:
    async with reasoning() as served:
        text = "<think>So it is.</think>Yes."
        answer = await ask(served, text, extra_body={"include_reasoning": False})
        assert of(answer) == (None, "Yes.")
        assert tokens_of(answer) > 0
        assert await streamed(served, text, extra_body={"include_reasoning": False}) == ("", "Yes.")
        with pytest.raises(openai.BadRequestError, match="with logprobs"):
            await ask(served, text, logprobs=True, extra_body={"include_reasoning": False})


@pytest.mark.parametrize("begins_inside", [False, True])
async def test_reasoning_stays_in_the_content_if_the_request_says_so(begins_inside: bool) -> None:
    async with reasoning(OPENS if begins_inside else LAST) as served:
        text = "So it is.</think> Yes." if begins_inside else "<think>So it is.</think> Yes."
        together: dict[str, Any] = {"extra_body": {"separate_reasoning": False}}
        answer = await ask(served, text, **together)
        shown = text + "<think>\n" * begins_inside
        assert of(answer) == (None, shown)
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is None
        assert await streamed(served, text, **together) == ("", shown)
        apart = await ask(served, text, extra_body={"separate_reasoning": True})
        assert of(apart)[0] == "So it is."
        assert of(await ask(served, text, stop=["it"], **together)) == (None, text.partition("it")[0])
        await ask(served, text, response_format={"type": "json_object"}, **together)
        assert served.cluster.runners[0].submits[-1].sampling.reasoning.end == "</think>", (
            "the grammar begins behind it"
        )
        for more in ({"include_reasoning": False}, {"tools": TOOLS}):
            with pytest.raises(openai.BadRequestError, match=r"separate_reasoning: ") as caught:
                await ask(served, text, extra_body={"separate_reasoning": False, **more})
            assert caught.value.param == "separate_reasoning"


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"n": 2}])
@pytest.mark.parametrize(
    ("thought", "content"), [("One two three.", "Yes it is."), ("One two three.", ""), ("", "Yes it is.")]
)
async def test_a_stream_has_the_reasoning_as_a_whole_if_the_request_says_so(
    thought: str, content: str, more: dict[str, Any]
) -> None:
    async with reasoning(step=1) as served:
        text = f"<think>{thought}{'</think>' if content else ''}{content}" if thought else content
        said: dict[int, list[tuple[str, str]]] = {}
        spelled = b""
        async for event in await served.openai.chat.completions.create(
            model="tiny", messages=says(text), stream=True, extra_body={"stream_reasoning": False}, **more
        ):
            for choice in event.choices:
                pieces = said.setdefault(choice.index, [])
                for kind in ("reasoning", "content"):
                    if piece := getattr(choice.delta, kind, None):
                        pieces.append((kind, piece))
                tokens = (choice.logprobs.content if choice.logprobs else None) or []
                spelled += b"".join(bytes(one.bytes or []) for one in tokens)
        assert len(said) == more.get("n", 1)
        for pieces in said.values():
            reasons = [piece for kind, piece in pieces if kind == "reasoning"]
            assert "".join(reasons) == thought
            assert "".join(piece for kind, piece in pieces if kind == "content") == content
            assert len(pieces) - len(reasons) > 1 or not content, "the content comes while it is written"
            assert len(reasons) <= 1
        assert spelled == (text.encode() if "logprobs" in more else b"")


@pytest.mark.parametrize("scored", [False, True])
def test_reasoning_that_waits_for_its_end_costs_as_much_for_each_token(scored: bool) -> None:
    text, tokens = ModelTokenizer(byte_tokenizer(), None, 400, 512), 4000
    asked = {"model": "tiny", "messages": says("?"), "stream": True, "stream_reasoning": False, "logprobs": scored}
    call = SimpleNamespace(  # what its writer reads of it
        body=parse(ChatBody, json.dumps(asked).encode()),
        target=SimpleNamespace(fingerprint="f"),
        echo_of=lambda _: None,
        id="1",
        created=1,
    )
    events, nothing = StreamEvents(ChatForm, cast("Call", call)), lambda *_: None
    choice = ChoiceText(
        0,
        detokenizer(text.token_bytes),
        None,
        hidden_ids=frozenset(),
        min_tokens=0,
        logprobs=ChatLogprobs(text.token_bytes, 0) if scored else None,
        splitter=ReasoningSplitter(ExpectedReasoning("<think>", "</think>", begun=True)),
        on_placed=nothing,
        changed=events.add,
        stop_here=nothing,
        score=nothing,
    )
    written, spent, one = b"", 0.0, runner_pb2.TokenLogprobs(logprob=-1)
    for (token,) in text.encode(["a"] * tokens + list("</think>b"), add_special_tokens=False):
        choice.deliver([token], [one] if scored else [])
        began = time.thread_time()
        written += b"".join(events.take())
        spent += time.thread_time() - began
    assert b"a" * tokens in written
    assert spent < 6 * cpu_unit_seconds()  # a walk over all that waits, at each token, takes more than 20


async def test_stop_strings_end_only_the_content_and_logprobs_have_all_tokens() -> None:
    async with reasoning() as served:
        text = "<think>So it is.</think>Yes it is."
        answer = await ask(served, text, stop=["it"], logprobs=True)
        assert of(answer) == ("So it is.", "Yes ")
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        spelled = b"".join(bytes(one.bytes or []) for one in logprobs.content or []).decode()
        assert spelled.startswith("<think>So it is.</think>Yes ")
        seen = ""
        async for event in await served.openai.chat.completions.create(
            model="tiny", messages=says(text), stream=True, logprobs=True
        ):
            for choice in event.choices:
                tokens = (choice.logprobs.content if choice.logprobs else None) or []
                seen += b"".join(bytes(one.bytes or []) for one in tokens).decode()
        assert seen == text


async def test_a_model_that_is_not_declared_to_reason_has_content_alone(served: Served) -> None:
    text = "<think>So</think>Yes."
    answer = await ask(served, text, reasoning_effort="high")
    assert of(answer) == (None, text + " ")
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is None


async def test_the_template_gets_the_effort_and_earlier_reasoning() -> None:
    template = (
        "{% for message in messages %}{{ message.content }}({{ message.reasoning_content }}){% endfor %}"
        "{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}"
    )
    async with reasoning(template) as served:
        for said in ("reasoning", "reasoning_content"):
            chat: list[Any] = [*says("A."), {"role": "assistant", "content": "B.", said: "So."}, *says("C.")]
            answer = await served.openai.chat.completions.create(model="tiny", messages=chat, reasoning_effort="low")
            assert of(answer)[1] == "A.()B.(So.)C.()low True True"
        answer = await ask(served, "A.", reasoning_effort="none")
        assert of(answer)[1] == "A.()none False False"
        kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = await ask(served, "A.", reasoning_effort="low", extra_body=kwargs)
        assert of(answer)[1] == "A.()low False True"
        with pytest.raises(openai.BadRequestError, match="reasoning_effort: must be one of none, minimal"):
            await ask(served, "A.", extra_body={"reasoning_effort": "huge"})
        wrong: list[Any] = [{"role": "assistant", "content": "B.", "reasoning": 5}]
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.reasoning: must be a string"):
            await served.openai.chat.completions.create(model="tiny", messages=wrong)


async def test_calls_come_behind_the_reasoning() -> None:
    offered: list[Any] = [{"type": "function", "function": {"name": "send"}}]
    call = '<tool_call>{"name": "send", "arguments": {}}</tool_call>'
    template = "{%- if tools %}{% endif -%}" + LAST
    async with reasoning(template, tool="hermes") as served:
        answer = await ask(served, f"<think>I say {call}.</think>{call}", tools=offered, tool_choice="required")
        assert of(answer) == (f"I say {call}.", None)
        (made,) = answer.choices[0].message.tool_calls or []
        assert (made.function.name, answer.choices[0].finish_reason) == ("send", "tool_calls")
        said = served.cluster.runners[0].submits[-1].sampling
        assert json.loads(said.tool_calls)["must"]
        assert not said.reasoning.begun


@pytest.mark.parametrize("template", [LAST, OPENS])
async def test_a_grammar_is_tried_behind_the_reasoning(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Grammar] = []

    async def note(_: GrammarTrials, grammar: Grammar, *_of: Any) -> None:
        tried.append(grammar)

    monkeypatch.setattr(GrammarTrials, "check", note)
    async with reasoning(template) as served:
        await ask(served, "Yes", extra_body={"guided_regex": "yes|no"})
    behind = ExpectedReasoning("<think>", "</think>", begun=template == OPENS)
    assert tried == [Grammar(GrammarForm.REGEX, "yes|no", behind)]


async def test_an_answer_that_is_continued_may_be_inside_its_reasoning() -> None:
    async with reasoning() as served:
        chat: list[Any] = [{"role": "assistant", "content": "<think>So it is.</think>Y"}]
        continues = {"continue_final_message": True, "add_generation_prompt": False}
        answer = await served.openai.chat.completions.create(model="tiny", messages=chat, extra_body=continues)
        assert of(answer) == ("So it is.", "Y")  # the runner repeats the prompt
        chat = [{"role": "assistant", "content": "<think>So it"}]
        answer = await served.openai.chat.completions.create(model="tiny", messages=chat, extra_body=continues)
        assert of(answer) == ("<think>So it", None)
