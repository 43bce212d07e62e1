"""64-bit numbers: messages count tokens in unsigned 32 bits, and ids of samples grow for the life of a database."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

COLUMNS = ("id", "prompt_tokens", "output_tokens", "estimated_q50", "estimated_q95")


def upgrade() -> None:
    _become("bigint", sa.Integer(), sa.BigInteger())


def downgrade() -> None:
    _become("integer", sa.BigInteger(), sa.Integer())


def _become(sequence: str, before: sa.Integer, after: sa.Integer) -> None:
    if op.get_bind().dialect.name == "sqlite":
        return  # its integers always have 64 bits
    for column in COLUMNS:
        op.alter_column("length_samples", column, existing_type=before, type_=after, existing_nullable=False)
    # An autoincrement column has a sequence. The sequence keeps its first type, so it must be changed as well.
    op.execute(f"ALTER SEQUENCE length_samples_id_seq AS {sequence}")
