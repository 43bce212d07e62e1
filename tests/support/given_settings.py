"""Settings without those of the environment: to look there for each field was a seventh of a small test."""

import functools
from typing import TypeVar

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

Made = TypeVar("Made", bound=BaseSettings)


class _OnlyGiven:
    @classmethod
    def settings_customise_sources(
        cls, _: object, init_settings: PydanticBaseSettingsSource, **others: object
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


@functools.cache
def given(settings: type[Made]) -> type[Made]:
    return type(settings.__name__, (_OnlyGiven, settings), {"__module__": __name__})
