"""Samples with all quantiles, what was promised, how often the request was parked, and how the answer ended."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

NUMBERS = ("estimated_q80", "estimated_q90", "promised_tokens", "parks")


def upgrade() -> None:
    # An older Motet adds rows without these columns, so they have defaults.
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    for column in NUMBERS:
        op.add_column("length_samples", sa.Column(column, number, nullable=False, server_default="0"))
    op.add_column("length_samples", sa.Column("finish", sa.String(16), nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    for column in ("finish", *NUMBERS):
        op.drop_column("length_samples", column)
