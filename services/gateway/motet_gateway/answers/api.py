"""A way to ask for an answer: what its body is, how its prompts become tokens, and in which form its answers come.

Each way is a module beside this one with one `Api`, and `routes/generate.py` has its path.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic

from motet_gateway.answers.form import Form
from motet_gateway.answers.prompts import Tokenising
from motet_gateway.parameters import AskingBody, Tokens


@dataclass(frozen=True, slots=True)
class Api(Generic[AskingBody]):
    body: type[AskingBody]
    form: type[Form]
    prompts: Callable[[AskingBody, Tokenising], Awaitable[list[Tokens]]]
    """One list of tokens per prompt."""
