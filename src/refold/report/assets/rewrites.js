// One card for each transformation, the table of executors, and the machine.
"use strict";

(() => {
  const { data, el, byId, count, bytes, duration, error, times, verdict } = Refold;
  const FIRST_ROWS = 5;
  const LONGEST_ALGEBRA = 6; // lines
  const STATUS_TONE = { kept: "good", "taken back": "warn", refused: "warn", "no match": "none" };

  function chip(text, tone = "plain") {
    return el("span", { class: `chip tone-${tone}` }, text);
  }

  /** A list that shows its first rows and the rest on demand, so that thousands of rows cost nothing. */
  function longList(rows, draw) {
    const list = el("ul", { class: "rows" }, rows.slice(0, FIRST_ROWS).map(draw));
    if (rows.length <= FIRST_ROWS) return list;
    const rest = el("button", { type: "button", class: "more" }, `show all ${Refold.whole.format(rows.length)}`);
    rest.addEventListener("click", () => {
      list.append(...rows.slice(FIRST_ROWS, 2000).map(draw));
      rest.remove();
    });
    return [list, rest];
  }

  /** A folded part whose content is made when it is first opened. */
  function folded(title, content) {
    const box = el("details", {}, el("summary", {}, title));
    box.addEventListener("toggle", () => box.childElementCount === 1 && box.append(el("div", { class: "inside" }, content())));
    return box;
  }

  function outputErrors(outputs) {
    if (!outputs.length) return null;
    const row = (one) => el("tr", {}, el("td", { class: "code" }, one.name), el("td", { class: "number" }, error(one.error)), el("td", { class: "number" }, error(one.baseline)), el("td", {}, one.note));
    return folded(`error of ${count(outputs.length, "output")}`, () =>
      el("div", { class: "scroll" }, el("table", {},
        el("thead", {}, el("tr", {}, ["output", "rewritten", "original", ""].map((name) => el("th", {}, name)))),
        el("tbody", {}, outputs.map(row)))));
  }

  function siteRow(site, number) {
    const names = (list) => Refold.shortText(list.join(", "), 90);
    const text = site.description || `${names(site.before)} → ${names(site.after)}`;
    return el("li", {}, el("button", { type: "button", class: "site", onclick: () => Refold.page.showSite(site, number) }, text));
  }

  function refusalGroups(refusals) {
    const groups = new Map();
    for (const refusal of refusals) groups.set(refusal.reason, [...(groups.get(refusal.reason) || []), refusal.node]);
    return [...groups].sort((a, b) => b[1].length - a[1].length);
  }

  function nodeButton(name) {
    return el("li", {}, el("button", { type: "button", class: "site code", onclick: () => Refold.page.showNamed(name) }, name));
  }

  function refusalRow([reason, nodes]) {
    return el("li", { class: "refusal" }, el("p", {}, reason), folded(count(nodes.length, "place"), () => longList(nodes, nodeButton)));
  }

  function gain(step) {
    if (!step.gain) return null;
    const kind = verdict(step.gain);
    const tone = { faster: "good", slower: "bad", undecided: "none" }[kind];
    const spread = `between ${times(step.gain.low)} and ${times(step.gain.high)}`;
    return el("div", { class: "fact" }, el("dt", {}, "Time"), el("dd", {}, chip({ faster: `${times(step.gain.median)} faster`, slower: `slower: ${times(step.gain.median)}`, undecided: "not decided" }[kind], tone), el("span", { class: "quiet" }, ` ${spread}`)));
  }

  function exactness(step) {
    const verification = step.verification;
    if (!verification) return null;
    return el("div", { class: "fact" }, el("dt", {}, "Exactness"),
      el("dd", {}, chip(verification.grade, Refold.tone(verification)), verification.sentence ? el("span", { class: "quiet" }, ` ${verification.sentence}`) : null, outputErrors(verification.outputs)));
  }

  /** What the rewrite does. Of a long text the first paragraph is shown, and the rest on demand. */
  function algebra(text) {
    if (!text) return null;
    const [first, ...rest] = text.split("\n").length <= LONGEST_ALGEBRA ? [text] : text.split(/\n\s*\n/);
    const block = (content) => el("pre", { class: "algebra" }, content);
    return [block(first), rest.length ? folded("all of it", () => block(rest.join("\n\n"))) : null];
  }

  function card(step, number) {
    const live = step.status === "kept" && step.sites.length > 0;
    return el("article", { class: `card hue-${number % 8} ${live ? "live" : ""}`, id: `rewrite-${number + 1}` },
      el("header", {}, el("span", { class: "step-number", "aria-hidden": "true" }, number + 1), el("h3", {}, step.name),
        el("span", { class: "chips" }, chip(step.status, STATUS_TONE[step.status]), step.kind ? chip(step.kind) : null)),
      algebra(step.algebra),
      step.note ? el("p", { class: "quiet" }, step.note) : null,
      el("dl", {}, gain(step), exactness(step)),
      step.sites.length ? [el("h4", {}, step.status === "kept" ? `Rewritten: ${count(step.sites.length, "place")}` : `${count(step.sites.length, "place")} matched`), longList(step.sites, (site) => siteRow(site, number))] : null,
      step.refusals.length ? folded(`Left alone: ${count(step.refusals.length, "place")}`, () => el("ul", { class: "rows" }, refusalGroups(step.refusals).map(refusalRow))) : null,
      step.signature ? el("p", { class: "signature quiet" }, `signature ${step.signature}`) : null);
  }

  function showExecutors() {
    if (!data.executors.length) return byId("executors").remove();
    const tones = { chosen: "good", tried: "plain", "not tried": "none" };
    const number = (value, write) => el("td", { class: "number" }, value === null ? "–" : write(value));
    const row = (one) => el("tr", {}, el("td", {}, el("b", {}, one.name)), el("td", {}, chip(one.choice, tones[one.choice])),
      number(one.seconds, duration), number(one.resident, bytes), number(one.peak, bytes), el("td", {}, one.why));
    return byId("executors").append(el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ["executor", "", "time", "holds", "peak", "why"].map((name) => el("th", {}, name)))), el("tbody", {}, data.executors.map(row)))));
  }

  function showMachine() {
    const rows = [...(data.machine.description ? [["machine", data.machine.description]] : []), ...data.machine.versions];
    if (!rows.length) return byId("machine").remove();
    return byId("machine").append(el("dl", { class: "versions" }, rows.map(([name, version]) => el("div", {}, el("dt", {}, name), el("dd", {}, version)))));
  }

  function unused(entries) {
    const box = folded(`${count(entries.length, "transformation")} changed nothing`, () => el("div", { class: "cards" }, entries.map(([step, number]) => card(step, number))));
    box.classList.add("unused");
    return box;
  }

  function showRewrites() {
    const cards = data.steps.map((step, number) => [step, number]);
    const idle = cards.filter(([step]) => step.status === "no match" || step.status === "refused");
    const busy = cards.filter((entry) => !idle.includes(entry));
    byId("cards").append(...busy.map(([step, number]) => card(step, number)));
    if (!busy.length) byId("cards").append(el("p", { class: "quiet" }, "No rewrite was made."));
    if (idle.length) byId("rewrites").append(unused(idle));
    showExecutors();
    showMachine();
  }

  Refold.chip = chip;
  Refold.outputErrors = outputErrors;
  Refold.showRewrites = showRewrites;
})();
