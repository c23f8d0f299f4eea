// Filters by labels and attributes. They are part of the URL, and apply to searches and to the list of pictures.

import { FILTERS, refine, urlWith, wanted } from "/web/url.js";
import { el, inside, number, splitLabels, ui } from "/web/dom.js";
import { stats } from "/web/service.js";

const MOST_NAMES = 1000; // labels to choose from; others can be typed
const WORDS = { label: "", any_label: "any of: ", without: "not ", where: "" };

let offered = null; // the labels with their numbers that the list shows

export function showFilters() {
  const { filters } = wanted();
  ui.chosen.replaceChildren(...filters.map(([name, value], at) => {
    const words = `${WORDS[name]}${value}`;
    const without = urlWith({ filters: filters.toSpliced(at, 1) });
    return el("li", {}, inside(without, `${words} ×`, { className: `chip filter ${name}`, ariaLabel: `Remove the filter ${words}` }));
  }));
  ui.panelTitle.textContent = filters.length ? `Filters (${filters.length})` : "Filters";
  if (offered !== stats.labels) {
    offered = stats.labels;
    const names = Object.entries(offered).sort(([a, n], [b, m]) => m - n || a.localeCompare(b)).slice(0, MOST_NAMES);
    ui.names.replaceChildren(...names.map(([name, n]) => new Option(number(n), name)));
  }
  hint();
}

function hint() {
  const isLabel = ui.kind.value !== "where";
  ui.condition.placeholder = ui.kind.selectedOptions[0].dataset.hint;
  ui.condition.setAttribute("list", isLabel ? "names" : "");
}

ui.kind.onchange = hint;
ui.filters.onsubmit = (event) => {
  event.preventDefault();
  const typed = ui.kind.value === "where" ? [ui.condition.value.trim()].filter(Boolean) : splitLabels(ui.condition.value);
  if (!typed.length) return;
  const { filters } = wanted();
  const all = new URLSearchParams([...filters, ...typed.map((value) => [ui.kind.value, value])]);
  ui.condition.value = "";
  const unique = FILTERS.flatMap((name) => [...new Set(all.getAll(name))].map((value) => [name, value]));
  refine({ filters: unique }, { step: true });
};
