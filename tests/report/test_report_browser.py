"""The page in a real browser: it opens silently, and clicks, keys and search do what they say."""

import zlib
from collections.abc import Iterator

import pytest
from report_browser import NEEDS_BROWSER, Browser, opened, small_report, wait
from selenium.webdriver.common.keys import Keys

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    yield from opened(tmp_path_factory.mktemp("report"))


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """The small report in the browser; the console must stay silent until the end of the test."""
    browser.console()
    browser.open(small_report())
    yield browser
    assert browser.console() == []


# ---- what a person sees first


def test_it_opens_with_no_word_in_the_console_and_loads_nothing(page: Browser) -> None:
    assert page.js("return performance.getEntriesByType('resource').length") == 0
    assert page.driver.title == "A small model"
    assert page.console() == []


def test_the_console_check_can_fail(browser: Browser) -> None:
    browser.open(small_report())
    browser.js("console.error('seen')")
    assert any("seen" in entry["message"] for entry in browser.console())


def test_the_first_screen_says_speed_exactness_and_changes(page: Browser) -> None:
    tiles = page.text("#tiles")
    assert "1.42× faster" in tiles and "between 1.38× and 1.47×" in tiles
    assert "within rounding" in tiles and "6 rewrites" in tiles
    assert page.js("return document.getElementById('timings').getBoundingClientRect().bottom < innerHeight")
    assert [bar.text.split()[0] for bar in page.all(".bar-name")] == ["original", "refold"]


def test_bars_are_as_long_as_their_times(page: Browser) -> None:
    first, second = [fill.rect["width"] for fill in page.all(".bar .fill")]
    assert second / first == pytest.approx(0.029 / 0.041, rel=0.02)
    low, high = page.js("const w = document.querySelector('.whisker'); return [w.x1, w.x2].map((x) => x.baseVal.value)")
    assert low < first < high


def test_a_screenshot_shows_something(page: Browser) -> None:
    assert distinct_rows(page.driver.get_screenshot_as_png()) > 200
    page.driver.get("about:blank")
    assert distinct_rows(page.driver.get_screenshot_as_png()) < 5


def distinct_rows(png: bytes) -> int:
    """How many different lines a PNG has, still in its filtered form: a blank page has one or two."""
    data, at = b"", 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IHDR":
            width, channels = int.from_bytes(png[at + 8 : at + 12], "big"), {2: 3, 6: 4}[png[at + 17]]
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    raw, row = zlib.decompress(data), width * channels + 1
    return len({raw[i : i + row] for i in range(0, len(raw), row)})


# ---- the graph


def test_a_click_opens_a_module_in_both_graphs_and_closes_it(page: Browser) -> None:
    assert "l1_merged" not in page.names("after")
    page.click("after", "encoder.layer.1")
    assert {"l1_merged", "l1_out"} <= set(page.names("after"))
    assert {"l1_query", "l1_key", "l1_value"} <= set(page.names("before"))
    assert "l2_merged" not in page.names("after")
    page.click("after", "encoder.layer.1")
    assert "l1_merged" not in page.names("after") and "l1_query" not in page.names("before")


def test_a_merged_layer_leads_to_its_three_origins(page: Browser) -> None:
    page.click("after", "encoder.layer.2")
    page.js("Refold.page.views.before.setOpen(Refold.page.model.before.modules.get('encoder.layer.2'), false)")
    page.js("Refold.page.views.before.draw()")
    assert "l2_key" not in page.names("before")
    page.click("after", "l2_merged")
    origins = ["l2_query", "l2_key", "l2_value"]
    assert page.names("after", "selected") == ["l2_merged"]
    assert sorted(page.names("before", "linked")) == sorted(origins)
    assert all(page.seen("before", name) for name in origins)
    wait(lambda: len(page.all("#connectors path")) == 3)
    details = page.text("#details")
    assert "Came from, in the original graph" in details and "1. MergeLinears" in details
    assert [name for name in origins if name in details] == origins


def test_an_origin_leads_to_the_merged_layer(page: Browser) -> None:
    page.click("before", "encoder.layer.3")
    page.click("before", "l3_key")
    assert page.names("after", "linked") == ["l3_merged"]
    assert page.seen("after", "l3_merged")
    assert "Became, in the rewritten graph" in page.text("#details")
    link = next(button for button in page.all("#details .node-link") if button.text == "l3_merged")
    link.click()
    assert page.names("after", "selected") == ["l3_merged"]
    assert sorted(page.names("before", "linked")) == ["l3_key", "l3_query", "l3_value"]


def test_a_node_that_nothing_made_says_so(page: Browser) -> None:
    page.click("after", "encoder.layer.0")
    page.click("after", "l0_key_slice")
    assert "Nothing: the rewrite made it." in page.text("#details")
    page.click("after", "l0_out")
    assert "Untouched by every rewrite." in page.text("#details")
    assert page.names("before", "linked") == ["l0_out"]


def test_rewritten_nodes_are_marked_and_others_are_not(page: Browser) -> None:
    page.click("after", "encoder.layer.0")
    changed = set(page.names("after", "changed"))
    assert "l0_merged" in changed and "encoder.layer.0" in changed
    assert not changed & {"l0_out", "ids", "output"}


def test_a_card_leads_to_its_place_and_back(page: Browser) -> None:
    page.all("#rewrite-1 .site")[2].click()
    assert page.names("after", "selected") == ["l2_merged"]
    next(button for button in page.all("#details .node-link") if "MergeLinears" in button.text).click()
    wait(lambda: page.js("const r = document.getElementById('rewrite-1').getBoundingClientRect(); return r.top > 0"))


def test_a_card_says_what_was_refused_and_why(page: Browser) -> None:
    card = page.one("#rewrite-1")
    assert "W' = [Wq; Wk; Wv]" in card.text and "1.20× faster" in card.text
    summary = next(one for one in page.all("#rewrite-1 summary") if "Left alone: 2 places" in one.text)
    summary.click()
    wait(lambda: "it is no linear layer" in card.text)
    assert page.text(".unused > summary") == "1 transformation changed nothing"


# ---- search and keys


def test_search_finds_a_node_and_brings_it_into_view(page: Browser) -> None:
    page.press("/")
    page.press("l3_key")
    found = [row.text.split("\n")[0] for row in page.all("#search-results [role=option]")]
    assert found[0] == "l3_key" and "l3_key_slice" in found
    assert all("l3_key" in name for name in found)
    page.press(Keys.ENTER)
    assert page.names("before", "selected") == ["l3_key"]
    assert page.seen("before", "l3_key") and page.seen("after", "l3_merged")
    assert not page.one("#search-results").is_displayed()


def test_search_says_when_nothing_is_found(page: Browser) -> None:
    page.press("/")
    page.press("no such layer")
    assert page.text("#search-results") == "Nothing found."


def test_the_keys_walk_open_choose_and_cross(page: Browser) -> None:
    page.press("2")
    page.press(Keys.ARROW_DOWN)
    assert page.js("return Refold.page.views.after.focusedItem.name") == "encoder.layer"
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.js("return Refold.page.views.after.focusedItem.name") == "l0_merged"
    page.press(Keys.ENTER)
    assert page.names("after", "selected") == ["l0_merged"]
    page.press("g")
    assert page.names("before", "selected") == ["l0_query"]
    page.press("n")
    assert page.names("before", "selected") == ["l0_key"]
    page.press("p", "p")
    assert page.names("before", "selected") == ["l5_value"]
    page.press(Keys.ESCAPE)
    assert page.names("before", "selected") == []
    page.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert "l5_value" not in page.names("before")


def test_the_list_of_keys_opens_and_closes(page: Browser) -> None:
    page.press("?")
    assert page.one("#help").is_displayed() and "search" in page.text("#keys")
    page.press(Keys.ESCAPE)
    assert not page.one("#help").is_displayed()


def test_zoom_and_open_and_close_all(page: Browser) -> None:
    width = page.one("#pane-after .drawing").rect["width"]
    page.press("+")
    assert page.one("#pane-after .drawing").rect["width"] > width
    page.press("e")
    assert {"l0_merged", "l5_merged"} <= set(page.names("after"))
    page.press("c")
    assert page.names("after") == ["ids", "encoder.layer", "output"]
