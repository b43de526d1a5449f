// Light, dark or as the system says. It runs in the head, so that a dark page never flashes white.
"use strict";

const RefoldTheme = (() => {
  const CHOICES = ["auto", "light", "dark"];
  const SIGNS = { auto: "◐", light: "☀", dark: "☾" };
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let choice = saved();

  function saved() {
    try {
      const theme = localStorage.getItem("refold-theme");
      return CHOICES.includes(theme) ? theme : "auto";
    } catch {
      return "auto";
    }
  }

  function save() {
    try {
      localStorage.setItem("refold-theme", choice);
    } catch {
      // a page opened from a file may have no storage: the choice then lasts until it is closed
    }
  }

  function apply() {
    const dark = choice === "dark" || (choice === "auto" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    const button = document.getElementById("theme");
    if (!button) return;
    button.textContent = SIGNS[choice];
    button.title = `colours: ${choice} (t)`;
  }

  function next() {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    save();
    apply();
  }

  system.addEventListener("change", apply);
  apply();
  return { apply, next };
})();
