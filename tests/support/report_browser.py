"""A headless Chromium that opens reports, and a small report to open: shared by the tests of the page."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from refold.report import (
    ExactnessSummary,
    GraphData,
    GraphNode,
    ModelSummary,
    NodeLink,
    OutputError,
    Ratio,
    RefusalRow,
    Report,
    RewriteCard,
    SiteRow,
    TimingBar,
)

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDS_BROWSER = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver"),
]
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
from selenium.webdriver.common.actions.action_builder import ActionBuilder  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

# ---- reports to look at


def attention(layer: int) -> tuple[list[GraphNode], list[GraphNode]]:
    """One layer before and after query, key and value were merged."""
    home = f"encoder.layer.{layer}"
    source = f"l{layer - 1}_out" if layer else "ids"
    parts = ("query", "key", "value")
    before = [linear(f"l{layer}_{part}", home, part, source) for part in parts]
    after = [linear(f"l{layer}_merged", home, "query_key_value", source)]
    after += [function(f"l{layer}_{part}_slice", home, "operator.getitem", f"l{layer}_merged") for part in parts]
    end_before = function(f"l{layer}_out", home, "torch.attend", *(node.id for node in before))
    end_after = function(f"l{layer}_out", home, "torch.attend", *(node.id for node in after[1:]))
    return [*before, end_before], [*after, end_after]


def linear(name: str, home: str, part: str, source: str) -> GraphNode:
    detail = "Linear(in_features=64, out_features=64, bias=True)"
    return GraphNode(name, "call_module", f"{home}.{part}", home, detail, "float32 [8, 16, 64]", (source,))


def function(name: str, home: str, target: str, *sources: str) -> GraphNode:
    return GraphNode(name, "call_function", target, home, "", "float32 [8, 16, 64]", sources)


def small_report(layers: int = 6) -> Report:
    sides: tuple[list[GraphNode], list[GraphNode]] = ([], [])
    for side, nodes in enumerate(sides):
        nodes.append(GraphNode("ids", "placeholder", "ids", value="int64 [8, 16]"))
        for layer in range(layers):
            nodes.extend(attention(layer)[side])
        nodes.append(GraphNode("output", "output", "output", inputs=(f"l{layers - 1}_out",)))
    groups = [(tuple(f"l{i}_{part}" for part in ("query", "key", "value")), (f"l{i}_merged",)) for i in range(layers)]
    checked = ExactnessSummary("within rounding", "As exact as the original.", True, (OutputError("y", 4e-7, 4.1e-7),))
    merge = RewriteCard(
        "MergeLinears",
        "kept",
        "structural",
        algebra="W' = [Wq; Wk; Wv]",
        sites=tuple(SiteRow(f"layer {i}: query, key and value merged", *group) for i, group in enumerate(groups)),
        refusals=(RefusalRow("l0_out", "it is no linear layer"), RefusalRow("l1_out", "it is no linear layer")),
        verification=checked,
        gain=Ratio(1.2, 1.1, 1.3),
    )
    return Report(
        "A small model",
        ModelSummary("Small", 12_345),
        speedup=Ratio(1.42, 1.38, 1.47),
        exactness=checked,
        steps=(merge, RewriteCard("FuseNothing", "no match")),
        timings=(TimingBar("original", 0.041, 0.040, 0.043, role="original"), TimingBar("refold", 0.029, 0.028, 0.030)),
        graph_before=GraphData(tuple(sides[0])),
        graph_after=GraphData(tuple(sides[1])),
        links=tuple(NodeLink(before, after, (0,)) for before, after in groups),
    )


# ---- the browser


class Browser:
    """A headless Chromium that opens reports and fails on any word in its console."""

    def __init__(self, folder: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=DRIVER)
        self.driver = webdriver.Chrome(options=options, service=service)
        self.folder = folder

    def open(self, report: Report, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        path = report.write_html(self.folder / "report.html")
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        calm = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, calm]})
        self.driver.get(path.as_uri())
        assert self.js("return document.documentElement.dataset.ready") == "true"

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def console(self) -> list[Any]:
        return list(self.driver.get_log("browser"))

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.one(selector).text)

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def names(self, side: str, state: str = "") -> list[str]:
        """The boxes drawn in one graph, perhaps only those in a state like "selected"; full node names."""
        script = """
            const view = Refold.page.views[arguments[0]];
            return view.order.filter((item) => !arguments[1] || view.element(item).classList.contains(arguments[1]))
                .map((item) => item.name)"""
        return list(self.js(script, side, state))

    def click(self, side: str, name: str) -> None:
        """A true mouse click on a box (on the head of an open module)."""
        script = """
            const view = Refold.page.views[arguments[0]];
            const item = view.order.find((one) => one.name === arguments[1]);
            document.getElementById("graph").scrollIntoView();
            view.show([item]);
            const box = view.element(item).getBoundingClientRect();
            return [Math.round(box.left + Math.min(40, box.width / 2)), Math.round(box.top + 12)]"""
        x, y = self.js(script, side, name)
        actions = ActionBuilder(self.driver)
        actions.pointer_action.move_to_location(x, y).click()
        actions.perform()

    def seen(self, side: str, name: str) -> bool:
        """Whether the box is drawn inside the visible part of its canvas."""
        script = """
            const view = Refold.page.views[arguments[0]];
            const item = view.order.find((one) => one.name === arguments[1]);
            if (!item) return false;
            const box = view.element(item).getBoundingClientRect();
            const frame = view.canvas.getBoundingClientRect();
            return box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1
                && box.left >= frame.left - 1 && box.right <= frame.right + 1"""
        return bool(self.js(script, side, name))

    def until_painted(self) -> float:
        """Milliseconds from the start of the navigation until the page has been drawn: asked late, so never too low."""
        frames = "requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())))"
        return float(self.driver.execute_async_script(f"const done = arguments[0]; {frames}"))

    def milliseconds(self, script: str) -> float:
        """How long a script takes, with the layout it causes."""
        start, end = "const start = performance.now()", "document.body.getBoundingClientRect()"
        return float(self.js(f"{start}; {script}; {end}; return performance.now() - start"))


def opened(folder: Path) -> Iterator[Browser]:
    """What a `browser` fixture yields: one browser for all tests of a file."""
    made = Browser(folder)
    yield made
    made.driver.quit()


def wait(condition: Callable[[], Any], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
