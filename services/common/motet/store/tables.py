"""The schema. Texts of prompts and answers have no column here, and never get one.

A change here needs a migration in `migrations/versions`; a test compares the two.
"""

from datetime import UTC, datetime

from sqlalchemy import BigInteger, Boolean, DateTime, ForeignKey, Index, Integer, LargeBinary, MetaData, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Number = BigInteger().with_variant(Integer, "sqlite")
"""64 bits: peers count in unsigned 32, which the usual integer of PostgreSQL does not hold. SQLite numbers a key by
itself only when it is called INTEGER, which there holds 64 bits as well."""


class Table(DeclarativeBase):
    # Names for every constraint, so that a later migration can drop one on either database.
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
    """namespace/name; empty for the base model."""
    prompt_tokens: Mapped[int] = mapped_column(Number)
    output_tokens: Mapped[int] = mapped_column(Number)
    censored: Mapped[bool] = mapped_column(Boolean)
    """The answer was cut: its true length is at least `output_tokens`."""
    estimated_q50: Mapped[int] = mapped_column(Number)
    estimated_q95: Mapped[int] = mapped_column(Number)
    estimate_source: Mapped[str] = mapped_column(String(128))
    features: Mapped[bytes] = mapped_column(LargeBinary)
    """Hashed n-grams of the prompt as little-endian 32-bit numbers."""
    created: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=now)


class PredictorVersionRow(Table):
    """A way of predicting. At most one is active: the one whose name clients read in x-motet-length."""

    __tablename__ = "predictor_versions"

    version: Mapped[str] = mapped_column(String(64), primary_key=True)
    active: Mapped[bool] = mapped_column(Boolean)
    created: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=now)


class PredictorStateRow(Table):
    """What one version has learned about one scope; written again whenever that scope has learned more."""

    __tablename__ = "predictor_state"

    version: Mapped[str] = mapped_column(ForeignKey(PredictorVersionRow.version, ondelete="CASCADE"), primary_key=True)
    level: Mapped[str] = mapped_column(String(16), primary_key=True)
    """`global`, `tenant` or `adapter`."""
    tenant: Mapped[str] = mapped_column(String(253), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(512), primary_key=True)
    statistics: Mapped[bytes] = mapped_column(LargeBinary)
    updated: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=now)


class ApiKeyRow(Table):
    """One that was made and not forgotten: a revoked or expired one stays, so that its owner is told so."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(253), index=True)
    scopes: Mapped[str] = mapped_column(String(128))
    """With commas between."""
    hash: Mapped[bytes] = mapped_column(LargeBinary)
    """SHA-256 of the secret."""
    created: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=now)
    expires: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    revoked: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    used: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When it was last seen, to the hour: writing each use down would cost each request a write."""
