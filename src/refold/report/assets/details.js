// The side panel: what a node is, where it came from, which rewrite touched it, and what it is connected to.
"use strict";

(() => {
  const { el, byId, count } = Refold;
  const FIRST = 12;

  function section(title, ...content) {
    return el("section", {}, el("h4", {}, title), content);
  }

  function itemButton(page, item, text) {
    const side = page.model.graphOf(item).side;
    const hue = item.steps.size ? `hue-${[...item.steps][0] % 8} changed` : "";
    return el("li", {}, el("button", { type: "button", class: `node-link ${hue}`, onclick: () => page.choose(item, { side, scroll: true }) }, text || item.name));
  }

  function itemList(page, items) {
    const list = el("ul", { class: "links" }, items.slice(0, FIRST).map((item) => itemButton(page, item)));
    if (items.length <= FIRST) return list;
    const more = el("button", { type: "button", class: "more" }, `and ${items.length - FIRST} more`);
    more.addEventListener("click", () => {
      list.append(...items.slice(FIRST, 1000).map((item) => itemButton(page, item)));
      more.remove();
    });
    return [list, more];
  }

  function facts(pairs) {
    return el("dl", { class: "facts" }, pairs.filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { class: "code" }, value))));
  }

  function stepButton(page, number) {
    return el("li", {}, el("button", { type: "button", class: `node-link changed hue-${number % 8}`, onclick: () => page.showCard(number) }, `${number + 1}. ${page.model.steps[number].name}`));
  }

  function provenance(page, item) {
    const partners = page.model.partnersOf(item).sort((a, b) => a.order - b.order);
    const isBefore = page.model.graphOf(item).side === "before";
    const title = isBefore ? "Became, in the rewritten graph" : "Came from, in the original graph";
    const none = isBefore ? "Nothing: the rewrite removed it." : "Nothing: the rewrite made it.";
    const steps = [...item.steps].sort((a, b) => a - b);
    return [
      section(title, partners.length ? itemList(page, partners) : el("p", { class: "quiet" }, none),
        partners.length && !steps.length ? el("p", { class: "quiet" }, "Untouched by every rewrite.") : null),
      steps.length ? section(steps.length === 1 ? "Rewritten by" : "Rewritten by, in order", el("ul", { class: "links" }, steps.map((step) => stepButton(page, step)))) : null,
    ];
  }

  function nodeDetails(page, node) {
    const connection = (title, items) => (items.length ? section(`${title} (${items.length})`, itemList(page, items)) : null);
    return [
      facts([["op", node.op], ["target", node.target], ["module", node.detail], ["inside", node.module], ["value", node.value]]),
      provenance(page, node), connection("Reads", node.sources), connection("Read by", node.users),
    ];
  }

  function groupDetails(page, group) {
    const steps = [...group.steps].sort((a, b) => a - b);
    return [
      facts([["path", group.name], ["holds", count(group.size, "node")], ["changed", group.changed ? count(group.changed, "node") : "none"]]),
      steps.length ? section("Rewrites inside", el("ul", { class: "links" }, steps.map((step) => stepButton(page, step)))) : null,
    ];
  }

  function showDetails(page, item) {
    const panel = byId("details");
    panel.classList.toggle("empty", !item);
    if (!item) {
      panel.replaceChildren(el("p", { class: "quiet hint" }, "Click a module to open it, and a node to see what it is, where it came from and which rewrite touched it. Coloured nodes were rewritten."));
      return;
    }
    const side = page.model.graphOf(item).side;
    panel.replaceChildren(
      el("header", {}, Refold.chip(side === "before" ? "original" : "rewritten"), el("button", { type: "button", class: "close", "aria-label": "close details", onclick: () => page.clear() }, "×"), el("h3", { class: "code" }, item.isGroup ? item.label || item.name : item.name)),
      ...[item.isGroup ? groupDetails(page, item) : nodeDetails(page, item)].flat(Infinity).filter(Boolean));
  }

  Refold.showDetails = showDetails;
})();
