"""API keys with limits of their own. Those that exist have none."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("keys", sa.Column("limits", sa.String(256), nullable=True))


def downgrade() -> None:
    op.drop_column("keys", "limits")
