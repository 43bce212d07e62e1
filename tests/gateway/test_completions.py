"""Parameters of both endpoints, over a real socket."""

import asyncio
import json
from typing import Any

import httpx2
import pytest

from motet.api.v1 import common_pb2, runner_pb2
from motet.domain import Digest
from motet.prefix_hints import prefix_salt, prompt_hints
from motet_gateway.identity.caller import ANONYMOUS
from testbed.fake_services import BASE_DIGEST, END, FakeServices, fake_services, model_assets
from tests.gateway.conftest import Served, eventually, serve

PROMPT = "The quick brown fox"


async def complete(served: Served, **body: Any) -> dict[str, Any]:
    answer = await served.http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(served: Served, content: Any = "Hello", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    answer = await served.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def submitted(served: Served) -> runner_pb2.Submit:
    return served.cluster.runners[0].submits[-1]


def count(served: Served, text: str) -> int:
    return len(served.cluster.tokenizer.encode(text).ids)


async def test_a_prompt_is_a_string_or_tokens_or_a_list_of_either(served: Served) -> None:
    tokens = served.cluster.tokenizer.encode(PROMPT).ids
    for prompt, answers in [(PROMPT, 1), (tokens, 1), ([PROMPT, PROMPT], 2), ([tokens, tokens, tokens], 3)]:
        whole = await complete(served, prompt=prompt, max_tokens=100)
        assert [choice["text"] for choice in whole["choices"]] == [PROMPT] * answers
        assert [choice["index"] for choice in whole["choices"]] == list(range(answers))
        assert whole["usage"]["prompt_tokens"] == len(tokens) * answers


async def test_plain_completions_have_sixteen_tokens_unless_asked_otherwise(served: Served) -> None:
    whole = await complete(served, ignore_eos=True)
    assert whole["usage"]["completion_tokens"] == 16
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_several_choices_share_the_seed_and_count_together(served: Served) -> None:
    whole = await chat(served, n=3, seed=7, max_tokens=5, ignore_eos=True)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 15
    submits = served.cluster.runners[0].submits
    assert [(s.seed, s.choices[0].choice) for s in submits] == [(7, 0), (7, 1), (7, 2)]
    assert len({s.request for s in submits}) == 3


async def test_each_choice_but_the_first_names_the_first_one_with_its_prompt(served: Served) -> None:
    await complete(served, prompt=["One", "Two"], n=3, max_tokens=2)
    asked = served.cluster.scheduler.enqueued
    first = asked[0].request
    names = [enqueue.request for enqueue in asked]
    assert names == [first, *(f"{first}.{number}" for number in range(1, 6))]
    assert [enqueue.parent for enqueue in asked] == ["", first, first, "", f"{first}.3", f"{first}.3"]
    assert {enqueue.choices for enqueue in asked} == {3}
    assert {submit.request: submit.parent for submit in served.cluster.runners[0].submits} == {
        enqueue.request: enqueue.parent for enqueue in asked
    }


async def test_a_runner_gets_a_prompt_once_for_all_its_choices(served: Served) -> None:
    """128 copies of a long one take a tenth of a second of the gateway's loop."""
    runner = served.cluster.runners[0]
    whole = await complete(served, n=20, max_tokens=4)
    assert runner.prompt_tokens == count(served, PROMPT)
    assert {tuple(submit.prompt_ids) for submit in runner.submits} == {
        tuple(served.cluster.tokenizer.encode(PROMPT).ids)
    }
    assert {choice["text"] for choice in whole["choices"]} == {PROMPT[: len(whole["choices"][0]["text"])]}
    await complete(served, prompt=[PROMPT, "Other words"], n=2, max_tokens=4)
    assert runner.prompt_tokens == 2 * count(served, PROMPT) + count(served, "Other words")
    assert len({submit.prompt_number for submit in runner.submits}) == 3


async def test_a_runner_that_starts_again_gets_the_prompt_again(served: Served) -> None:
    runner = served.cluster.runners[0]
    runner.step_seconds = 0.05
    asking = asyncio.create_task(complete(served, n=3, max_tokens=40, ignore_eos=True))
    await eventually(lambda: len(runner.submits) == 3)
    await runner.restart()
    assert (await asking)["usage"]["completion_tokens"] == 3 * 40
    assert len(runner.submits) == 6
    assert len({tuple(submit.prompt_ids) for submit in runner.submits}) == 1


async def test_a_runner_that_declines_a_choice_gets_the_prompt_again(served: Served) -> None:
    """Or it would decline each next choice, too, if it had not kept the prompt."""
    runner = served.cluster.runners[0]
    runner.declines.append(common_pb2.Failure(code="declined", message="no room"))
    await complete(served, n=2, max_tokens=2)
    assert len(runner.submits) == 3
    assert runner.prompt_tokens == 2 * count(served, PROMPT)


async def test_a_runner_of_an_earlier_version_gets_the_prompt_with_each_choice(cluster: FakeServices) -> None:
    runner = cluster.runners[0]
    runner.fields.remove("prompt_number")
    async with serve(cluster) as served:
        await complete(served, n=3, max_tokens=4)
        assert runner.prompt_tokens == 3 * count(served, PROMPT)


async def test_the_scheduler_is_told_the_hints_of_the_first_pages_of_a_prompt(served: Served) -> None:
    await complete(served, prompt=list(range(40)), max_tokens=2)
    await complete(served, model="legal", prompt=list(range(40)), max_tokens=2)
    base, adapter = served.cluster.scheduler.enqueued
    for enqueue in (base, adapter):
        salt = prefix_salt(Digest(BASE_DIGEST), Digest(enqueue.adapter_digest), enqueue.tenant)
        assert list(enqueue.prefix_hashes) == prompt_hints(salt, range(40))
    assert len(base.prefix_hashes) == 2
    assert not set(base.prefix_hashes) & set(adapter.prefix_hashes)


async def test_a_gateway_that_reconnects_names_the_parents_again(served: Served) -> None:
    scheduler = served.cluster.scheduler
    served.cluster.runners[0].step_seconds = 0.05  # so that both live on when the scheduler is back
    asking = asyncio.create_task(complete(served, n=2, max_tokens=400, ignore_eos=True))
    await eventually(lambda: len(served.cluster.runners[0].submits) == 2)
    await scheduler.restart()
    await eventually(lambda: len(scheduler.hellos) == 2)
    first = scheduler.enqueued[0].request
    assert {live.request: live.parent for live in scheduler.hellos[-1].live} == {first: "", f"{first}.1": first}
    asking.cancel()


async def test_several_choices_stream_side_by_side(served: Served) -> None:
    stream = await served.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, finishes, usage = {0: "", 1: ""}, [], None
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert texts == {0: f"{PROMPT} ", 1: f"{PROMPT} "}
    assert finishes == ["stop", "stop"]
    assert usage is not None


async def test_a_stop_string_across_tokens_ends_the_answer_and_the_runners_work(served: Served) -> None:
    served.cluster.runners[0].step_seconds = 0.02
    whole = await complete(served, stop=["ick br", "zebra"], max_tokens=200, ignore_eos=True)
    assert whole["choices"][0] == {
        "index": 0,
        "text": "The qu",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "ick br",
    }
    assert whole["usage"]["completion_tokens"] < 20
    await eventually(lambda: served.cluster.runners[0].cancels)
    await eventually(lambda: served.cluster.scheduler.finished)
    assert served.cluster.scheduler.finished[0].reason == common_pb2.FINISH_REASON_STOP


async def test_the_beginning_of_a_stop_string_is_shown_at_the_end(served: Served) -> None:
    whole = await complete(served, stop="foxes", max_tokens=100)
    assert whole["choices"][0]["text"] == PROMPT


async def test_stop_strings_count_only_after_min_tokens(served: Served) -> None:
    short = await complete(served, stop="quick", max_tokens=60, ignore_eos=True)
    long = await complete(served, stop="quick", max_tokens=60, min_tokens=count(served, PROMPT), ignore_eos=True)
    assert short["choices"][0]["text"] == "The "
    assert long["choices"][0]["text"].startswith(PROMPT)


async def test_a_stop_token_is_left_out_of_the_text(served: Served) -> None:
    token = served.cluster.tokenizer.encode("x").ids[-1]
    prompt = [*served.cluster.tokenizer.encode("ab").ids, token]
    whole = await complete(served, prompt=prompt, stop_token_ids=[token])
    assert whole["choices"][0]["text"] == "ab"


async def test_chat_logprobs_name_tokens_with_their_bytes(served: Served) -> None:
    whole = await chat(served, logprobs=True, top_logprobs=2, max_tokens=3)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert content[0]["logprob"] == -0.5
    assert len(content[0]["top_logprobs"]) == 2


async def test_completion_logprobs_count_characters(served: Served) -> None:
    whole = await complete(served, logprobs=1, max_tokens=4)
    logprobs = whole["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == whole["choices"][0]["text"]
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    assert len(logprobs["top_logprobs"][0]) == 1


async def test_streamed_logprobs_cover_every_token(served: Served) -> None:
    stream = await served.openai.completions.create(
        model="tiny", prompt=PROMPT, stream=True, logprobs=1, max_tokens=100, extra_body={"ignore_eos": True}
    )
    tokens, offsets = [], []
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].logprobs:
            tokens += chunk.choices[0].logprobs.tokens
            offsets += chunk.choices[0].logprobs.text_offset
    assert len(tokens) == 100
    assert offsets == sorted(offsets)


async def test_continuous_usage_is_sent_when_asked(served: Served) -> None:
    stream = await served.openai.completions.create(
        model="tiny",
        prompt=PROMPT,
        stream=True,
        max_tokens=5,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert counts[0] >= 1


async def test_echo_puts_the_prompt_first(served: Served) -> None:
    whole = await complete(served, echo=True, max_tokens=2)
    assert whole["choices"][0]["text"].startswith(PROMPT + "The")


async def test_content_may_be_a_list_of_text_parts(served: Served) -> None:
    """As in vLLM they become lines."""
    parts = [{"type": "text", "text": "The quick"}, {"type": "refusal", "refusal": "brown fox"}]
    assert (await chat(served, parts))["choices"][0]["message"]["content"] == "The quick\nbrown fox "


async def test_the_newer_name_of_the_limit_wins(served: Served) -> None:
    await chat(served, max_tokens=50, max_completion_tokens=3)
    assert submitted(served).sampling.max_tokens == 3


async def test_chat_may_fill_the_context_unless_limited(served: Served) -> None:
    await chat(served)
    assert submitted(served).sampling.max_tokens == 512 - len(submitted(served).prompt_ids)


async def test_every_sampling_parameter_reaches_the_runner(served: Served) -> None:
    await complete(
        served,
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.75,
        top_k=5,
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"7": -100},
        stop_token_ids=[3],
        seed=-1,
        ignore_eos=True,
        logprobs=2,
    )
    assert submitted(served).seed == 2**64 - 1
    sampling = submitted(served).sampling
    assert sampling == runner_pb2.Sampling(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.75,
        top_k=5,
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={7: -100},
        stop_token_ids=[3],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=2,
    )


async def test_a_request_without_a_seed_gets_one(served: Served) -> None:
    await complete(served)
    await complete(served)
    first, second = served.cluster.runners[0].submits
    assert first.seed != second.seed
    assert first.seed_is_drawn
    await complete(served, seed=0)
    assert not submitted(served).seed_is_drawn


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, common_pb2.REQUEST_CLASS_STANDARD),
        ({"service_tier": "priority"}, common_pb2.REQUEST_CLASS_INTERACTIVE),
        ({"service_tier": "flex"}, common_pb2.REQUEST_CLASS_BATCH),
        ({"priority": -1}, common_pb2.REQUEST_CLASS_INTERACTIVE),
        ({"priority": 5}, common_pb2.REQUEST_CLASS_BATCH),
    ],
)
async def test_priority_and_tier_become_a_class(served: Served, body: dict[str, Any], expected: int) -> None:
    await complete(served, **body)
    assert served.cluster.scheduler.enqueued[-1].request_class == expected


async def test_a_request_cannot_be_more_urgent_than_its_adapter(served: Served) -> None:
    served.cluster.add_adapter("slow", max_class=common_pb2.REQUEST_CLASS_BATCH)
    served.cluster.scheduler.publish()
    await eventually(lambda: len(served.gateway.catalog.current.adapters) == 3)
    await complete(served, model="slow", priority=-5)
    assert served.cluster.scheduler.enqueued[-1].request_class == common_pb2.REQUEST_CLASS_BATCH


@pytest.mark.parametrize(
    ("granted", "expected"),
    [
        ({"*": common_pb2.REQUEST_CLASS_STANDARD}, common_pb2.REQUEST_CLASS_STANDARD),
        (
            {"*": common_pb2.REQUEST_CLASS_BATCH, "default": common_pb2.REQUEST_CLASS_INTERACTIVE},
            common_pb2.REQUEST_CLASS_INTERACTIVE,
        ),
        ({"default": common_pb2.REQUEST_CLASS_BATCH}, common_pb2.REQUEST_CLASS_BATCH),
    ],
)
@pytest.mark.parametrize("model", ["tiny", "chat"])
async def test_a_request_cannot_be_more_urgent_than_the_pool_grants(
    served: Served, model: str, granted: dict[str, common_pb2.RequestClass.ValueType], expected: int
) -> None:
    scheduler = served.cluster.scheduler
    served.cluster.add_adapter("chat", max_class=common_pb2.REQUEST_CLASS_INTERACTIVE)
    scheduler.max_classes = granted
    scheduler.publish()
    await eventually(lambda: len(served.gateway.catalog.current.adapters) == 3)
    await complete(served, model=model, priority=-1)
    assert scheduler.enqueued[-1].request_class == submitted(served).request_class == expected


async def test_an_adapter_is_named_by_its_digest_and_its_tenant_by_the_caller(served: Served) -> None:
    await complete(served, model="acme/sql")
    assert submitted(served).adapter_digest == served.cluster.scheduler.adapters[1].digest
    assert submitted(served).tenant == "default"


async def test_a_long_prompt_is_tokenised_too(served: Served) -> None:
    whole = await complete(served, prompt="fox " * 2000, truncate_prompt_tokens=50, max_tokens=1)
    assert whole["usage"]["prompt_tokens"] == 50


async def test_a_prompt_is_cut_where_the_client_says(served: Served) -> None:
    numbers = list(range(100, 160))
    for more, kept in (
        ({"truncate_prompt_tokens": 5}, numbers[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, numbers[:5]),
        ({"truncate_prompt_tokens": 5.0, "truncation_side": "left"}, numbers[-5:]),
        ({"truncate_prompt_tokens": -1}, numbers),
    ):
        await complete(served, prompt=numbers, max_tokens=2, **more)
        assert list(submitted(served).prompt_ids) == kept, more
    await complete(served, prompt=numbers * 20, max_tokens=12, truncate_prompt_tokens=-1)
    assert len(submitted(served).prompt_ids) == 512 - 12
    refused = await served.http.post("/v1/completions", json={"prompt": "x", "truncate_prompt_tokens": 0})
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_a_salt_goes_to_the_runner_and_into_the_hints(served: Served) -> None:
    hints = []
    for salt in ("", "mine", "mine", "other"):
        await complete(served, prompt=list(range(100, 180)), max_tokens=1, cache_salt=salt)
        assert submitted(served).cache_salt == salt
        hints.append(tuple(served.cluster.scheduler.enqueued[-1].prefix_hashes))
    assert hints[1] == hints[2]
    assert len(set(hints)) == 3
    assert len(hints[0]) == 5


async def test_a_namespace_that_is_made_again_shares_no_cached_prompts(cluster: FakeServices) -> None:
    """Nor does a runner that knows no salt stay without requests: its clients have not asked for one."""
    salted, hints = list[str](), list[tuple[int, ...]]()
    cluster.runners[0].fields = []
    cluster.scheduler.namespaces = {ANONYMOUS.tenant: "first"}
    async with serve(cluster) as served:

        async def ask() -> None:
            await complete(served, prompt=list(range(100, 180)), max_tokens=1)
            salted.append(submitted(served).cache_salt)
            hints.append(tuple(cluster.scheduler.enqueued[-1].prefix_hashes))

        await ask()
        before = served.gateway.catalog.current
        cluster.scheduler.namespaces = {ANONYMOUS.tenant: "second"}
        cluster.scheduler.publish()
        await eventually(lambda: served.gateway.catalog.current is not before)
        await ask()
    assert len(set(salted)) == len(set(hints)) == 2


async def test_a_request_that_comes_before_its_namespace_is_known_has_its_salt(cluster: FakeServices) -> None:
    scheduler, predictor = cluster.scheduler, cluster.predictor
    runners, scheduler.runners = scheduler.runners, []
    async with serve(cluster, ready=False, hold_seconds=0.05) as served:
        waiting = asyncio.create_task(complete(served, prompt="x", max_tokens=1))
        await eventually(lambda: scheduler.held)
        scheduler.runners, scheduler.namespaces = runners, {ANONYMOUS.tenant: "first"}
        scheduler.publish()
        await waiting
        assert "first" in submitted(served).cache_salt
    assert {one.tenant for one in predictor.prompts} == {f"{ANONYMOUS.tenant}@first"}


async def test_a_runner_that_knows_no_salt_never_answers(cluster: FakeServices) -> None:
    cluster.runners[0].fields = []
    async with serve(cluster) as served:
        answer = await served.http.post("/v1/completions", json={"prompt": "x", "cache_salt": "mine"})
    assert (answer.status_code, cluster.runners[0].submits) == (400, [])


async def test_the_only_base_model_needs_no_name(served: Served) -> None:
    for model in ({}, {"model": ""}, {"model": None}):
        answer = await served.http.post("/v1/completions", json={"prompt": "x"} | model)
        assert answer.json()["model"] == "tiny"


async def test_documents_are_refused_where_no_template_reads_them(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "documents": [{"text": "y"}]}
    answer = await served.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")


async def test_all_prompts_together_have_few_enough_choices(served: Served) -> None:
    answer = await served.http.post("/v1/completions", json={"prompt": ["x"] * 9, "n": 128})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


async def test_the_final_message_can_be_continued(served: Served) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The quick"}]
    body = {"model": "tiny", "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    answer = await served.http.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "HiThe quick"


async def test_a_model_without_template_points_to_plain_completions() -> None:
    async with fake_services(assets=model_assets(template=None)) as cluster, serve(cluster) as served:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
        answer = await served.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "/v1/completions" in answer.json()["error"]["message"]


async def test_tokens_can_be_counted_and_read_back(served: Served) -> None:
    counted = (await served.http.post("/tokenize", json={"model": "tiny", "prompt": PROMPT})).json()
    assert counted["count"] == count(served, PROMPT)
    assert counted["max_model_len"] == 512
    for group in served.gateway.catalog.current.groups:
        group.max_model_length = 0  # no runner has said it yet
    unknown = (await served.http.post("/tokenize", json={"model": "tiny", "prompt": PROMPT})).json()
    assert unknown["max_model_len"] == 512, "that of the model's own files"
    read = await served.http.post("/detokenize", json={"model": "tiny", "tokens": counted["tokens"]})
    assert read.json() == {"prompt": PROMPT}
    messages = [{"role": "user", "content": PROMPT}]
    chat = await served.http.post("/tokenize", json={"messages": messages, "return_token_strs": True})
    assert chat.json()["count"] == count(served, PROMPT + " ")
    assert len(chat.json()["token_strs"]) == chat.json()["count"]


async def test_a_runner_hears_the_weight_that_the_scheduler_says(served: Served) -> None:
    await complete(served)
    assert submitted(served).weight == 0, "a scheduler of an earlier version says none"
    served.cluster.scheduler.weight = 5
    await complete(served)
    assert submitted(served).weight == 5


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_ended_an_answer_is_said(served: Served, path: str) -> None:
    ids = served.cluster.tokenizer.encode(PROMPT).ids
    content = {"prompt": PROMPT, "messages": [{"role": "user", "content": PROMPT}]}
    for more, reason in (
        ({"stop": ["fox", "brown"]}, "brown"),
        ({"stop_token_ids": [ids[2]]}, ids[2]),
        ({"max_tokens": 1}, None),
        ({}, None),
        ({"stop": ["brown"], "stop_token_ids": [ids[-1]]}, "brown"),
    ):
        answer = (await served.http.post(path, json={"model": "tiny"} | content | more)).json()
        assert answer["choices"][0]["stop_reason"] == reason, more
        streamed = await served.http.post(path, json={"model": "tiny", "stream": True} | content | more)
        last = json.loads(streamed.text.split("data: ")[-2])["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == (answer["choices"][0]["finish_reason"], reason)


async def test_the_tier_is_that_of_the_class_that_a_request_got(served: Served) -> None:
    assert "service_tier" not in await complete(served)
    for asked, got in (("auto", "default"), ("priority", "priority"), ("flex", "flex"), ("batch", "flex")):
        assert (await complete(served, service_tier=asked))["service_tier"] == got


async def test_log_probabilities_may_show_tokens_by_their_ids(served: Served) -> None:
    ids = served.cluster.tokenizer.encode(PROMPT).ids
    asked = {"logprobs": 2, "return_tokens_as_token_ids": True, "max_tokens": 2, "echo": True}
    shown = (await complete(served, **asked))["choices"][0]["logprobs"]
    assert shown["tokens"][: len(ids)] == [f"token_id:{one}" for one in ids]
    assert all(name.startswith("token_id:") for names in shown["top_logprobs"][1:] for name in names)
    chat_asked = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    token = (await chat(served, PROMPT, **chat_asked))["choices"][0]["logprobs"]["content"][0]
    assert token["token"].startswith("token_id:")
    assert token["top_logprobs"][0]["token"].startswith("token_id:")


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"n": 2}, {"stop": ["brown"]}])
async def test_token_ids_are_returned(served: Served, more: dict[str, Any]) -> None:
    ids = served.cluster.tokenizer.encode(PROMPT).ids
    asked = {"prompt": [PROMPT, "Hi"], "return_token_ids": True} | more
    choices = (await complete(served, **asked))["choices"]
    for choice in choices[: len(choices) // 2]:
        assert choice["prompt_token_ids"] == ids
        stopped = choice["token_ids"]
        assert stopped == ([*ids, END] if "stop" not in more else ids[: len(stopped)])
    assert choices[-1]["prompt_token_ids"] == served.cluster.tokenizer.encode("Hi").ids
    streamed = await served.http.post("/v1/completions", json={"model": "tiny", "stream": True} | asked)
    shown: dict[int, list[int]] = {}
    prompts = {}
    for event in events_of(streamed):
        (choice,) = event["choices"]
        shown.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
        if "prompt_token_ids" in choice:
            assert choice["index"] not in prompts, "once"
            prompts[choice["index"]] = choice["prompt_token_ids"]
    assert shown == {choice["index"]: choice["token_ids"] for choice in choices}
    assert prompts == {choice["index"]: choice["prompt_token_ids"] for choice in choices}


async def test_a_chat_has_the_ids_of_its_prompt_beside_the_choices(served: Served) -> None:
    answer = await chat(served, PROMPT, return_token_ids=True)
    assert answer["prompt_token_ids"] == list(submitted(served).prompt_ids)
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "return_token_ids": True}
    events = events_of(await served.http.post("/v1/chat/completions", json=body | {"stream": True}))
    assert [one["prompt_token_ids"] for one in events if "prompt_token_ids" in one] == [answer["prompt_token_ids"]]
    ids = [token for one in events for token in one["choices"][0].get("token_ids", ())]
    assert ids == answer["choices"][0]["token_ids"]


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


async def test_usage_says_how_much_of_the_prompts_the_runner_had(served: Served) -> None:
    runner = served.cluster.runners[0]
    runner.cached_tokens = None
    assert "prompt_tokens_details" not in (await complete(served))["usage"], "a runner of an earlier version"
    for said in (0, 1):
        runner.cached_tokens = said
        assert (await complete(served, n=2))["usage"]["prompt_tokens_details"] == {"cached_tokens": said}, "not twice"
        assert (await complete(served, prompt=["a b c", "d e f"]))["usage"]["prompt_tokens_details"] == {
            "cached_tokens": 2 * said
        }
        assert (await chat(served))["usage"]["prompt_tokens_details"] == {"cached_tokens": said}
    runner.cached_tokens = 1 << 20
    usage = (await complete(served))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"], "never more than there are"


async def test_all_streams_say_how_much_of_the_prompt_the_runner_had(served: Served) -> None:
    served.cluster.runners[0].cached_tokens = 2
    messages: Any = [{"role": "user", "content": "Hello you there"}]
    options: Any = {"include_usage": True}
    chunks = await served.openai.chat.completions.create(
        model="tiny", messages=messages, stream=True, stream_options=options
    )
    usage = [chunk.usage async for chunk in chunks][-1]
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2
    response = await served.openai.responses.create(model="tiny", input="Hello you there")
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert response.usage.input_tokens == usage.prompt_tokens
    async with served.anthropic.messages.stream(model="tiny", max_tokens=9, messages=messages) as stream:
        events = [event async for event in stream]
    began = next(event.message.usage for event in events if event.type == "message_start")
    ended = next(event.message.usage for event in events if event.type == "message_stop")
    assert began.cache_read_input_tokens == ended.cache_read_input_tokens == 2
    assert began.input_tokens == usage.prompt_tokens - 2, "as Anthropic counts them"
