"""Weights of prompts' features as versions of the predictor, beside the statistics that were versions before."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    # An older Motet adds rows without these columns, so they have defaults.
    op.add_column("predictor_versions", sa.Column("role", sa.String(16), nullable=False, server_default=sa.text("''")))
    op.add_column("predictor_versions", sa.Column("size", _number(), nullable=False, server_default="0"))
    op.add_column(
        "predictor_versions", sa.Column("digest", sa.String(64), nullable=False, server_default=sa.text("''"))
    )
    op.add_column(
        "predictor_versions", sa.Column("figures", sa.String(4000), nullable=False, server_default=sa.text("''"))
    )
    op.add_column("predictor_versions", sa.Column("ordered", sa.DateTime(timezone=True), nullable=True))
    op.create_table(
        "predictor_weights",
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version"],
            ["predictor_versions.version"],
            name="fk_predictor_weights_version_predictor_versions",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("version", "part", name="pk_predictor_weights"),
    )


def downgrade() -> None:
    op.drop_table("predictor_weights")
    op.execute("DELETE FROM predictor_versions WHERE size > 0")  # an older Motet does not know what they are
    for column in ("ordered", "figures", "digest", "size", "role"):
        op.drop_column("predictor_versions", column)


def _number() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")
