// Every key of the page, and the card that lists them.
"use strict";

(() => {
  const { el, byId } = Refold;

  const LIST = [
    ["/", "search"],
    ["?", "this list"],
    ["↑ ↓", "previous, next box"],
    ["→", "open a module, or go inside"],
    ["←", "close a module, or go outside"],
    ["Enter", "choose a node, open or close a module"],
    ["g", "go to the same place in the other graph"],
    ["n  p", "next, previous rewritten node"],
    ["1  2", "original graph, rewritten graph"],
    ["e  c", "open all that was rewritten, close all"],
    ["+  −  0", "zoom in, out, fit"],
    ["t", "light, dark or automatic colours"],
    ["Esc", "clear the choice, close"],
  ];

  function treeKeys(page) {
    const view = () => page.views[page.side];
    const at = () => view().focusedItem || view().marks.selected || view().order[0];
    const go = (item) => item && page.point(item);
    const along = (by) => () => go(view().order[view().order.indexOf(at()) + by]);
    return {
      ArrowDown: along(1),
      ArrowUp: along(-1),
      ArrowRight: () => {
        const item = at();
        if (item?.isGroup && !item.expanded) page.toggle(item);
        else if (item?.isGroup) go(view().order[view().order.indexOf(item) + 1]);
      },
      ArrowLeft: () => {
        const item = at();
        if (item?.isGroup && item.expanded) page.toggle(item);
        else if (item?.parent?.parent) go(item.parent);
      },
      Enter: () => at() && page.press(at()),
      " ": () => at() && page.press(at()),
    };
  }

  function pageKeys(page) {
    return {
      "/": () => byId("search").focus(),
      "?": () => page.help(),
      g: () => page.crossOver(),
      n: () => page.nextChange(1),
      p: () => page.nextChange(-1),
      1: () => page.show("before"),
      2: () => page.show("after"),
      e: () => page.openChanges(),
      c: () => page.collapseAll(),
      "+": () => page.zoom(1.2),
      "=": () => page.zoom(1.2),
      "-": () => page.zoom(1 / 1.2),
      0: () => page.fit(),
      t: () => page.nextTheme(),
      Escape: () => page.clear(),
    };
  }

  function listen(page) {
    const [tree, everywhere] = [treeKeys(page), pageKeys(page)];
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, dialog")) return;
      const inGraph = event.target.closest(".canvas");
      const action = (inGraph && tree[event.key]) || everywhere[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    });
  }

  function fillHelp() {
    byId("keys").append(...LIST.map(([key, meaning]) => el("div", {}, el("dt", {}, key.split(/ +/).map((one) => el("kbd", {}, one))), el("dd", {}, meaning))));
  }

  Refold.listenToKeys = listen;
  Refold.fillHelp = fillHelp;
})();
