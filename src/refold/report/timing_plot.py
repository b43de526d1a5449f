"""The timings as one plain SVG: a bar for each candidate's median, and a line over it for the spread."""

from __future__ import annotations

from html import escape

from refold.report.data import TimingBar
from refold.report.text import duration

_ROW, _BAR = 24, 12
_NAMES, _BARS, _VALUES = 200, 320, 180
_COLOURS = {"original": "#8a8f98", "refold": "#3b6fd4", "other": "#c3c8d0"}
_LONGEST_NAME = 28


def timing_plot(timings: tuple[TimingBar, ...]) -> str:
    """A drawing that needs no style, no script and no network; nothing where nothing was timed."""
    if not timings:
        return ""
    longest = max(bar.high for bar in timings) or 1.0
    rows = "".join(_row(bar, i * _ROW, _BARS / longest) for i, bar in enumerate(timings))
    width, height = _NAMES + _BARS + _VALUES, _ROW * len(timings)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="timings" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="currentColor">{rows}</svg>'
    )


def _row(bar: TimingBar, top: int, scale: float) -> str:
    middle = top + _ROW / 2
    median, low, high = (_NAMES + seconds * scale for seconds in (bar.median, bar.low, bar.high))
    name = bar.name if len(bar.name) <= _LONGEST_NAME else bar.name[: _LONGEST_NAME - 1] + "…"
    return (
        f'<text x="{_NAMES - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>'
        f'<rect x="{_NAMES}" y="{middle - _BAR / 2}" width="{median - _NAMES:.1f}" height="{_BAR}" '
        f'fill="{_COLOURS[bar.role]}"></rect>'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="currentColor"></line>'
        f'<text x="{max(median, high) + 8:.1f}" y="{middle + 4}">{duration(bar.median)}</text>'
    )
