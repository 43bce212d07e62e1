"""Bars of ratios as SVG. A mark on a bar is its target."""

from collections.abc import Mapping
from html import escape
from itertools import count

from tools.performance.results import Measured
from tools.performance.tables import Table

LABELS, BARS, ROW, BAR = 330, 380, 46, 16
"""Widths of the two parts, and heights of a row and of a bar, in pixels"""

COLOURS = ("#3b6ea5", "#9bbfe0")
MARK = "#c0392b"


def plot_of(title: str, table: Table, measured: Mapping[str, Measured]) -> str:
    """A bar for each result that is there; a dashed line at 1, where both are as fast."""
    rows = {
        what: [(column, measured[name]) for column, name in zip(table.columns, names, strict=True) if name in measured]
        for what, names in table.rows.items()
    }
    rows = {what: found for what, found in rows.items() if found}
    longest = max((max(one.value, one.bound or 0) for found in rows.values() for _, one in found), default=1.0)
    scale = BARS / max(longest, 1.0)
    height = 70 + ROW * len(rows)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABELS + BARS + 90}" height="{height}" '
            'font-family="sans-serif" font-size="13">'
        ),
        f'<rect width="100%" height="100%" fill="#ffffff"/><text x="12" y="24" font-size="15">{escape(title)}</text>',
    ]
    for x, column, colour in zip(count(12, 110), table.columns, COLOURS, strict=False):
        parts.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="49">{escape(column)}</text>')
    parts.append(f'<rect x="242" y="36" width="2" height="16" fill="{MARK}"/><text x="250" y="49">target</text>')
    for y, (what, found) in zip(count(62, ROW), rows.items(), strict=False):
        parts.append(f'<text x="12" y="{y + 22}">{escape(what)}</text>')
        for top, (column, one) in zip(count(y, BAR + 2), found, strict=False):
            width = max(1.0, one.value * scale)
            colour = COLOURS[table.columns.index(column)]
            parts.append(f'<rect x="{LABELS}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(f'<text x="{LABELS + width + 6:.1f}" y="{top + 13}">{one.value:.3g}</text>')
            if one.bound is not None:
                at = LABELS + one.bound * scale
                parts.append(f'<rect x="{at:.1f}" y="{top - 1}" width="2" height="{BAR + 2}" fill="{MARK}"/>')
    at = LABELS + scale
    parts.append(f'<path d="M{at:.1f} 58V{height - 6}" stroke="#555555" stroke-dasharray="3 3"/>')
    return "\n".join([*parts, "</svg>", ""])
