"""The report as one offline HTML page: template, style, scripts and data in a single file.

The page trusts nothing it shows. Data travels as JSON that cannot close its own script element, the page's code writes
it as text only, and a Content-Security-Policy that names each script by its hash forbids everything else.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from importlib.resources import files

from refold.report.data import ReportData
from refold.report.text import summary
from refold.report.timing_plot import timing_plot

SCRIPTS = (
    "dagre.min.js",
    "page.js",
    "model.js",
    "layout.js",
    "view.js",
    "summary.js",
    "rewrites.js",
    "details.js",
    "search.js",
    "keyboard.js",
    "main.js",
)
DANGEROUS = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def page(report: ReportData) -> str:
    scripts = [asset(name) for name in SCRIPTS]
    theme = asset("theme.js")
    style = asset("page.css")
    parts = {
        "policy": escape(policy([theme, *scripts], style)),
        "title": escape(report.title),
        "style": f"<style>{style}</style>",
        "theme": f"<script>{theme}</script>",
        "summary": escape(summary(report)),
        "plot": timing_plot(report.timings),
        "licence": escape(asset("dagre.LICENSE.txt")),
        "data": embedded_json(report.to_json()),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return fill(asset("page.html"), parts)


def fill(template: str, parts: dict[str, str]) -> str:
    """Put each part at its mark. The template is cut once, so a mark inside of a part stays text."""
    pieces = template.split("@@")
    return "".join(piece if i % 2 == 0 else parts[piece] for i, piece in enumerate(pieces))


def embedded_json(text: str) -> str:
    """JSON that may stand inside a script element: the signs that HTML reads are written as escapes."""
    return text.translate(DANGEROUS)


def policy(scripts: list[str], style: str) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(map(digest, scripts)),
            f"style-src {digest(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def digest(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


@cache
def asset(name: str) -> str:
    text = (files("refold.report") / "assets" / name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")  # browsers hash the text with plain line ends
