// One graph on the screen: draws what is open, zooms, scrolls to a node, and tells the page what was clicked.
"use strict";

(() => {
  const { el, svg, whole } = Refold;
  const SHORT_TYPES = [["bfloat", "bf"], ["float", "f"], ["int", "i"], ["complex", "c"]];
  const MOST_VISIBLE = 1500; // above this, revealing one more node closes what is not on its way
  const ROUND = 7;
  const SMALLEST_SHOWN = 0.5; // no name is shrunk below this to bring it into view

  function shortText(text, length) {
    return text.length <= length ? text : `${text.slice(0, length - 1)}…`;
  }

  function shortValue(value) {
    let text = value;
    for (const [long, short] of SHORT_TYPES) text = text.replaceAll(new RegExp(`\\b${long}(?=\\d)`, "g"), short);
    return text;
  }

  /** The quiet line below a name: what a module holds, or the class and the value of a node. */
  function secondLine(item) {
    if (item.isGroup) {
      const changed = item.changed ? ` · ${whole.format(item.changed)} changed` : "";
      return `${whole.format(item.size)} node${item.size === 1 ? "" : "s"}${changed}`;
    }
    const kind = item.detail ? item.detail.split("(")[0] : "";
    return shortText([kind, shortValue(item.value)].filter(Boolean).join("  "), 38);
  }

  /** A soft line through the points dagre gives. */
  function curve(points) {
    const at = (p) => `${p.x.toFixed(1)} ${p.y.toFixed(1)}`;
    const middle = (p, q) => ({ x: (p.x + q.x) / 2, y: (p.y + q.y) / 2 });
    let path = `M${at(points[0])}`;
    for (let i = 1; i < points.length - 1; i += 1) {
      const end = i === points.length - 2 ? points[i + 1] : middle(points[i], points[i + 1]);
      path += `Q${at(points[i])} ${at(end)}`;
    }
    return points.length === 2 ? `${path}L${at(points[1])}` : path;
  }

  class GraphView {
    constructor(graph, host, on) {
      this.graph = graph;
      this.on = on; // { choose(item), toggle(group) }
      this.zoom = 1;
      this.elements = new Map();
      this.items = new WeakMap();
      this.marks = { selected: null, linked: new Set() };
      this.order = [];
      this.canvas = el("div", { class: "canvas", tabindex: "-1" });
      this.drawing = svg("svg", { class: "drawing", role: "tree", "aria-label": `graph ${graph.side}` });
      this.canvas.append(this.drawing);
      host.append(this.canvas);
      host.querySelector("h3").append(el("span", { class: "quiet" }, ` ${whole.format(graph.nodes.size)} nodes`));
      this.drawing.addEventListener("click", (event) => this.clicked(event));
      this.drawing.addEventListener("focusin", (event) => this.focused(event));
      this.canvas.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
      this.canvas.addEventListener("pointerdown", (event) => this.startDrag(event));
    }

    /** Where to look first in a wide drawing: the middle of the largest module. */
    heart() {
      const { items } = Refold.layoutOf(this.graph.root);
      const largest = items.reduce((best, place) => ((place.item.size || 0) > (best?.item.size || 0) ? place : best), null);
      return largest ? largest.x + largest.width / 2 : this.size.width / 2;
    }

    // ---- drawing

    draw() {
      const layout = Refold.layoutOf(this.graph.root);
      this.elements.clear();
      this.order = [];
      this.size = { width: Math.max(layout.width, 60), height: Math.max(layout.height, 60) };
      const marker = svg("marker", { id: `arrow-${this.graph.side}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, markerUnits: "userSpaceOnUse", orient: "auto" },
        svg("path", { d: "M0 0.8 8 4 0 7.2z", class: "arrow" }));
      this.drawing.replaceChildren(svg("defs", {}, marker), this.drawInside(this.graph.root, layout));
      this.drawing.setAttribute("viewBox", `0 0 ${this.size.width} ${this.size.height}`);
      this.applyZoom();
      this.applyMarks();
    }

    drawInside(group, layout) {
      const lines = layout.edges.map((edge) => this.drawEdge(edge));
      const dots = layout.ports.map((port) => svg("circle", { class: "port", cx: port.x, cy: port.y, r: 2.5 }));
      const placed = [...layout.items].sort((a, b) => a.y - b.y || a.x - b.x);
      return svg("g", {}, lines, dots, placed.map((place) => this.drawItem(place)), placed.flatMap((place) => this.drawStubs(place, layout)));
    }

    /** Short arrows for values that come from, or go to, the outside of the module. */
    drawStubs({ item, x, y, width, height }, layout) {
      const stub = (start, text) => svg("path", { d: `M${start} ${y + height / 2}h11`, class: "edge edge-port", "marker-end": `url(#arrow-${this.graph.side})` }, svg("title", {}, text));
      const made = [];
      if (layout.readsOutside.has(item)) made.push(stub(x - 13, "reads a value from outside of this module"));
      if (layout.readOutside.has(item)) made.push(stub(x + width + 2, "is read outside of this module"));
      return made;
    }

    drawEdge(edge) {
      const line = svg("path", { d: curve(edge.points), class: edge.port ? "edge edge-port" : "edge", "marker-end": `url(#arrow-${this.graph.side})` });
      line.ends = [edge.from, edge.to];
      if (edge.n > 1) line.append(svg("title", {}, `${edge.n} values`));
      return line;
    }

    drawItem({ item, x, y, width, height }) {
      const open = item.isGroup && item.expanded;
      const classes = ["item", item.kind, open ? "open" : "", item.steps.size ? `changed hue-${[...item.steps][0] % 8}` : "", `op-${item.op || "group"}`];
      const box = svg("g", {
        class: classes.filter(Boolean).join(" "), transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, tabindex: "-1", role: "treeitem",
        "aria-label": `${item.label}, ${secondLine(item)}`, "aria-expanded": item.isGroup ? String(open) : null,
      });
      this.elements.set(item, box);
      this.items.set(box, item);
      this.order.push(item);
      box.append(svg("rect", { class: "box", width, height, rx: ROUND }));
      if (item.steps.size && !item.isGroup) box.append(svg("rect", { class: "stripe", x: 0, y: 5, width: 3.5, height: height - 10, rx: 1.75 }));
      box.append(...this.drawText(item, open, width, height));
      if (open) box.append(this.drawInside(item, Refold.layoutOf(item)));
      return box;
    }

    drawText(item, open, width, height) {
      const left = item.isGroup ? 26 : 13;
      const second = secondLine(item);
      const parts = [svg("text", { class: "name", x: left, y: open || second ? 18 : height / 2 + 4 }, shortText(item.label, open ? 60 : 34))];
      if (second && !open) parts.push(svg("text", { class: "quiet", x: left, y: 33 }, second));
      if (open) parts.unshift(svg("rect", { class: "head", width, height: 28, rx: ROUND }));
      if (item.isGroup) parts.push(svg("path", { class: "chevron", d: open ? "M10 11.5l4 4 4-4" : "M12 9.5l4 4-4 4" }));
      parts.push(...badges(item, width));
      parts.push(svg("title", {}, fullName(item)));
      return parts;
    }

    // ---- opening and closing

    setOpen(group, open) {
      if (group.expanded === open || !group.parent) return;
      group.expanded = open;
      Refold.forgetLayout(group);
    }

    /** Open or close, and keep the box under the pointer where it was. */
    toggle(group) {
      const before = this.elements.get(group)?.getBoundingClientRect();
      this.setOpen(group, !group.expanded);
      this.draw();
      const after = this.elements.get(group)?.getBoundingClientRect();
      if (!before || !after) return;
      this.canvas.scrollLeft += after.left - before.left - (before.width - after.width) / 2;
      this.canvas.scrollTop += after.top - before.top;
    }

    collapseAll() {
      const close = (group) => {
        for (const child of group.children) if (child.isGroup) close(child);
        this.setOpen(group, false);
      };
      close(this.graph.root);
    }

    /** Open every group on the way to the items; a very full drawing is closed first. */
    openFor(items) {
      if (this.order.length > MOST_VISIBLE) this.collapseAll();
      for (const item of items) for (const group of Refold.ancestors(item)) this.setOpen(group, true);
    }

    /** Open modules with changed nodes, outer ones first, until the drawing is full. */
    openChanges(limit = 260, wholeLevels = false) {
      let level = [this.graph.root];
      let visible = 0;
      while (level.length) {
        const more = level.reduce((sum, group) => sum + group.children.length, 0);
        if (wholeLevels && visible && visible + more > limit) return;
        for (const group of level) {
          if (visible && visible + group.children.length > limit) return;
          this.setOpen(group, true);
          visible += group.children.length;
        }
        level = level.flatMap((group) => group.children.filter((child) => child.isGroup && child.changed));
      }
    }

    openLike(graph) {
      for (const [name, group] of graph.modules) {
        const twin = this.graph.modules.get(name);
        if (twin && group.expanded) for (const one of [twin, ...Refold.ancestors(twin)]) this.setOpen(one, true);
      }
    }

    // ---- selection

    mark(selected, linked) {
      this.marks = { selected, linked: new Set(linked) };
      this.applyMarks();
    }

    applyMarks() {
      const { selected, linked } = this.marks;
      this.drawing.classList.toggle("has-selection", Boolean(selected || linked.size));
      for (const [item, box] of this.elements) {
        box.classList.toggle("selected", item === selected);
        box.classList.toggle("linked", linked.has(item));
        box.setAttribute("tabindex", item === selected ? "0" : "-1");
        box.setAttribute("aria-selected", String(item === selected));
      }
      if (this.order.length && !this.elements.has(selected)) this.elements.get(this.order[0]).setAttribute("tabindex", "0");
      for (const line of this.drawing.querySelectorAll(".edge")) line.classList.toggle("active", Boolean(selected && line.ends?.includes(selected)));
    }

    element(item) {
      return this.elements.get(item);
    }

    focus(item) {
      this.elements.get(item)?.focus({ preventScroll: true });
    }

    /** The rectangle around items on the screen, or null where none is drawn. */
    around(items) {
      const boxes = items.map((item) => this.elements.get(item)).filter(Boolean).map((box) => box.getBoundingClientRect());
      if (!boxes.length) return null;
      const side = (name, pick) => pick(...boxes.map((box) => box[name]));
      return { top: side("top", Math.min), bottom: side("bottom", Math.max), left: side("left", Math.min), right: side("right", Math.max) };
    }

    /** Bring items into view: zoom out where they are too wide, then scroll the canvas (never the page). */
    show(items) {
      const frame = this.canvas.getBoundingClientRect();
      let box = this.around(items);
      if (!box || !frame.width) return;
      const tooWide = (box.right - box.left + 24) / frame.width;
      if (tooWide > 1) {
        this.zoomBy(Math.max(1 / tooWide, SMALLEST_SHOWN / this.zoom));
        box = this.around(items);
      }
      box.bottom = Math.min(box.bottom, box.top + frame.height);
      box.right = Math.min(box.right, box.left + frame.width);
      const inside = box.top >= frame.top && box.bottom <= frame.bottom && box.left >= frame.left && box.right <= frame.right;
      if (inside) return;
      this.canvas.scrollTop += (box.top + box.bottom) / 2 - (frame.top + frame.bottom) / 2;
      this.canvas.scrollLeft += (box.left + box.right) / 2 - (frame.left + frame.right) / 2;
    }

    // ---- events

    itemAt(target) {
      const box = target.closest ? target.closest(".item") : null;
      return box ? this.items.get(box) : null;
    }

    clicked(event) {
      if (this.dragged) return;
      const item = this.itemAt(event.target);
      if (!item) return;
      const onBody = item.isGroup && item.expanded && event.target.classList.contains("box");
      if (item.isGroup && !onBody) this.on.toggle(item);
      else if (!onBody) this.on.choose(item);
    }

    focused(event) {
      this.focusedItem = this.itemAt(event.target);
    }

    wheeled(event) {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoomBy(event.deltaY < 0 ? 1.12 : 1 / 1.12, event.clientX, event.clientY);
    }

    /** Drag the drawing with a mouse; a finger scrolls by itself. */
    startDrag(event) {
      this.dragged = false;
      if (event.pointerType !== "mouse" || event.button !== 0) return;
      const start = { x: event.clientX, y: event.clientY, left: this.canvas.scrollLeft, top: this.canvas.scrollTop };
      const move = (next) => {
        const [dx, dy] = [next.clientX - start.x, next.clientY - start.y];
        if (Math.abs(dx) + Math.abs(dy) > 4) this.dragged = true;
        this.canvas.scrollLeft = start.left - dx;
        this.canvas.scrollTop = start.top - dy;
      };
      const stop = () => window.removeEventListener("pointermove", move);
      window.addEventListener("pointermove", move);
      window.addEventListener("pointerup", stop, { once: true });
    }

    // ---- zoom

    applyZoom() {
      this.drawing.setAttribute("width", Math.round(this.size.width * this.zoom));
      this.drawing.setAttribute("height", Math.round(this.size.height * this.zoom));
    }

    zoomBy(factor, clientX, clientY) {
      const frame = this.canvas.getBoundingClientRect();
      const [x, y] = [(clientX ?? frame.left + frame.width / 2) - frame.left, (clientY ?? frame.top + frame.height / 2) - frame.top];
      const old = this.zoom;
      this.zoom = Math.min(2.5, Math.max(0.15, old * factor));
      const [left, top] = [this.canvas.scrollLeft, this.canvas.scrollTop];
      this.applyZoom();
      this.canvas.scrollLeft = ((left + x) * this.zoom) / old - x;
      this.canvas.scrollTop = ((top + y) * this.zoom) / old - y;
    }

    /** The zoom at which the whole width can be seen, within what can be read. */
    fittingZoom() {
      return Math.min(1, Math.max(0.6, (this.canvas.clientWidth - 8) / this.size.width));
    }

    fit(zoom = this.fittingZoom()) {
      this.fitted = this.canvas.clientWidth > 0; // a hidden graph (the other tab of a phone) is fitted when it is shown
      if (!this.fitted) return;
      this.zoom = zoom;
      this.applyZoom();
      this.canvas.scrollLeft = this.heart() * zoom - this.canvas.clientWidth / 2;
    }
  }

  /** The numbers of the rewrites, each in its colour; the last stands for all further ones. */
  function badges(item, width) {
    const steps = [...item.steps].sort((a, b) => a - b);
    const shown = steps.slice(0, 3);
    return shown.map((step, i) => {
      const text = i === 2 && steps.length > 3 ? "…" : String(step + 1);
      return svg("g", { class: `badge hue-${step % 8}`, transform: `translate(${width - 5 - 19 * (shown.length - i)} 6)` },
        svg("rect", { width: 17, height: 15, rx: 7.5 }), svg("text", { x: 8.5, y: 11 }, text));
    });
  }

  function fullName(item) {
    if (item.isGroup) return item.name || "the whole model";
    return [item.name, item.target, item.detail, item.value].filter(Boolean).join("\n");
  }

  Refold.shortText = shortText;
  Refold.secondLine = secondLine;
  Refold.GraphView = GraphView;
})();
