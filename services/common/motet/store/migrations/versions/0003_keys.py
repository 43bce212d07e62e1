"""API keys: the hashes of their secrets, their tenants and scopes."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(253), nullable=False),
        sa.Column("scopes", sa.String(128), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked", sa.DateTime(timezone=True), nullable=True),
        sa.Column("used", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
    )
    op.create_index("ix_keys_tenant", "keys", ["tenant"])


def downgrade() -> None:
    op.drop_index("ix_keys_tenant", "keys")
    op.drop_table("keys")
