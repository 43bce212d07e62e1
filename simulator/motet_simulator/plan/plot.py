"""A plan as a picture: what each number of runners gives, beside what is promised. SVG, without a library."""

from xml.sax.saxutils import escape

from motet_simulator.plan.search import Answered
from motet_simulator.plan.sentence import NAMES
from motet_simulator.plan.slo import Slo, shown

_WIDTH, _HEIGHT, _LEFT, _TOP = 360, 200, 60, 70
_SEEN, _LIMIT, _INK = "#2a6f97", "#c1440e", "#333"


def svg(answered: Answered, slo: Slo, title: str) -> str:
    panels = [_panel(answered, slo, name, place) for place, name in enumerate(slo.limits())]
    width = _LEFT + len(panels) * (_WIDTH + _LEFT)
    height = _TOP + _HEIGHT + 50
    lines = "".join(
        f'<text x="16" y="{22 + 16 * number}" font-size="12" fill="{_INK}">{escape(line)}</text>'
        for number, line in enumerate(_folded(title, width // 7))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>{lines}{"".join(panels)}</svg>\n'
    )


def _panel(answered: Answered, slo: Slo, name: str, place: int) -> str:
    limit = slo.limits()[name]
    seen: dict[int, list[float]] = {}
    for (runners, _), trial in sorted(answered.trials.items()):
        value = slo.seen(trial.outcome)[name]
        if trial.complete and value != float("inf"):
            seen.setdefault(runners, []).append(value)
    left = _LEFT + place * (_WIDTH + _LEFT)
    bottom = _TOP + _HEIGHT
    top = 1.15 * max([limit, *(value for values in seen.values() for value in values)])
    parts = [
        f'<text x="{left}" y="{_TOP - 8}" font-size="12" fill="{_INK}">{NAMES[name]}, p{slo.share * 100:g}</text>',
        f'<path d="M{left} {_TOP}V{bottom}H{left + _WIDTH}" fill="none" stroke="{_INK}"/>',
    ]
    parts += [
        f'<text x="{left - 6}" y="{bottom - share * _HEIGHT + 4:.1f}" font-size="10" text-anchor="end" fill="{_INK}">'
        f"{shown(share * top) if share else 0}</text>"
        for share in (0.0, 0.5, 1.0)
    ]
    step = _WIDTH / (len(seen) + 1)
    for column, (runners, values) in enumerate(seen.items(), 1):
        x = left + column * step
        low, high = (bottom - _HEIGHT * value / top for value in (min(values), max(values)))
        parts.append(
            f'<rect x="{x - 10:.1f}" y="{high:.1f}" width="20" height="{bottom - high:.1f}" fill="{_SEEN}" '
            f'opacity="0.35"/>'
            f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{_SEEN}" stroke-width="3"/>'
            f'<text x="{x:.1f}" y="{bottom + 16}" font-size="11" text-anchor="middle" fill="{_INK}">{runners}</text>'
        )
    y = bottom - _HEIGHT * limit / top
    parts.append(
        f'<path d="M{left} {y:.1f}H{left + _WIDTH}" stroke="{_LIMIT}" stroke-dasharray="5 3"/>'
        f'<text x="{left + _WIDTH}" y="{y - 4:.1f}" font-size="10" text-anchor="end" fill="{_LIMIT}">'
        f"promised: {shown(limit)}</text>"
        f'<text x="{left + _WIDTH / 2:.1f}" y="{bottom + 34}" font-size="11" text-anchor="middle" fill="{_INK}">'
        "runners</text>"
    )
    return "".join(parts)


def _folded(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines[:3]
