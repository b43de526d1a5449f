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

  function bytes(count) {
    for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (count >= size) return `${digits(count / size)} ${unit}`;
    }
    return `${count} bytes`;
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

  /** What a ratio means in words: only where the spread lies wholly on one side of 1, anything is decided. */
  function verdict(ratio) {
    return ratio.low > 1 ? "faster" : ratio.high < 1 ? "slower" : "undecided";
  }

  /** A ratio in two digits behind the point, or in as many as tell it from 1. */
  function times(value) {
    const places = [2, 3, 4].find((n) => value === 1 || Number(value.toFixed(n)) !== 1) || 2;
    return `${value.toFixed(places)}×`;
  }

  const data = JSON.parse(byId("report-data").textContent);
  return { data, el, svg, byId, bytes, count, digits, duration, error, large, times, verdict, whole };
})();
