"""Length samples and what the predictor has learned from them."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "length_samples",
        sa.Column("id", sa.Integer, autoincrement=True, nullable=False),
        sa.Column("request", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(253), nullable=False),
        sa.Column("adapter", sa.String(512), nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("output_tokens", sa.Integer, nullable=False),
        sa.Column("censored", sa.Boolean, nullable=False),
        sa.Column("estimated_q50", sa.Integer, nullable=False),
        sa.Column("estimated_q95", sa.Integer, nullable=False),
        sa.Column("estimate_source", sa.String(128), nullable=False),
        sa.Column("features", sa.LargeBinary, nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_length_samples"),
    )
    op.create_index("ix_length_samples_tenant_adapter", "length_samples", ["tenant", "adapter"])
    op.create_table(
        "predictor_versions",
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("active", sa.Boolean, nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_predictor_versions"),
    )
    op.create_table(
        "predictor_state",
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("level", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(253), nullable=False),
        sa.Column("adapter", sa.String(512), nullable=False),
        sa.Column("statistics", sa.LargeBinary, nullable=False),
        sa.Column("updated", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("version", "level", "tenant", "adapter", name="pk_predictor_state"),
        sa.ForeignKeyConstraint(
            ["version"],
            ["predictor_versions.version"],
            name="fk_predictor_state_version_predictor_versions",
            ondelete="CASCADE",
        ),
    )


def downgrade() -> None:
    op.drop_table("predictor_state")
    op.drop_table("predictor_versions")
    op.drop_table("length_samples")
