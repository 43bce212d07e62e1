"""A way to ask for an answer: what its body is, how its prompts become tokens, and in which form its answers come.

Each way is a module or a folder beside this one with one `Api`, and `routes/generate.py` has its path.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from motet_gateway.answers.logprobs import LogprobsWriter
from motet_gateway.answers.prompts import Tokenising
from motet_gateway.parameters import AskingBody, Tokens

if TYPE_CHECKING:
    from motet_gateway.answers.call import Call
    from motet_gateway.answers.writer import AnswerWriter


@dataclass(frozen=True, slots=True)
class Api(Generic[AskingBody]):
    body: type[AskingBody]
    prompts: Callable[[AskingBody, Tokenising], Awaitable[list[Tokens]]]
    """One list of tokens per prompt."""
    logprobs: type[LogprobsWriter]
    writer: Callable[["Call"], "AnswerWriter"]
