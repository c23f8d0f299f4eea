"""Panels of curves as one SVG: a few milliseconds without a plotting library, so that a run can draw itself as it goes.

(matplotlib takes 0.4 s to load and 0.35 s for the same picture, where a run on a frozen backbone takes 5 s.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")  # Okabe and Ito, 2008
WIDTH, HEIGHT = 440, 270  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 46, 40  # its margins
MAX_POINTS = 400  # of a curve: more cannot be seen


@dataclass(frozen=True)
class Series:
    """Points (x, y), joined unless `dots`; points that are no finite number are left out."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False


@dataclass(frozen=True)
class Panel:
    """Series over one pair of axes.

    whole_x: x are whole numbers. x_names: what stands for 0, 1, ... on the x axis. mark: a point (x, y) to ring, with
    what to write beside it.
    """

    title: str
    series: Sequence[Series]
    x_label: str = "epoch"
    log_x: bool = False
    whole_x: bool = False
    x_names: Sequence[str] = ()
    from_zero: bool = False
    mark: tuple[float, float, str] | None = None


def draw(panels: Sequence[Panel], *, columns: int = 2) -> str:
    """An SVG document with the panels in rows."""
    rows = math.ceil(len(panels) / columns)
    columns = min(columns, len(panels))
    width, height = columns * WIDTH, rows * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for i, panel in enumerate(panels):
        parts.append(f'<g transform="translate({i % columns * WIDTH} {i // columns * HEIGHT})">')
        parts += _panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def ticks(low: float, high: float, n: int = 5) -> list[float]:
    """About `n` round numbers from `low` to `high`, at least one step apart."""
    if not low < high:
        return [low]
    raw = (high - low) / n
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def _panel(panel: Panel) -> list[str]:
    series = [(one, _finite(one, panel.log_x)) for one in panel.series]
    points = [point for _, found in series for point in found]
    parts = [f'<text x="{LEFT}" y="18" font-size="13" font-weight="bold">{escape(panel.title)}</text>']
    if not points:
        return [*parts, f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">nothing to show</text>']
    x_low, x_high = _span([x for x, _ in points], margin=0.05 if all(one.dots for one in panel.series) else 0.0)
    y_low, y_high = _span([y for _, y in points], margin=0.05)
    y_low = min(0.0, y_low) if panel.from_zero else y_low

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (x - x_low) / (x_high - x_low), (y - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    for value in ticks(y_low, y_high):
        _, y = at(x_low, value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>')
    for value in _x_ticks(x_low, x_high, panel):
        x, _ = at(value, y_low)
        shown = panel.x_names[int(value)] if panel.x_names else f"{10**value if panel.log_x else value:.6g}"
        parts.append(f'<path d="M{x:.1f} {HEIGHT - BOTTOM}v4" stroke="#999"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(shown)}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#999"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(panel.x_label)}</text>')

    legend = LEFT
    for i, (one, found) in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        places = [at(x, y) for x, y in found]
        if one.dots or len(places) == 1:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" opacity="0.7"/>' for x, y in places]
        elif places:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if len(series) > 1:
            parts.append(f'<path d="M{legend} 32h14" stroke="{colour}" stroke-width="3"/>')
            parts.append(f'<text x="{legend + 18}" y="36">{escape(one.name)}</text>')
            legend += 30 + 6 * len(one.name)
    if panel.mark is not None:
        value, height, text = panel.mark
        x, y = at(math.log10(value) if panel.log_x else value, height)
        right = x > middle
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="#333" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{x - 9 if right else x + 9:.1f}" y="{y + 17:.1f}" text-anchor="{"end" if right else "start"}">'
            f"{escape(text)}</text>"
        )
    return parts


def _finite(series: Series, log_x: bool) -> list[tuple[float, float]]:
    pairs = [(math.log10(x) if log_x else float(x), float(y)) for x, y in zip(series.x, series.y, strict=True)]
    kept = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    if series.dots or len(kept) <= MAX_POINTS:
        return kept
    return [*kept[: -1 : math.ceil(len(kept) / MAX_POINTS)], kept[-1]]


def _span(values: Sequence[float], margin: float = 0.0) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * margin or (0.0 if high > low else abs(low) * 0.1 or 1.0)
    return low - room, high + room


def _x_ticks(low: float, high: float, panel: Panel) -> list[float]:
    if panel.x_names:
        return [float(i) for i in range(len(panel.x_names)) if low <= i <= high]
    if not panel.log_x:
        found = ticks(low, high)
        if not panel.whole_x:
            return found
        whole = [x for x in found if x == int(x)]
        return whole if low != int(low) or (whole and whole[0] == low) else [low, *whole]
    powers = [float(p) for p in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
    return powers if len(powers) > 1 else [low, (low + high) / 2, high]
