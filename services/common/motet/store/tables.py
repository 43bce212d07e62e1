"""The schema of the database. No column has texts of prompts or answers, and none must ever be added.

A change here needs a migration in `migrations/versions`. A test compares the two.
"""

from datetime import UTC, datetime

from sqlalchemy import BigInteger, Boolean, DateTime, ForeignKey, Index, Integer, LargeBinary, MetaData, String, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Number = BigInteger().with_variant(Integer, "sqlite")
"""64 bits: messages have unsigned 32-bit numbers, which are too large for PostgreSQL's usual integer. SQLite chooses
ids itself only for a column of type INTEGER, which has 64 bits there."""


class Table(DeclarativeBase):
    # Every constraint has a name, so that a later migration can drop it in both databases.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


def now() -> datetime:
    return datetime.now(UTC)


class LengthSampleRow(Table):
    """One finished answer, for training: hashed features and counts (S3-15)."""

    __tablename__ = "length_samples"
    __table_args__ = (Index(None, "tenant", "adapter"),)

    id: Mapped[int] = mapped_column(Number, primary_key=True, autoincrement=True)
    request: Mapped[str] = mapped_column(String(128))
    tenant: Mapped[str] = mapped_column(String(253))
    adapter: Mapped[str] = mapped_column(String(512))
    """namespace/name, or the base model's digest; empty in rows of an older Motet, which did not say which base."""
    prompt_tokens: Mapped[int] = mapped_column(Number)
    output_tokens: Mapped[int] = mapped_column(Number)
    censored: Mapped[bool] = mapped_column(Boolean)
    """Whether the answer was cut. Its true length is then at least `output_tokens`."""
    estimated_q50: Mapped[int] = mapped_column(Number)
    estimated_q95: Mapped[int] = mapped_column(Number)
    estimate_source: Mapped[str] = mapped_column(String(128))
    estimated_q80: Mapped[int] = mapped_column(Number, server_default="0")
    estimated_q90: Mapped[int] = mapped_column(Number, server_default="0")
    promised_tokens: Mapped[int] = mapped_column(Number, server_default="0")
    """Of prompt and answer, when the request was first placed; 0: not known."""
    parks: Mapped[int] = mapped_column(Number, server_default="0")
    """How often it was parked."""
    finish: Mapped[str] = mapped_column(String(16), server_default=text("''"))
    """`stop`, `length` or `cancelled`; empty: not known."""
    features: Mapped[bytes] = mapped_column(LargeBinary)
    """Keyed hashes of the prompt's tokens as little-endian numbers of 24 bits, behind one of 32 for their version and
    key; empty if there are none."""
    created: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=now)


class PredictorVersionRow(Table):
    """A version of the predictor: running statistics of one method, or weights that a refit has made and that tilt
    them. Clients read the name of the one that serves in x-motet-length."""

    __tablename__ = "predictor_versions"

    version: Mapped[str] = mapped_column(String(64), primary_key=True)
    active: Mapped[bool] = mapped_column(Boolean)
    """Whether these statistics are the ones in use."""
    created: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=now)
    role: Mapped[str] = mapped_column(String(16), server_default=text("''"))
    """`serving`, `former`, `candidate` or `retired`; empty: it has not been compared yet."""
    size: Mapped[int] = mapped_column(Number, server_default="0")
    """Bytes of its weights in all parts; 0: it has none."""
    digest: Mapped[str] = mapped_column(String(64), server_default=text("''"))
    """SHA-256 of these bytes."""
    figures: Mapped[str] = mapped_column(String(4000), server_default=text("''"))
    """JSON: how good its estimates were."""
    ordered: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When somebody ordered that it serves. The predictor removes this when it has done so."""


class PredictorWeightsRow(Table):
    """A part of a version's weights. They are written slowly, part by part."""

    __tablename__ = "predictor_weights"

    version: Mapped[str] = mapped_column(ForeignKey(PredictorVersionRow.version, ondelete="CASCADE"), primary_key=True)
    part: Mapped[int] = mapped_column(Integer, primary_key=True)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class PredictorStateRow(Table):
    """What one version has learned about one scope. The row is replaced whenever it has learned more."""

    __tablename__ = "predictor_state"

    version: Mapped[str] = mapped_column(ForeignKey(PredictorVersionRow.version, ondelete="CASCADE"), primary_key=True)
    level: Mapped[str] = mapped_column(String(16), primary_key=True)
    """`tenant` or `adapter`; `change`: when the adapter's lengths last changed; `correction`: how far an adapter's
    estimates by this version were from its answers; or `comparison`: how much better this version was than the one that
    serves, in one row for all tenants."""
    tenant: Mapped[str] = mapped_column(String(253), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(512), primary_key=True)
    statistics: Mapped[bytes] = mapped_column(LargeBinary)
    updated: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=now)


class ApiKeyRow(Table):
    """An API key. Revoked and expired keys stay, so that a gateway can say that the key was revoked or has expired."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(253), index=True)
    tenant_uid: Mapped[str | None] = mapped_column(String(64))
    """The uid of the only namespace that the key is for. NULL: it is for every namespace with the tenant's name."""
    scopes: Mapped[str] = mapped_column(String(128))
    """Separated by commas."""
    limits: Mapped[str | None] = mapped_column(String(256))
    """A JSON object with those that it has. NULL: it has none of its own."""
    hash: Mapped[bytes] = mapped_column(LargeBinary)
    """SHA-256 of the secret."""
    created: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=now)
    expires: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    revoked: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    used: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """The hour in which it was last used. Storing the exact time would need a write for each request."""
