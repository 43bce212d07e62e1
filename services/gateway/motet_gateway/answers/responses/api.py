"""/v1/responses."""

from motet_gateway.answers.api import Api
from motet_gateway.answers.chat import chat_prompts
from motet_gateway.answers.logprobs import ChatLogprobs
from motet_gateway.answers.responses.body import ResponsesBody
from motet_gateway.answers.responses.writer import ResponseWriter

PATH = "/v1/responses"
RESPONSES = Api(ResponsesBody, chat_prompts, ChatLogprobs, ResponseWriter)
