// Both graphs as trees of modules, with edges lifted to the level where they are drawn, and the links between them.
"use strict";

(() => {
  const LEVEL_LIMIT = 120; // more children than this on one level are cut into runs, so that no layout is ever large
  const RUN_LENGTH = 60;
  const CROWDED = 16; // from here on, loose nodes between the modules of a level are folded into runs
  const SHORTEST_RUN = 5;

  class Item {
    constructor(kind, name, label) {
      this.kind = kind; // "node", "module" or "run"
      this.name = name;
      this.label = label;
      this.parent = null;
      this.steps = new Set(); // rewrites that touched this node, or a node inside
    }

    get isGroup() {
      return this.kind !== "node";
    }
  }

  class Group extends Item {
    constructor(kind, name, label) {
      super(kind, name, label);
      this.children = [];
      this.expanded = false;
      this.size = 0;
      this.changed = 0;
      this.edges = new Map(); // Item -> Map of Item -> how many values flow
      this.entries = new Set(); // children that read a value from outside
      this.exits = new Set(); // children whose value is read outside
    }

    add(child) {
      child.parent = this;
      this.children.push(child);
    }
  }

  class Graph {
    constructor(side, table) {
      this.side = side;
      this.nodes = new Map();
      this.modules = new Map();
      this.root = new Group("module", "", "");
      this.root.expanded = true;
      this.modules.set("", this.root);
      const column = Object.fromEntries(table.columns.map((name, i) => [name, i]));
      for (const row of table.rows) this.addNode(row, column);
      for (const node of this.nodes.values()) this.connect(node);
      this.root.children = this.tidy(this.root);
      foldUnusedInputs(this.root);
      foldLooseNodes(this.root);
      cutLongLevels(this.root);
      measureDepth(this.root);
      for (const node of this.nodes.values()) {
        for (const source of node.sources) if (!isSize(source)) liftEdge(source, node);
      }
    }

    addNode(row, column) {
      const node = new Item("node", row[column.id], "");
      for (const name of ["op", "target", "module", "detail", "value", "inputs", "provenance"]) node[name] = row[column[name]];
      node.label = nodeLabel(node);
      node.order = this.nodes.size;
      node.sources = [];
      node.users = [];
      this.nodes.set(node.name, node);
      this.module(node.module).add(node);
    }

    connect(node) {
      for (const name of node.inputs) {
        const source = this.nodes.get(name);
        if (!source) continue;
        node.sources.push(source);
        source.users.push(node);
      }
    }

    module(path) {
      const found = this.modules.get(path);
      if (found) return found;
      const cut = path.lastIndexOf(".");
      const made = new Group("module", path, path.slice(cut + 1));
      this.modules.set(path, made);
      this.module(cut < 0 ? "" : path.slice(0, cut)).add(made);
      return made;
    }

    /** A module that holds one thing only is drawn as that thing: "encoder.layer", or "query.linear". */
    tidy(group) {
      return group.children.map((child) => {
        let inner = child;
        while (inner.isGroup && inner.children.length === 1) {
          this.modules.delete(inner.name);
          inner.children[0].label = `${inner.label}.${inner.children[0].label}`;
          inner = inner.children[0];
        }
        inner.parent = group;
        if (inner.isGroup) inner.children = this.tidy(inner);
        return inner;
      });
    }
  }

  function nodeLabel(node) {
    if (node.op === "call_module" || node.op === "get_attr") return node.target.slice(node.target.lastIndexOf(".") + 1);
    if (node.op === "call_method") return `.${node.target}()`;
    if (node.op !== "call_function") return node.name;
    const parts = node.target.split(".");
    return parts[0] === "aten" && parts.length > 1 ? parts[1] : parts[parts.length - 1];
  }

  function cutLongLevels(group) {
    for (const child of group.children) if (child.isGroup) cutLongLevels(child);
    while (group.children.length > LEVEL_LIMIT) group.children = runs(group);
  }

  function runs(group) {
    const made = [];
    for (let i = 0; i < group.children.length; i += RUN_LENGTH) made.push(makeRun(group, group.children.slice(i, i + RUN_LENGTH)));
    return made;
  }

  function makeRun(group, part, label) {
    const [first, last] = [part[0], part[part.length - 1]];
    const run = new Group("run", `${group.name}#${first.name}`, "");
    run.first = first.first || first.label;
    run.last = last.last || last.label;
    run.label = label || `${run.first} … ${run.last}`;
    run.parent = group;
    for (const child of part) run.add(child);
    return run;
  }

  function foldUnusedInputs(root) {
    const unused = root.children.filter((child) => child.op === "placeholder" && !child.users.length);
    if (unused.length < 3) return;
    root.children = root.children.filter((child) => !unused.includes(child));
    root.children.unshift(makeRun(root, unused, "unused inputs"));
  }

  /** On a crowded level that has modules, operations that follow each other become one box (they are in execution order). */
  function foldLooseNodes(group) {
    for (const child of group.children) if (child.kind === "module") foldLooseNodes(child);
    if (group.children.length <= CROWDED || !group.children.some((child) => child.kind === "module")) return;
    const kept = [];
    let loose = [];
    const flush = () => {
      kept.push(...(loose.length < SHORTEST_RUN ? loose : [makeRun(group, loose)]));
      loose = [];
    };
    for (const child of group.children) {
      if (!child.isGroup && child.op !== "placeholder" && child.op !== "output") loose.push(child);
      else {
        flush();
        kept.push(child);
      }
    }
    flush();
    group.children = kept;
  }

  /** A node that computes a size, not a tensor. Its many edges are left to the details: drawn, they hide the rest. */
  function isSize(node) {
    return node.op === "call_function" && /\bsym_(size|stride|numel)\b/.test(node.target);
  }

  function measureDepth(group, depth = 0) {
    group.depth = depth;
    for (const child of group.children) {
      if (child.isGroup) measureDepth(child, depth + 1);
      else child.depth = depth + 1;
      group.size += child.isGroup ? child.size : 1;
    }
  }

  /** Record an edge once at the level where its two ends part, and as entry or exit on the levels below. */
  function liftEdge(source, user) {
    let from = source;
    let to = user;
    while (from.parent !== to.parent) {
      if (from.depth >= to.depth) {
        from.parent.exits.add(from);
        from = from.parent;
      } else {
        to.parent.entries.add(to);
        to = to.parent;
      }
    }
    if (from === to) return;
    const row = from.parent.edges.get(from) || new Map();
    row.set(to, (row.get(to) || 0) + 1);
    from.parent.edges.set(from, row);
  }

  function ancestors(item) {
    const found = [];
    for (let group = item.parent; group; group = group.parent) found.push(group);
    return found;
  }

  function touch(node, step) {
    const news = node.steps.size === 0;
    node.steps.add(step);
    for (const group of ancestors(node)) {
      group.steps.add(step);
      if (news) group.changed += 1;
    }
  }

  /** The two graphs of the report and what is known between them. */
  class Model {
    constructor(data) {
      this.before = new Graph("before", data.graph_before.nodes);
      this.after = new Graph("after", data.graph_after.nodes);
      this.steps = data.steps;
      this.partners = new Map(); // node -> Set of nodes of the other graph
      for (const link of data.links) this.addLink(link);
      for (const node of this.after.nodes.values()) this.addProvenance(node);
      this.steps.forEach((step, number) => this.markStep(step, number));
      for (const node of this.before.nodes.values()) this.pairByName(node);
    }

    graph(side) {
      return side === "before" ? this.before : this.after;
    }

    other(graph) {
      return graph === this.before ? this.after : this.before;
    }

    addLink(link) {
      const before = link.before.map((name) => this.before.nodes.get(name)).filter(Boolean);
      const after = link.after.map((name) => this.after.nodes.get(name)).filter(Boolean);
      for (const one of before) for (const two of after) this.pair(one, two);
      for (const node of [...before, ...after]) {
        for (const step of link.steps) if (step >= 0 && step < this.steps.length) touch(node, step);
      }
    }

    addProvenance(node) {
      for (const name of node.provenance) {
        const origin = this.before.nodes.get(name);
        if (origin) this.pair(origin, node);
      }
    }

    markStep(step, number) {
      if (step.status !== "kept") return; // what was taken back is not in the final graph
      for (const site of step.sites) {
        for (const name of site.before) if (this.before.nodes.has(name)) touch(this.before.nodes.get(name), number);
        for (const name of site.after) if (this.after.nodes.has(name)) touch(this.after.nodes.get(name), number);
      }
    }

    pairByName(node) {
      const same = this.after.nodes.get(node.name);
      if (!same || same.op !== node.op || same.target !== node.target) return;
      if (!this.partners.has(node) && !this.partners.has(same)) this.pair(node, same);
    }

    pair(one, two) {
      for (const [key, value] of [[one, two], [two, one]]) {
        if (!this.partners.has(key)) this.partners.set(key, new Set());
        this.partners.get(key).add(value);
      }
    }

    partnersOf(item) {
      return item.isGroup ? [] : [...(this.partners.get(item) || [])];
    }

    graphOf(item) {
      let top = item;
      while (top.parent) top = top.parent;
      return top === this.before.root ? this.before : this.after;
    }

    /** The place of a node in both graphs where a rewrite happened, in order: what "next change" walks through. */
    changes(graph) {
      return [...graph.nodes.values()].filter((node) => node.steps.size > 0);
    }
  }

  Refold.Model = Model;
  Refold.ancestors = ancestors;
})();
