"""/v1/completions."""

from functools import partial

import orjson

from motet.sampling import check_tokens
from motet_gateway.answers.api import Api
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.form import Form, Json
from motet_gateway.answers.logprobs import CompletionLogprobs
from motet_gateway.answers.prompts import Tokenising, not_empty
from motet_gateway.answers.written import StreamEvents
from motet_gateway.parameters import CompletionBody, Tokens


async def completion_prompts(body: CompletionBody, tokenising: Tokenising) -> list[Tokens]:
    prompts, field = body.prompts(), body.prompt_field
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    special = body.add_special_tokens is not False
    encoded = iter(await tokenising.encode(texts, special=special, field=field) if texts else ())
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_tokens(field, prompt, tokenising.model.vocabulary)
    return [not_empty(next(encoded) if isinstance(prompt, str) else prompt, field) for prompt in prompts]


class CompletionForm(Form):
    prefix = "cmpl"
    object_whole = "text_completion"
    object_chunk = "text_completion"
    prompt_ids_in_choices = True

    def opening(self, _index: int, /) -> bytes:
        return b""

    def choice_chunk(self, index: int, text: str | None, logprobs: orjson.Fragment | None, finish: str | None) -> Json:
        return {"index": index, "text": text or "", "logprobs": logprobs, "finish_reason": finish}

    def content(self, _choice: ChoiceText, text: str, _reasoning: str, /) -> Json:
        return {"text": text}


COMPLETIONS = Api(CompletionBody, completion_prompts, CompletionLogprobs, partial(StreamEvents, CompletionForm))
