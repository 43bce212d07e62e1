"""What a command with `--json` prints when it could not do its work."""

from collections.abc import Iterator
from contextlib import contextmanager

import orjson
import typer

from motet.errors import MotetError


@contextmanager
def error_in_json(*fields: str, as_json: bool) -> Iterator[None]:
    """Also what could not be done is on standard output then: its code says whether that is for who asked to correct,
    or for who runs the stack. `fields`: what the command says otherwise."""
    try:
        yield
    except MotetError as error:
        if as_json:
            document = dict.fromkeys(fields) | {"error": {"code": error.code, "message": error.message}}
            typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
        raise
