// Where everything is drawn: each open module is laid out on its own by dagre, inner ones first.
"use strict";

(() => {
  const CHAR = 7.3; // width of one monospace letter at 12 px
  const HEAD = 30;
  const PAD = 14;
  const PORT = 6;
  const CAREFUL = 48;
  const MOST_SIDE_LINES = 3; // a value from outside that more boxes read (a mask, say) is drawn as a short arrow at each

  function leafSize(item) {
    const lines = [Refold.shortText(item.label, 34), Refold.secondLine(item)];
    const longest = Math.max(lines[0].length, lines[1].length * 0.88);
    const badge = item.steps.size ? 8 + 19 * Math.min(3, item.steps.size) : 0;
    const extra = item.isGroup ? 46 : 26;
    return { width: Math.max(84, Math.round(longest * CHAR) + extra + badge), height: lines[1] ? 42 : 30 };
  }

  function sizeOf(item) {
    if (item.isGroup && item.expanded) return layoutOf(item);
    return (item.leaf = item.leaf || leafSize(item));
  }

  /** The layout of an open group, kept until something inside of it opens or closes. */
  function layoutOf(group) {
    group.layout = group.layout || compute(group);
    return group.layout;
  }

  function compute(group) {
    const graph = new dagre.graphlib.Graph();
    const ranker = group.children.length > CAREFUL ? "longest-path" : "network-simplex"; // the second is prettier and slow
    graph.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 26, edgesep: 8, marginx: PAD, marginy: group.parent ? 8 : PAD, ranker });
    graph.setDefaultEdgeLabel(() => ({}));
    // dagre keeps names as keys of plain objects, so it is given numbers and never the model's own names
    const keys = new Map(group.children.map((child, i) => [child, String(i)]));
    for (const [child, key] of keys) {
      const { width, height } = sizeOf(child);
      graph.setNode(key, { width, height });
    }
    for (const [from, row] of group.edges) for (const [to, n] of row) graph.setEdge(keys.get(from), keys.get(to), { n });
    const entries = splitPorts(group.entries, (child) => graph.inEdges(keys.get(child)).length > 0);
    const exits = splitPorts(group.exits, (child) => graph.outEdges(keys.get(child)).length > 0);
    addPort(graph, "in", entries.lines.map((child) => ["in", keys.get(child)]));
    addPort(graph, "out", exits.lines.map((child) => [keys.get(child), "out"]));
    arrange(graph);
    return { ...read(group, graph, keys), readsOutside: new Set(entries.stubs), readOutside: new Set(exits.stubs) };
  }

  /** Let dagre place everything. It gives up on rare graphs; a plain column is then better than an empty page. */
  function arrange(graph) {
    try {
      Refold.place(graph);
    } catch {
      stack(graph);
    }
  }

  function stack(graph) {
    const nodes = graph.nodes().map((key) => graph.node(key));
    const width = Math.max(...nodes.map((node) => node.width)) + 2 * PAD;
    let y = PAD;
    for (const node of nodes) {
      Object.assign(node, { x: width / 2, y: y + node.height / 2 });
      y += node.height + 26;
    }
    for (const { v, w } of graph.edges()) graph.edge(v, w).points = [graph.node(v), graph.node(w)].map(({ x, y: middle }) => ({ x, y: middle }));
    Object.assign(graph.graph(), { width, height: y });
  }

  /** Which values that cross the border get a line to the port, and which only a short arrow at the box. */
  function splitPorts(children, isInside) {
    const side = [...children].filter(isInside);
    if (side.length <= MOST_SIDE_LINES) return { lines: [...children], stubs: [] };
    return { lines: [...children].filter((child) => !side.includes(child)), stubs: side };
  }

  function addPort(graph, name, edges) {
    if (!edges.length) return;
    graph.setNode(name, { width: PORT, height: PORT });
    for (const [from, to] of edges) graph.setEdge(from, to, { port: true, weight: name === "in" ? 4 : 1 }); // readers of one input stay side by side
  }

  function read(group, graph, keys) {
    const top = group.parent ? HEAD : 0;
    const box = graph.graph();
    const label = group.parent ? group.label.length * CHAR + 120 : 0;
    const width = Math.max(box.width || 0, label);
    const shift = (width - (box.width || 0)) / 2;
    const place = (point) => ({ x: point.x + shift, y: point.y + top });
    const items = [...keys].map(([item, key]) => {
      const node = graph.node(key);
      const center = place(node);
      return { item, x: center.x - node.width / 2, y: center.y - node.height / 2, width: node.width, height: node.height };
    });
    const named = new Map([...keys].map(([item, key]) => [key, item]));
    const edges = graph.edges().map(({ v, w }) => {
      const edge = graph.edge(v, w);
      return { from: named.get(v), to: named.get(w), n: edge.n || 1, port: edge.port, points: edge.points.map(place) };
    });
    const ports = ["in", "out"].filter((name) => graph.hasNode(name)).map((name) => place(graph.node(name)));
    return { width, height: (box.height || 0) + top, items, edges, ports };
  }

  function forget(group) {
    for (let one = group; one; one = one.parent) one.layout = null;
  }

  Refold.place = (graph) => dagre.layout(graph);
  Refold.layoutOf = layoutOf;
  Refold.forgetLayout = forget;
})();
