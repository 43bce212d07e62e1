"""The predictor's own settings, MOTET_PREDICTOR_<FIELD> in the environment."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """How much it remembers, and how often it writes that down."""

    model_config = SettingsConfigDict(env_prefix="MOTET_PREDICTOR_", frozen=True, extra="ignore")

    save_seconds: float = Field(1.0, gt=0)
    """How often the predictor writes to the database what it has learned. A crash loses at most this much of it.
    Multiplied by MOTET_TIME_SCALE."""

    max_scopes: int = Field(20_000, ge=100)
    """For how many tenants and adapters lengths are remembered. Each takes about 8 KiB. Beyond it those that answered
    longest ago are forgotten, and start from their tenant's lengths again."""

    queued_samples: int = Field(10_000, ge=1)
    """How many training samples may wait in memory while the database is away. Beyond it the oldest are dropped and
    counted (`motet_predictor_samples_dropped_total`). The statistics lose nothing."""

    keep_samples: int = Field(200_000, ge=1)
    """How many training samples stay in the database: the newest ones."""
