"""The page in a real browser at its limits: hostile names, thousands of nodes, a phone, the dark."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from report_browser import NEEDS_BROWSER, Browser, function, linear, opened, small_report

from refold.report import (
    ExactnessSummary,
    GraphData,
    GraphNode,
    ModelSummary,
    NodeLink,
    OutputError,
    RefusalRow,
    Report,
    RewriteCard,
    SiteRow,
    TimingBar,
)

pytestmark = NEEDS_BROWSER


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    yield from opened(tmp_path_factory.mktemp("report"))


HOSTILE = (
    "<script>window.pwned=1</script>",
    "</script><script>window.pwned=2</script>",
    "<img src=x onerror='window.pwned=3'>",
    "javascript:window.pwned=4",
    "__proto__",
    "constructor",
    "\u2028]]><!--",
)


# ---- colours and small screens


def background(page: Browser) -> str:
    return str(page.js("return getComputedStyle(document.body).backgroundColor"))


def test_dark_mode_follows_the_system_and_the_button(browser: Browser) -> None:
    browser.open(small_report(), dark=False)
    light = background(browser)
    browser.open(small_report(), dark=True)
    dark = background(browser)
    assert light != dark
    browser.press("t")
    assert background(browser) == light
    browser.press("t")
    assert background(browser) == dark
    browser.press("t")


def test_a_phone_shows_one_graph_at_a_time_and_nothing_sticks_out(browser: Browser) -> None:
    browser.open(small_report(), width=390, height=844)
    assert browser.js("return document.scrollingElement.scrollWidth <= innerWidth")
    assert not browser.one("#pane-before").is_displayed()
    browser.js("Refold.page.showNamed('l1_merged')")
    assert browser.seen("after", "l1_merged")
    link = next(button for button in browser.all("#details .node-link") if button.text == "l1_key")
    link.click()
    assert browser.one("#pane-before").is_displayed() and not browser.one("#pane-after").is_displayed()
    assert browser.names("before", "selected") == ["l1_key"]
    assert browser.seen("before", "l1_key")
    assert browser.js("return document.scrollingElement.scrollWidth <= innerWidth")
    assert browser.console() == []


# ---- names are data


def hostile_report() -> Report:
    names = [f"{name}_{i}" if i < 4 else name for i, name in enumerate(HOSTILE)]
    nodes = tuple(
        GraphNode(name, "call_function", name, name, name, name, tuple(names[:i])) for i, name in enumerate(names)
    )
    text = HOSTILE[0]
    check = ExactnessSummary(text, text, False, (OutputError(text, float("nan"), note=text),))
    card = RewriteCard(
        text, "kept", text, text, text, (SiteRow(text, (names[0],), (names[1],)),), (RefusalRow(text, text),), check
    )
    return Report(
        text,
        ModelSummary(text),
        exactness=check,
        steps=(card,),
        timings=(TimingBar(text, 1, 1, 1, text),),
        graph_before=GraphData(nodes),
        graph_after=GraphData(nodes),
        links=(NodeLink((names[0],), (names[4],), (0,)),),
        notes=(text,),
    )


def test_names_that_are_markup_or_code_are_shown_as_text(browser: Browser) -> None:
    browser.console()
    browser.open(hostile_report())
    browser.js("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    browser.press("e")
    for node in hostile_report().graph_after.nodes:
        browser.js("Refold.page.showNamed(arguments[0])", node.id)
        assert browser.names("after", "selected") == [node.id]
        assert browser.text("#details h3") == node.id.strip("\u2028")
    browser.press("/")
    browser.press("script")
    assert browser.all("#search-results [role=option]")
    assert browser.js("return typeof window.pwned") == "undefined"
    assert browser.text("h1") == HOSTILE[0]
    assert browser.all("main img, main script") == []
    assert browser.js("return ({}).polluted === undefined && Object.keys(Object.prototype).length === 0")
    assert browser.console() == []


def test_the_policy_stops_a_script_that_got_in(browser: Browser) -> None:
    browser.open(small_report())
    blocked = """
        const done = arguments[0];
        document.addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
        const script = document.createElement("script");
        try { script.textContent = "window.pwned = 5"; document.body.append(script); } catch { done("trusted types"); }
        setTimeout(() => done("nothing"), 2000)"""
    assert browser.driver.execute_async_script(blocked) != "nothing"
    assert browser.js("return typeof window.pwned") == "undefined"
    browser.console()


# ---- crowded levels


def crowded_report() -> Report:
    """Seven unused inputs, twenty operations between two modules, and a size that everything reads."""
    nodes = [GraphNode("x", "placeholder", "x")]
    nodes += [GraphNode(f"unused_{i}", "placeholder", f"unused_{i}") for i in range(7)]
    nodes += [function("size", "", "aten.sym_size.int", "x"), function("first", "one", "torch.add", "x", "size")]
    nodes += [function("first_too", "one", "torch.add", "first")]
    nodes += [function(f"mask_{i}", "", "torch.mul", f"mask_{i - 1}" if i else "x", "size") for i in range(20)]
    nodes += [function("second", "two", "torch.add", "first_too", "mask_19", "size")]
    nodes += [function("second_too", "two", "torch.add", "second")]
    nodes += [GraphNode("output", "output", "output", inputs=("second_too",))]
    graph = GraphData(tuple(nodes))
    return Report("crowded", ModelSummary("Crowded"), graph_before=graph, graph_after=graph)


def test_loose_operations_and_unused_inputs_are_folded(browser: Browser) -> None:
    browser.console()
    browser.open(crowded_report())
    labels = [text.text for text in browser.all("#pane-after .item > .name")]
    assert sorted(labels) == sorted(["x", "unused inputs", "sym_size", "one", "mul … mul", "two", "output"])
    assert len(browser.all("#pane-after .edge")) == 6  # none of the size but the one it reads
    browser.js("Refold.page.showNamed('mask_7')")
    assert browser.names("after", "selected") == ["mask_7"] and browser.seen("before", "mask_7")
    assert "size" in [button.text for button in browser.all("#details .node-link")]
    assert browser.console() == []


def test_a_graph_that_the_layout_gives_up_on_is_still_shown(browser: Browser) -> None:
    browser.open(small_report())
    browser.js("Refold.place = () => { throw new Error('no layout'); }; Refold.page.showNamed('l2_merged')")
    assert browser.names("after", "selected") == ["l2_merged"]
    assert browser.seen("after", "l2_merged") and browser.seen("before", "l2_key")
    assert browser.console() == []


def test_a_place_is_shown_at_the_node_that_the_rewrite_made(browser: Browser) -> None:
    """A rewrite often keeps an old name for a slice of the new node; the new node is the one to look at."""
    before = (GraphNode("x", "placeholder", "x"), linear("key", "", "key", "x"))
    after = (before[0], linear("merged", "", "merged", "x"), function("key", "", "operator.getitem", "merged"))
    card = RewriteCard("Merge", "kept", sites=(SiteRow("key merged", ("key",), ("key", "merged")),))
    links = (NodeLink(("key",), ("key", "merged"), (0,)),)
    graphs = {"graph_before": GraphData(before), "graph_after": GraphData(after)}
    browser.open(Report("t", ModelSummary("M"), steps=(card,), links=links, **graphs))
    browser.one("#rewrite-1 .site").click()
    assert browser.names("after", "selected") == ["merged"]
    assert browser.names("before", "linked") == ["key"]


# ---- large graphs


def large_report(count: int, flat: bool) -> Report:
    """A graph of `count` nodes in layers of 50, or with no modules at all."""
    dice = random.Random(0)
    nodes = [GraphNode("n0", "placeholder", "x")]
    for i in range(1, count - 1):
        home = "" if flat else f"encoder.layer.{i // 50}.{'attention' if i % 50 < 25 else 'output'}"
        sources = {f"n{i - 1}", f"n{dice.randrange(max(0, i - 6), i)}"}
        nodes.append(function(f"n{i}", home, "torch.add", *sorted(sources)))
    nodes.append(GraphNode("output", "output", "output", inputs=(f"n{count - 2}",)))
    graph = GraphData(tuple(nodes))
    links = tuple(NodeLink((f"n{i}", f"n{i + 1}"), (f"n{i}",), (0,)) for i in range(3, count - 3, 50))
    sites = tuple(SiteRow(f"at {link.after[0]}", link.before, link.after) for link in links)
    steps = (RewriteCard("Merge", "kept", sites=sites),)
    return Report("large", ModelSummary("Large"), steps=steps, graph_before=graph, graph_after=graph, links=links)


@pytest.mark.parametrize(("count", "flat"), [(3_000, False), (3_000, True), (20_000, False), (20_000, True)])
def test_large_graphs_open_and_stay_usable(browser: Browser, record_property: Any, count: int, flat: bool) -> None:
    """The target is 2 s at 3,000 nodes, and 0.4 to 0.8 s is usual; the limits leave room for a machine that is busy."""
    browser.open(large_report(count, flat))
    opened = browser.until_painted()
    middle = f"n{count // 2}"
    times = {
        "open": opened,
        "reveal": browser.milliseconds(f"Refold.page.showNamed('{middle}')"),
        "search": browser.milliseconds(
            "const box = document.getElementById('search'); box.value = 'n99'; box.dispatchEvent(new Event('input'))"
        ),
        "open changes": browser.milliseconds("Refold.page.openChanges()"),
        "close all": browser.milliseconds("Refold.page.collapseAll()"),
    }
    for name, value in times.items():
        record_property(f"{name} ms", round(value))
    assert times["open"] < (4_000 if count == 3_000 else 8_000), times
    assert max(value for name, value in times.items() if name != "open") < 5_000, times
    browser.js("Refold.page.showNamed(arguments[0])", middle)
    assert browser.names("after", "selected") == [middle]
    assert browser.seen("after", middle)
    assert len(browser.names("after")) < 2_000
    assert browser.js("return Refold.page.model.after.nodes.size") == count
    assert browser.console() == []
