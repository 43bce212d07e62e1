"""The unmodified OpenAI client, over a real socket."""

import openai
import pytest

from tests.gateway.conftest import Served

HELLO = [{"role": "user", "content": "The quick brown fox"}]


async def test_the_client_lists_models_under_usable_names(served: Served) -> None:
    models = {model.id: model async for model in served.openai.models.list()}
    assert set(models) == {"tiny", "legal", "acme/sql"}
    assert models["legal"].parent == "tiny"
    assert models["legal"].root == "file:///adapters/legal"
    assert models["legal"].rank == 8
    assert models["tiny"].max_model_len == 512


async def test_the_client_retrieves_a_model_whose_name_has_a_slash(served: Served) -> None:
    model = await served.openai.models.retrieve("acme/sql")
    assert (model.id, model.tenant, model.state) == ("acme/sql", "acme", "ready")


async def test_the_client_gets_a_chat_answer(served: Served) -> None:
    answer = await served.openai.chat.completions.create(model="legal", messages=HELLO)
    assert answer.choices[0].message.content == "The quick brown fox "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == answer.usage.completion_tokens - 1
    assert answer.model == "legal"


async def test_the_client_streams_the_same_text(served: Served) -> None:
    stream = await served.openai.chat.completions.create(
        model="legal", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The quick brown fox "
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_an_unknown_model_is_a_404_with_the_nearest_names(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await served.openai.chat.completions.create(model="leagl", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "Nearest names: legal" in caught.value.message
