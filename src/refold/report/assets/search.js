// The search box: finds nodes and modules of both graphs by name, target, path, class or shape.
"use strict";

(() => {
  const { el, byId } = Refold;
  const MOST = 40;

  /** Everything that can be found, with the text to look in; made on the first search only. */
  function buildIndex(model) {
    const rows = [];
    for (const side of ["after", "before"]) {
      const graph = model.graph(side);
      for (const group of graph.modules.values()) if (group.name) rows.push({ side, item: group, text: group.name.toLowerCase() });
      for (const node of graph.nodes.values()) {
        rows.push({ side, item: node, text: `${node.name} ${node.target} ${node.module} ${node.detail} ${node.value}`.toLowerCase() });
      }
    }
    return rows;
  }

  function rank(row, words) {
    const name = row.item.name.toLowerCase();
    if (name === words[0]) return 0;
    if (name.startsWith(words[0])) return 1;
    return name.includes(words[0]) ? 2 : 3;
  }

  function find(index, query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return { rows: [], total: 0 };
    const rows = index.filter((row) => words.every((word) => row.text.includes(word)));
    const ranked = rows.map((row, i) => [rank(row, words), i, row]).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    return { rows: ranked.slice(0, MOST).map((entry) => entry[2]), total: rows.length };
  }

  class Search {
    constructor(page) {
      this.page = page;
      this.input = byId("search");
      this.list = byId("search-results");
      this.at = -1;
      this.rows = [];
      this.input.addEventListener("input", () => this.update());
      this.input.addEventListener("focus", () => this.update());
      this.input.addEventListener("keydown", (event) => this.pressed(event));
      document.addEventListener("pointerdown", (event) => event.target.closest("#search-box") || this.close());
    }

    update() {
      this.index = this.index || buildIndex(this.page.model);
      const { rows, total } = find(this.index, this.input.value);
      this.rows = rows;
      this.list.replaceChildren(...rows.map((row, i) => this.option(row, i)));
      if (total > rows.length) this.list.append(el("li", { class: "quiet rest", role: "presentation" }, `${Refold.whole.format(total - rows.length)} more: type more letters`));
      if (this.input.value.trim() && !total) this.list.append(el("li", { class: "quiet rest", role: "presentation" }, "Nothing found."));
      this.list.hidden = !this.list.childElementCount;
      this.input.setAttribute("aria-expanded", String(!this.list.hidden));
      this.move(rows.length ? 0 : -1);
    }

    option(row, i) {
      const changed = row.item.steps.size ? `changed hue-${[...row.item.steps][0] % 8}` : "";
      const kind = row.item.isGroup ? "module" : row.item.detail.split("(")[0] || row.item.op;
      return el("li", { id: `found-${i}`, role: "option", class: changed, onclick: () => this.open(i) },
        el("span", { class: "code" }, row.item.name), el("span", { class: "quiet" }, `${kind} · ${row.side === "before" ? "original" : "rewritten"}`));
    }

    move(to) {
      this.at = to;
      [...this.list.children].forEach((option, i) => option.setAttribute("aria-selected", String(i === to)));
      this.input.setAttribute("aria-activedescendant", to < 0 ? "" : `found-${to}`);
      this.list.children[to]?.scrollIntoView({ block: "nearest" });
    }

    open(i) {
      const row = this.rows[i];
      if (!row) return;
      this.close();
      this.page.choose(row.item, { side: row.side, scroll: true, focus: true });
    }

    close() {
      this.list.hidden = true;
      this.input.setAttribute("aria-expanded", "false");
    }

    pressed(event) {
      const last = this.rows.length - 1;
      const steps = { ArrowDown: Math.min(last, this.at + 1), ArrowUp: Math.max(0, this.at - 1) };
      if (event.key in steps) this.move(steps[event.key]);
      else if (event.key === "Enter") this.open(this.at);
      else if (event.key === "Escape") {
        this.close();
        this.input.blur();
      } else return;
      event.preventDefault();
      event.stopPropagation();
    }
  }

  Refold.Search = Search;
})();
