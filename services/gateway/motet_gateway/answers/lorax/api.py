"""The ways to ask for an answer in LoRAX's own API."""

from functools import partial

from motet_gateway.answers.api import Api
from motet_gateway.answers.lorax.body import GenerateBody, StreamedBody, WholeBody
from motet_gateway.answers.lorax.writer import GenerateWriter, TokenWriter
from motet_gateway.answers.prompts import Tokenising, not_empty
from motet_gateway.parameters import Tokens


async def prompts(body: GenerateBody, tokenising: Tokenising) -> list[Tokens]:
    special = body.add_special_tokens is not False
    (tokens,) = await tokenising.encode([body.inputs], special=special, field=body.prompt_field)
    return [not_empty(tokens, body.prompt_field)]


GENERATE = Api(WholeBody, prompts, TokenWriter, GenerateWriter)
GENERATE_STREAM = Api(StreamedBody, prompts, TokenWriter, GenerateWriter)
ROOT = Api(GenerateBody, prompts, TokenWriter, partial(GenerateWriter, listed=True))
