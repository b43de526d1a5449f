// Where everything is drawn: each open module is laid out on its own by dagre, inner ones first.
"use strict";

(() => {
  const CHAR = 7.3; // width of one monospace letter at 12 px
  const HEAD = 30;
  const PAD = 14;
  const PORT = 6;
  const CAREFUL = 48;

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
    addPort(graph, "in", [...group.entries].map((child) => ["in", keys.get(child)]));
    addPort(graph, "out", [...group.exits].map((child) => [keys.get(child), "out"]));
    dagre.layout(graph);
    return read(group, graph, keys);
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

  Refold.layoutOf = layoutOf;
  Refold.forgetLayout = forget;
})();
