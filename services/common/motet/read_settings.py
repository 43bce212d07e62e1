"""Reads settings from the environment, or says in a sentence which variable is wrong."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsError

from motet.errors import SETUP_FAILED
from motet.settings import RENAMED

Read = TypeVar("Read", bound=BaseSettings)


def read(kind: type[Read]) -> Read:
    """Read settings from the environment. If one is wrong, print a sentence that names the variable, and exit."""
    if old_names := sorted(RENAMED.keys() & os.environ.keys()):
        print_reason("\n".join(f"{old} is now called {RENAMED[old]}: set that instead." for old in old_names))
        sys.exit(SETUP_FAILED)
    try:
        return kind()
    except ValidationError as error:
        prefix = kind.model_config.get("env_prefix", "")
        for problem in error.errors():
            field, *inside = problem["loc"] or ("",)
            where = "".join(f"[{step!r}]" for step in inside)
            given = f" is {problem['input']!r}" if not isinstance(problem["input"], dict) else ""
            print_reason(f"{prefix}{field}".upper() + f"{where}{given}: {problem['msg']}.")
    except SettingsError as error:
        print_reason(f"{error}. Lists and mappings are written as JSON.")
    sys.exit(SETUP_FAILED)


TERMINATION_LOG = Path("/dev/termination-log")
"""In a pod, Kubernetes puts the content of this file into the pod's status. The operator repeats it in the pool's."""


def print_reason(sentence: str) -> None:
    print(sentence, file=sys.stderr)  # noqa: T201 - the last line a person sees
    with suppress(OSError):
        if TERMINATION_LOG.is_file():
            TERMINATION_LOG.write_text(sentence)
