"""The page as text: one file, nothing fetched, nothing that data could close or inject."""

import json
import os
import re
from pathlib import Path

import pytest

from refold.report import GraphData, GraphNode, ModelSummary, Report
from refold.report import page as html

EVIL = "</script><script>alert(1)</script><!-- & \u2028\u2029 '\" @@data@@ \\u003c"


def evil_report() -> Report:
    return Report(EVIL, ModelSummary(EVIL), graph_before=GraphData((GraphNode(EVIL, "placeholder", EVIL, EVIL),)))


def embedded(page: str) -> str:
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.S)
    assert found is not None
    return found.group(1)


def test_hostile_names_cannot_leave_the_data() -> None:
    page = evil_report().to_html()
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 2 + len(html.SCRIPTS)  # the data, the theme, the rest
    assert page.count("</script>") == 2 + len(html.SCRIPTS)
    assert not re.search("[<>&\u2028\u2029]", embedded(page))


def test_the_embedded_data_is_the_report() -> None:
    report = evil_report()
    assert Report.from_json(embedded(report.to_html())) == report


def test_a_mark_of_the_template_in_a_name_stays_text() -> None:
    page = Report("@@scripts@@ @@policy@@", ModelSummary("M")).to_html()
    assert "<title>@@scripts@@ @@policy@@</title>" in page


def test_nothing_is_loaded_from_anywhere() -> None:
    page = evil_report().to_html()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:,|#)""", page)
    assert "@import" not in page and "sourceMappingURL" not in page


def test_the_policy_names_every_script_and_allows_nothing_else() -> None:
    page = Report("t", ModelSummary("M")).to_html()
    policy = html.policy([html.asset("theme.js"), *map(html.asset, html.SCRIPTS)], html.asset("page.css"))
    assert f'content="{policy}"'.replace("'", "&#x27;") in page
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert policy.count("sha256-") == 2 + len(html.SCRIPTS)


@pytest.mark.parametrize("name", [name for name in html.SCRIPTS if name != "dagre.min.js"])
def test_the_scripts_never_make_markup_or_code_from_text(name: str) -> None:
    source = html.asset(name)
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "fetch("):
        assert word not in source


def test_the_licence_of_the_bundled_library_is_kept() -> None:
    page = Report("t", ModelSummary("M")).to_html()
    assert "Chris Pettitt" in page and "Permission is hereby granted" in page


def test_write_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "deep" / "report.html"
    assert Report("first", ModelSummary("M")).write_html(target) == target
    first = target.read_text(encoding="utf-8")
    assert "first" in first

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        Report("second", ModelSummary("M")).write_html(target)
    assert target.read_text(encoding="utf-8") == first
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]


def test_without_scripts_the_page_still_says_the_summary() -> None:
    page = Report("t", ModelSummary("Bert")).to_html()
    found = re.search(r"<noscript><pre>(.*?)</pre></noscript>", page, re.S)
    assert found is not None and "not measured" in found.group(1) and "Bert" in found.group(1)


def test_json_in_the_page_is_plain_json() -> None:
    assert json.loads(embedded(evil_report().to_html()))["title"] == EVIL
