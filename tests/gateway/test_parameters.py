"""The gateway supports each parameter of a client, or refuses it with a reason."""

import asyncio
from collections.abc import Iterator

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from motet.errors import InvalidRequest, MotetError
from motet.sampling import IN_BODIES
from motet_gateway.answers.chat import chat_prompts
from motet_gateway.answers.completions import completion_prompts
from motet_gateway.answers.prompts import Tokenising, max_answer_tokens
from motet_gateway.parameters import ChatBody, CompletionBody, parse, request_class, sampling
from motet_gateway.tokens.chat_renderer import ChatRenderer
from motet_gateway.tokens.content_parts import as_read, reads_parts
from motet_gateway.tokens.encoder import Encoder
from motet_gateway.tokens.render_pool import RenderPool, TemplateText
from motet_gateway.tokens.text_model import Keep, ModelTokenizer
from testbed.fake_services import TEMPLATE, byte_tokenizer
from tests.gateway.conftest import Served

MODEL = ModelTokenizer(byte_tokenizer(), TemplateText(TEMPLATE, {}), vocabulary=400, context_length=512)

json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [*ChatBody.model_fields, *IN_BODIES, "prompt", "echo", "suffix", "best_of", "guided_json", "role", "content"]
values = json | st.sampled_from(
    [1, 0, 0.5, 2**40, -(2**40), "user", "text", ["a"], {"1": 2}, [{"role": "user", "content": "x"}]]
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=2)
messages = st.lists(st.fixed_dictionaries({"role": values, "content": values}), min_size=1, max_size=2)


LOOP = asyncio.Runner()
ENCODER = Encoder(threaded_bytes=4096)
RENDERERS = RenderPool(processes=1, cpu_seconds=5, memory_bytes=1 << 28)
TOKENISING = Tokenising(MODEL, ChatRenderer(RENDERERS), ENCODER)


@pytest.fixture(scope="module", autouse=True)
def ends() -> Iterator[None]:
    with LOOP:
        yield
        LOOP.run(RENDERERS.close())
        ENCODER.close()


def check(refusal: MotetError) -> None:
    assert refusal.mapping.http == 400
    assert refusal.message


@settings(max_examples=150)
@given(bodies, messages | values)
def test_any_chat_is_understood_or_refused(body: dict, messages: object) -> None:
    content = orjson.dumps({"model": "m", "messages": messages} | body, option=orjson.OPT_NON_STR_KEYS)
    try:
        parsed = parse(ChatBody, content)
        parsed.refuse_unsupported()
        parsed.stops()
        (prompt,) = LOOP.run(chat_prompts(parsed, TOKENISING))
        made = sampling(parsed, MODEL, max_tokens=max_answer_tokens(parsed, prompt, 512))
        assert request_class(parsed, 0, 0) in (1, 2, 3)
    except MotetError as error:
        check(error)
    else:
        assert 1 <= made.max_tokens <= 512


@given(bodies, values)
def test_any_completion_is_understood_or_refused(body: dict, prompt: object) -> None:
    content = orjson.dumps({"model": "m", "prompt": prompt} | body, option=orjson.OPT_NON_STR_KEYS)
    try:
        parsed = parse(CompletionBody, content)
        parsed.refuse_unsupported()
        parsed.stops()
        for tokens in LOOP.run(completion_prompts(parsed, TOKENISING)):
            sampling(parsed, MODEL, max_tokens=max_answer_tokens(parsed, tokens, 512))
    except MotetError as error:
        check(error)


@given(st.binary(max_size=40))
def test_any_bytes_are_understood_or_refused(content: bytes) -> None:
    try:
        parse(ChatBody, content)
    except MotetError as error:
        check(error)


def wanted(**fields: object) -> CompletionBody:
    body = parse(CompletionBody, orjson.dumps({"model": "m", "prompt": "x"} | fields))
    body.refuse_unsupported()
    return body


@pytest.mark.parametrize("words", [["\N{ANATOMICAL HEART}" * 256], ["x" * 200] * 30])
def test_bad_words_are_bounded_in_bytes(words: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="bad_words: must be at most 4096 bytes together"):
        wanted(bad_words=words).forbidden_words()


def test_bad_words_are_forbidden_by_themselves_and_behind_a_blank() -> None:
    tokens = MODEL.words(wanted(bad_words=["fox", " fox", "é"]).forbidden_words())
    assert [MODEL.tokenizer.decode(list(one)) for one in tokens] == ["fox", " fox", "é", " é"]
    message = sampling(wanted(), MODEL, max_tokens=4, bad_words=tokens)
    assert [list(one.ids) for one in message.bad_words] == [list(one) for one in tokens]


@pytest.mark.parametrize("words", ["fox", [1], [""], [" "], ["x" * 257], ["x"] * 129, {}, 5, False])
def test_wrong_bad_words_are_named(words: object) -> None:
    with pytest.raises(MotetError, match="bad_words: must be a list of up to 128 strings") as caught:
        wanted(bad_words=words)
    assert caught.value.param == "bad_words"


async def test_the_runner_gets_the_lists(served: Served) -> None:
    body = {"model": "tiny", "prompt": "x", "bad_words": ["fox"], "allowed_token_ids": [5, 7], "max_tokens": 2}
    assert (await served.http.post("/v1/completions", json=body)).status_code == 200
    asked = served.cluster.runners[0].submits[0].sampling
    assert sorted(asked.allowed_token_ids) == [5, 7]
    assert len(asked.bad_words) == 2


@pytest.mark.parametrize("words", [3, 4000])
def test_a_cut_text_keeps_the_tokens_that_the_tokenizer_adds(words: int) -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    model = ModelTokenizer(tokenizer, None, vocabulary=400, context_length=1 << 20)
    text = "the quick fox. " * words
    (whole,) = model.encode([text], add_special_tokens=True)
    (last,) = model.encode([text], add_special_tokens=True, keep=Keep(last=5))
    (first,) = model.encode([text], add_special_tokens=True, keep=Keep(first=5))
    assert list(last) == [whole[0], *whole[-4:]]
    assert list(first) == list(whole[:5])
    (plain,) = model.encode([text], add_special_tokens=False, keep=Keep(last=5))
    assert list(plain) == list(whole[-5:])


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("{% for part in message.content %}", True),
        ("{%- for part in message['content'] -%}", True),
        ("{%- for item in content %}", True),
        ("{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}", True),
        ("{% for message in messages %}{{ message.content }}", False),
        ("{% for line in message.content.splitlines() %}", False),
    ],
)
def test_a_template_that_reads_parts_gets_them(template: str, parts: bool) -> None:
    assert reads_parts(template) is parts
    said = {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}
    body = parse(ChatBody, orjson.dumps({"messages": [said]}))
    both = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert body.plain_messages(parts=parts)[0]["content"] == (both if parts else "a\nb")


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("{{ message.content }}", False),
        ("{% for part in message.content %}{{ part.text }}", True),
        ("{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}", False),
        ("{% if message.content is not string %}{% for part in message.content %}", False),
    ],
)
def test_a_template_that_reads_parts_alone_gets_strings_as_parts(template: str, parts: bool) -> None:
    given = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    assert as_read(template, given)[0]["content"] == ([{"type": "text", "text": "a"}] if parts else "a")
    assert as_read(template, given)[1] == given[1]
