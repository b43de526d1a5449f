// The page itself: keeps one choice for both graphs and passes it to everything that shows it.
"use strict";

(() => {
  const { data, byId, svg } = Refold;
  const MOST_REVEALED = 24;
  const MOST_CONNECTORS = 12;

  class Page {
    constructor() {
      this.model = new Refold.Model(data);
      this.side = "after";
      this.chosen = null;
      const events = { choose: (item) => this.choose(item), toggle: (group) => this.toggle(group) };
      this.views = {};
      for (const side of ["before", "after"]) {
        this.views[side] = new Refold.GraphView(this.model.graph(side), byId(`pane-${side}`), events);
        this.views[side].canvas.addEventListener("scroll", () => this.drawConnectors(), { passive: true });
        this.views[side].canvas.addEventListener("pointerdown", () => this.setSide(side));
        this.views[side].canvas.addEventListener("focusin", () => this.setSide(side));
      }
      window.addEventListener("resize", () => this.drawConnectors());
    }

    start() {
      this.openChanges(24, true);
      Refold.showDetails(this, null);
      byId("graph").classList.toggle("no-graph", !this.model.before.nodes.size && !this.model.after.nodes.size);
      for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => this[button.dataset.do]());
      for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => this.show(tab.dataset.side));
      this.setSide("after");
    }

    viewOf(item) {
      return this.views[this.model.graphOf(item).side];
    }

    setSide(side) {
      this.side = side;
      byId("graph").dataset.side = side;
      for (const tab of document.querySelectorAll("[role=tab]")) tab.setAttribute("aria-selected", String(tab.dataset.side === side));
      if (!this.views[side].fitted) this.views[side].fit();
    }

    show(side) {
      this.setSide(side);
      byId("graph").scrollIntoView({ block: "nearest" });
      const view = this.views[side];
      const item = [view.marks.selected, ...view.marks.linked].find((one) => view.element(one)) || view.order[0];
      view.show([item]);
      view.focus(item);
      this.drawConnectors();
    }

    // ---- one choice, seen in both graphs

    choose(item, { side, scroll, focus } = {}) {
      const view = this.viewOf(item);
      this.setSide(side || view.graph.side);
      this.chosen = item;
      const partners = this.model.partnersOf(item);
      const other = this.views[this.model.other(view.graph).side];
      Refold.showDetails(this, item); // first, because it takes room from the graphs
      this.bring(view, [item], item, []);
      this.bring(other, partners.slice(0, MOST_REVEALED), null, partners);
      this.shareZoom(view, [item], other, partners);
      if (scroll) byId("graph").scrollIntoView({ block: "start" });
      if (focus) view.focus(item);
      this.drawConnectors();
    }

    bring(view, items, selected, linked) {
      const hidden = items.some((item) => !view.element(item));
      view.openFor(items);
      view.marks = { selected, linked: new Set(linked) };
      if (hidden) view.draw();
      else view.applyMarks();
      view.show(items);
    }

    /** Where one graph had to zoom out to show all it should, the other follows. */
    shareZoom(view, items, other, partners) {
      if (view.zoom === other.zoom || !other.canvas.clientWidth) return;
      const [large, shown] = view.zoom > other.zoom ? [view, items] : [other, partners];
      large.zoomBy(Math.min(view.zoom, other.zoom) / large.zoom);
      large.show(shown);
    }

    /** Move the keyboard to an item without choosing it. */
    point(item) {
      const view = this.viewOf(item);
      view.show([item]);
      view.focus(item);
    }

    press(item) {
      if (item.isGroup) this.toggle(item);
      else this.choose(item, { focus: true });
    }

    /** Open or close a module, and its namesake in the other graph along with it. */
    toggle(group) {
      const view = this.viewOf(group);
      const other = this.views[this.model.other(view.graph).side];
      const twin = group.kind === "module" ? other.graph.modules.get(group.name) : null;
      this.chosen = group;
      view.marks = { selected: group, linked: new Set() };
      view.toggle(group);
      other.marks = { selected: null, linked: new Set() };
      if (twin && twin.parent && Refold.ancestors(twin).every((one) => one.expanded)) {
        other.setOpen(twin, group.expanded);
      }
      other.draw();
      Refold.showDetails(this, group);
      view.focus(group);
      this.drawConnectors();
    }

    clear() {
      this.chosen = null;
      for (const view of Object.values(this.views)) view.mark(null, []);
      Refold.showDetails(this, null);
      this.drawConnectors();
    }

    crossOver() {
      const [partner] = this.chosen ? this.model.partnersOf(this.chosen) : [];
      if (partner) this.choose(partner, { focus: true, scroll: true });
    }

    nextChange(by) {
      const changes = this.model.changes(this.model.graph(this.side));
      if (!changes.length) return;
      const at = changes.indexOf(this.chosen);
      const next = at < 0 ? (by > 0 ? 0 : changes.length - 1) : (at + by + changes.length) % changes.length;
      this.choose(changes[next], { focus: true, scroll: true });
    }

    showNamed(name) {
      const item = this.model.after.nodes.get(name) || this.model.before.nodes.get(name) || this.model.after.modules.get(name) || this.model.before.modules.get(name);
      if (item) this.choose(item, { scroll: true, focus: true });
      else say(`${name} is in neither graph.`);
    }

    showSite(site, number) {
      const made = site.after.filter((name) => !this.model.before.nodes.has(name)); // a new node shows the place best
      const after = [...made, ...site.after].map((name) => this.model.after.nodes.get(name)).find(Boolean);
      const before = site.before.map((name) => this.model.before.nodes.get(name)).find(Boolean);
      if (after || before) this.choose(after || before, { scroll: true, focus: true });
      else if (this.model.steps[number].status === "kept") say("A later step rewrote this place again, so its nodes are in neither graph.");
      else say("This was not kept, so its nodes are in neither graph.");
    }

    showCard(number) {
      const card = byId(`rewrite-${number + 1}`);
      card.scrollIntoView({ block: "center" });
      card.classList.remove("flash");
      requestAnimationFrame(() => card.classList.add("flash"));
    }

    // ---- lines between the two graphs

    drawConnectors() {
      cancelAnimationFrame(this.frame);
      this.frame = requestAnimationFrame(() => byId("connectors").replaceChildren(...this.connectors()));
    }

    connectors() {
      const [before, after] = [this.views.before, this.views.after];
      const host = byId("panes").getBoundingClientRect();
      const [left, right] = [before.canvas.getBoundingClientRect(), after.canvas.getBoundingClientRect()];
      if (!this.chosen || this.chosen.isGroup || right.left < left.right) return [];
      const ends = (view, frame) => [view.marks.selected, ...view.marks.linked].map((item) => item && view.element(item)?.getBoundingClientRect())
        .filter((box) => box && box.bottom > frame.top && box.top < frame.bottom && box.right > frame.left && box.left < frame.right);
      const [starts, targets] = [ends(before, left), ends(after, right)];
      if (starts.length * targets.length > MOST_CONNECTORS) return []; // the marks say it better than a bundle of lines
      const hue = this.chosen.steps.size ? `hue-${[...this.chosen.steps][0] % 8}` : "";
      const lines = [];
      for (const from of starts) for (const to of targets) {
        // from below or above each origin, so that origins side by side keep lines of their own
        const [x2, y2] = [Math.max(to.left, right.left) - host.left, (to.top + to.bottom) / 2 - host.top];
        const down = y2 > from.bottom - host.top + 20;
        const [x1, y1] = [Math.min((from.left + from.right) / 2, left.right) - host.left, (down ? from.bottom : from.top) - host.top];
        const bend = Math.max(30, (x2 - x1) * 0.45);
        lines.push(svg("path", { class: `connector ${hue}`, d: `M${x1} ${y1}C${x1} ${y1 + (down ? 70 : -45)} ${x2 - bend} ${y2} ${x2} ${y2}` }));
      }
      return lines;
    }

    // ---- buttons

    /** Open what was rewritten in the graph where more of it can be seen, and the same modules in the other. */
    openChanges(limit, wholeLevels) {
      const { before, after } = this.views;
      const [first, second] = before.graph.root.changed > after.graph.root.changed ? [before, after] : [after, before];
      first.openChanges(limit, wholeLevels);
      second.openLike(first.graph);
      first.draw();
      second.draw();
      this.fit();
    }

    collapseAll() {
      for (const view of Object.values(this.views)) {
        view.collapseAll();
        view.draw();
      }
      this.fit();
    }

    zoom(factor) {
      for (const view of Object.values(this.views)) view.zoomBy(factor);
      this.drawConnectors();
    }

    zoomIn() {
      this.zoom(1.2);
    }

    zoomOut() {
      this.zoom(1 / 1.2);
    }

    /** Both graphs in one zoom, so that they can be compared; a hidden one (clientWidth 0) has no say. */
    fit() {
      const views = Object.values(this.views);
      const zoom = Math.min(...views.filter((view) => view.canvas.clientWidth).map((view) => view.fittingZoom()));
      for (const view of views) view.fit(zoom);
      this.drawConnectors();
    }

    next() {
      this.nextChange(1);
    }

    help() {
      byId("help").showModal();
    }

    closeHelp() {
      byId("help").close();
    }

    nextTheme() {
      RefoldTheme.next();
    }
  }

  let silence = 0;

  function say(sentence) {
    byId("status").textContent = sentence;
    clearTimeout(silence);
    silence = setTimeout(() => byId("status").replaceChildren(), 5000);
  }

  RefoldTheme.apply();
  Refold.showSummary();
  Refold.showRewrites();
  Refold.fillHelp();
  Refold.page = new Page();
  Refold.page.start();
  new Refold.Search(Refold.page);
  Refold.listenToKeys(Refold.page);
  document.documentElement.dataset.ready = "true";
})();
