"""What clients can make a gateway hold, against what its container may use."""

import yaml

from motet_gateway.assets import TEMPLATES
from motet_gateway.http.connection_limit import MAX_WAITING_BYTES
from motet_gateway.settings import Settings
from motet_gateway.tokens.encoder import LANES
from motet_gateway.tokens.render_parent import FORK_BYTES
from motet_gateway.tokens.text_model import MAX_UNCUT_BYTES
from tests.charts.helm import MOTET


def test_all_that_a_gateway_may_hold_fits_into_the_charts_limit() -> None:
    settings = Settings.model_construct(**{name: field.default for name, field in Settings.model_fields.items()})
    resting, renderer, per_byte = 150_000_000, 25_000_000, 215  # measured; see docs/guides/platform.md
    lanes = [(min(most, MAX_UNCUT_BYTES), threads) for most, threads in LANES]
    tokenising = sum(most * per_byte * threads for most, threads in lanes)
    rendering = renderer + settings.template_processes * (FORK_BYTES + settings.template_memory_bytes)
    rendering += settings.template_idle_bytes + TEMPLATES.bounds.kept_bytes
    held = resting + settings.max_bodies_bytes + MAX_WAITING_BYTES + tokenising + rendering
    values = yaml.safe_load((MOTET / "values.yaml").read_text())
    assert values["gateway"]["resources"]["limits"]["memory"] == "1152Mi"
    assert held <= 1152 << 20
