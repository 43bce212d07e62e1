"""/v1/messages."""

from motet.errors import UnsupportedParameter
from motet.reasoning.formats import known_format
from motet_gateway.answers.api import Api
from motet_gateway.answers.chat import chat_prompts
from motet_gateway.answers.logprobs import ChatLogprobs
from motet_gateway.answers.messages.body import CountedMessages, MessagesBody
from motet_gateway.answers.messages.writer import MessageWriter
from motet_gateway.answers.prompts import Tokenising
from motet_gateway.parameters import Tokens


async def message_prompts(body: CountedMessages, tokenising: Tokenising) -> list[Tokens]:
    """Raises UnsupportedParameter if the model has to think and is not known to."""
    enabled = body.thinking is not None and body.thinking.get("type") == "enabled"
    if enabled and known_format(tokenising.formats.reasoning) is None:
        raise UnsupportedParameter(
            "thinking: this model is not declared to reason. Set spec.chat.reasoningFormat of its adapter or pool, or "
            'send {"type": "disabled"}',
            param="thinking",
        )
    return await chat_prompts(body, tokenising)


MESSAGES = Api(MessagesBody, message_prompts, ChatLogprobs, MessageWriter)
