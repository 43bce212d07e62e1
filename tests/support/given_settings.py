"""Settings without those of the environment: to look there for each field was a seventh of a small test."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

Made = TypeVar("Made", bound=BaseSettings)


class _OnlyGiven:
    @classmethod
    def settings_customise_sources(
        cls, _: object, init_settings: PydanticBaseSettingsSource, **others: object
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def given(settings: type[Made]) -> Callable[..., Made]:
    def make(**values: Any) -> Made:
        made: Made = _only_given(settings)(**values)
        object.__setattr__(made, "__class__", settings)  # it may be pickled
        return made

    return make


@functools.cache
def _only_given(settings: type[Made]) -> type[Made]:
    return type(settings.__name__, (_OnlyGiven, settings), {})
