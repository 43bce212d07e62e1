"""The predictor's own settings, MOTET_PREDICTOR_<FIELD> in the environment."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """How much the predictor keeps, and how often it saves it."""

    model_config = SettingsConfigDict(env_prefix="MOTET_PREDICTOR_", frozen=True, extra="ignore")

    save_seconds: float = Field(1.0, gt=0)
    """How often the predictor saves its statistics to the database. A crash loses at most the last interval. Multiplied
    by MOTET_TIME_SCALE."""

    max_scopes: int = Field(20_000, ge=100)
    """For how many tenants and adapters statistics are kept. Each takes about 8 KiB. If there are more, those with the
    oldest last answer are forgotten, and start from their tenant's statistics again."""

    queued_samples: int = Field(10_000, ge=1)
    """How many training samples may wait in memory while the database can't be reached. If there are more, the oldest
    are dropped and counted (`motet_predictor_samples_dropped_total`). The statistics are not affected."""

    keep_samples: int = Field(200_000, ge=1)
    """How many training samples stay in the database: the newest of each tenant. If there are more, the tenants with
    most lose their oldest."""

    keep_samples_of_tenant: int = Field(5_000, ge=1)
    """How many training samples of each tenant stay in the database after a refit: the newest ones. So a tenant with
    many answers does not take the room of the others."""

    refit_answers: int = Field(500, ge=1)
    """After how many new answers the weights of prompts' features are fitted again, in a process of low priority."""

    refit_samples: int = Field(50_000, ge=100)
    """How many samples a refit reads at most: equally many of each tenant if there are more. 50,000 take a minute or
    two."""

    refit_max_seconds: float = Field(1800.0, gt=0)
    """A refit that takes longer is ended. The predictor goes on with the weights that it has."""
