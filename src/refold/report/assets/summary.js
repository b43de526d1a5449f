// The first screen: how much faster, how exact, what changed, and the timings with their spread.
"use strict";

(() => {
  const { data, el, svg, byId, count, duration, large, times, verdict, whole } = Refold;

  function tile(tone, heading, value, sentence, extra) {
    return el("section", { class: `tile tone-${tone}` },
      el("h3", {}, heading), el("p", { class: "value" }, value), el("p", { class: "sentence" }, sentence), extra);
  }

  function speedTile() {
    const speed = data.speedup;
    if (!speed) return tile("none", "Speed", "not measured", "No timing was run for this report.");
    const between = `between ${times(speed.low)} and ${times(speed.high)}`;
    const kind = verdict(speed);
    if (speed.low === 1 && speed.high === 1) return tile("none", "Speed", "no difference", "Nothing that was tried is faster beyond the noise, so the original runs.");
    if (kind === "undecided") return tile("none", "Speed", "not decided", between);
    const [tone, value, word] = kind === "faster" ? ["good", `${times(speed.median)} faster`, "than"] : ["bad", "slower", `${times(speed.median)} the speed of`];
    return tile(tone, "Speed", value, `${word} the original, ${between}`);
  }

  function tone(verification) {
    if (!verification || verification.ok === null) return "none";
    return verification.ok ? "good" : "bad";
  }

  function exactTile() {
    const exact = data.exactness;
    if (!exact) return tile("none", "Exactness", "not verified", "The outputs were not compared.");
    return tile(tone(exact), "Exactness", exact.grade, exact.sentence, Refold.outputErrors(exact.outputs));
  }

  function changeTile() {
    const kept = data.steps.filter((step) => step.status === "kept");
    const places = kept.reduce((sum, step) => sum + step.sites.length, 0);
    const back = data.steps.filter((step) => step.status === "taken back").length;
    const refused = data.steps.reduce((sum, step) => sum + step.refusals.length, 0);
    const parts = [`by ${count(kept.length, "transformation")}`];
    if (back) parts.push(`${whole.format(back)} taken back`);
    if (refused) parts.push(`${count(refused, "place")} refused, each with its reason`);
    return tile("plain", "Changed", count(places, "rewrite"), parts.join(" · "));
  }

  function modelTile() {
    const [before, after] = [data.graph_before.nodes.rows.length, data.graph_after.nodes.rows.length];
    const parameters = data.model.parameters === null ? "" : `${large(data.model.parameters)} parameters`;
    const less = before && after !== before ? `${after < before ? "−" : "+"}${Math.abs(Math.round((100 * (after - before)) / before))} % nodes` : "";
    const value = before || after ? `${whole.format(before)} → ${whole.format(after)}` : "–";
    return tile("plain", "Graph nodes", value, [data.model.class_name, parameters, less].filter(Boolean).join(" · "));
  }

  /** One bar: the median, and over it a whisker from the low to the high end of the spread. */
  function bar(timing, top) {
    const share = (seconds) => `${Math.min(100, (100 * seconds) / top).toFixed(2)}%`;
    const drawing = svg("svg", { class: "bar", role: "img", "aria-label": `${timing.name}: ${duration(timing.median)}` },
      svg("rect", { class: "track", width: "100%", height: "100%", rx: 3 }),
      svg("rect", { class: "fill", width: share(timing.median), height: "100%", rx: 3 }),
      svg("line", { class: "whisker", x1: share(timing.low), x2: share(timing.high), y1: "50%", y2: "50%" }),
      svg("line", { class: "whisker", x1: share(timing.low), x2: share(timing.low), y1: "28%", y2: "72%" }),
      svg("line", { class: "whisker", x1: share(timing.high), x2: share(timing.high), y1: "28%", y2: "72%" }));
    const value = el("span", { class: "bar-value" }, el("b", {}, duration(timing.median)), el("span", { class: "quiet" }, ` ${duration(timing.low)} – ${duration(timing.high)}`));
    const name = el("span", { class: "bar-name" }, timing.name, timing.note ? el("span", { class: "quiet" }, timing.note) : null);
    return el("li", { class: `timing role-${timing.role}` }, name, drawing, value);
  }

  function showTimings() {
    const section = byId("timings");
    if (!data.timings.length) return section.remove();
    const top = Math.max(...data.timings.map((timing) => timing.high)) * 1.03;
    section.append(el("ol", { class: "bars" }, data.timings.map((timing) => bar(timing, top))),
      el("p", { class: "legend quiet" }, "Bar: median time of one run. Line over it: spread of the measurement. Shorter is faster."));
    return section;
  }

  /** What is left of one kind of work, as a part of what the original does. */
  function workLeft(work) {
    const share = work.before ? work.after / work.before : 1;
    const drawing = svg("svg", { class: "bar", role: "img", "aria-label": `${work.unit}: ${large(work.after)} of ${large(work.before)}` },
      svg("rect", { class: "track", width: "100%", height: "100%", rx: 3 }),
      svg("rect", { class: "fill", width: `${(100 * share).toFixed(2)}%`, height: "100%", rx: 3 }));
    const name = el("span", { class: "bar-name" }, work.unit, work.why ? el("span", { class: "quiet" }, work.why) : null);
    const value = el("span", { class: "bar-value" }, el("b", {}, `${large(work.after)} of ${large(work.before)}`), el("span", { class: "quiet" }, ` −${Math.round(100 * (1 - share))} %`));
    return el("li", { class: "timing role-refold" }, name, drawing, value);
  }

  function showLeftOut() {
    if (!data.left_out.length) return byId("left-out").remove();
    byId("left-out").append(el("ol", { class: "bars" }, data.left_out.map(workLeft)));
  }

  function showSummary() {
    const machine = data.machine.description;
    byId("subtitle").append([data.model.class_name, machine, data.created].filter(Boolean).join("  ·  "));
    byId("tiles").append(speedTile(), exactTile(), changeTile(), modelTile());
    showLeftOut();
    if (data.headroom) byId("notes").append(el("p", { class: "note" }, `Headroom: ${data.headroom.sentence}`));
    for (const note of data.notes) byId("notes").append(el("p", { class: "note" }, note));
    showTimings();
  }

  Refold.tone = tone;
  Refold.showSummary = showSummary;
})();
