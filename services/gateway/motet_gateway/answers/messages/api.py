"""/v1/messages."""

from motet_gateway.answers.api import Api
from motet_gateway.answers.chat import chat_prompts
from motet_gateway.answers.logprobs import ChatLogprobs
from motet_gateway.answers.messages.body import MessagesBody
from motet_gateway.answers.messages.writer import MessageWriter

MESSAGES = Api(MessagesBody, chat_prompts, ChatLogprobs, MessageWriter)
