"""API keys that are bound to the uid of a namespace. Those that exist stay bound to its name only."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("keys", sa.Column("tenant_uid", sa.String(64), nullable=True))


def downgrade() -> None:
    op.drop_column("keys", "tenant_uid")
