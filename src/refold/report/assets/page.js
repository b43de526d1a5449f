// The small vocabulary of the page: the data, elements made without markup, and how numbers are written.
"use strict";

const Refold = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  /** An HTML element. Text becomes a text node: nothing in this page ever parses data as markup. */
  function el(tag, attributes, ...children) {
    return fill(document.createElement(tag), attributes, children);
  }

  function svg(tag, attributes, ...children) {
    return fill(document.createElementNS(SVG, tag), attributes, children);
  }

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return element;
  }

  function byId(id) {
    return document.getElementById(id);
  }

  const whole = new Intl.NumberFormat("en-US");

  function count(number, word) {
    return `${whole.format(number)} ${word}${number === 1 ? "" : "s"}`;
  }

  function digits(value, n = 3) {
    return Number(value.toPrecision(n)).toString();
  }

  function duration(seconds) {
    if (!Number.isFinite(seconds)) return String(seconds);
    for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
      if (seconds >= size) return `${digits(seconds / size)} ${unit}`;
    }
    return `${digits(seconds / 1e-9)} ns`;
  }

  function large(number) {
    for (const [unit, size] of [["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
      if (number >= size) return `${digits(number / size)} ${unit}`;
    }
    return String(number);
  }

  /** An error of an output: numbers JSON cannot hold arrive as their names. */
  function error(value) {
    if (value === null) return "–";
    if (typeof value === "string") return value;
    return value === 0 ? "0" : value.toExponential(1);
  }

  /** What a ratio means in words: "faster", "slower" or "same" where the spread holds 1, or the ratio reads as 1. */
  function verdict(ratio) {
    if ((ratio.low <= 1 && ratio.high >= 1) || times(ratio.median) === times(1)) return "same";
    return ratio.median > 1 ? "faster" : "slower";
  }

  function times(value) {
    return `${value.toFixed(2)}×`;
  }

  const data = JSON.parse(byId("report-data").textContent);
  return { data, el, svg, byId, count, digits, duration, error, large, times, verdict, whole };
})();
