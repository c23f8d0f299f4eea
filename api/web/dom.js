// The nodes of the page by id, and small helpers to fill them.

export const ui = Object.fromEntries([...document.querySelectorAll("[id]")].map((node) => [node.id, node]));

export function el(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

const format = new Intl.NumberFormat("en"); // much faster than toLocaleString
export const number = (value) => format.format(value);
export const counted = (n, one) => `${number(n)} ${one}${n === 1 ? "" : "s"}`;
export const ms = (value) => `${value < 10 ? value.toFixed(1) : number(Math.round(value))} ms`;
export const bytes = (n) => (n < 1e3 ? counted(n, "byte") : n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : `${(n / 1e6).toFixed(1)} MB`);
export const percent = (share) => `${(100 * share).toFixed(share > 0.995 || share < 0.1 ? 1 : 0)}%`;
// The path of a bar for each height from 0 to 1, in a box 1 high; `from` is the place of the first.
export const bars = (heights, from = 0) => heights.map((height, at) => (height ? `M${from + at} 1V${1 - height}h.85V1z` : "")).join("");
export const unseen = (text) => el("span", { className: "unseen" }, text);
export const splitLabels = (text) => [...new Set(text.split(";").map((label) => label.trim()).filter(Boolean))];

export function pairs(list, entries) {
  list.replaceChildren(...entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

// A link within the page: a new tab works; the listener in app.js takes over plain clicks.
export function inside(href, content, props = {}) {
  const link = el("a", { href, ...props }, content);
  link.dataset.go = "";
  return link;
}

// Waits for a pause of `wait` ms, so that a value that is dragged or typed is one search, not several.
export function afterPause(wait, work) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, wait);
  };
}

// Ignores calls while an earlier one is at work, such as the second click of a double click.
export function oneAtATime(work) {
  let busy = false;
  return async () => {
    if (busy) return;
    busy = true;
    try {
      await work();
    } finally {
      busy = false;
    }
  };
}

// Opens a dialog; returns the `value` of the button that closed it, or "".
export function asked(dialog) {
  dialog.returnValue = ""; // Escape must not repeat the last answer
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue), { once: true }));
}

// Asks before something is deleted.
export async function confirmed(title, text) {
  ui.confirmTitle.textContent = title;
  ui.confirmText.textContent = text;
  return (await asked(ui.confirm)) === "delete";
}

export function fail(error, retry = null) {
  if (error.name === "AbortError") return;
  ui.errorText.textContent = error.message;
  ui.retry.hidden = !retry || error.final; // asking again would give the same answer
  ui.retry.onclick = () => {
    clearMessages();
    retry();
  };
  ui.error.hidden = false;
}

export const focusTitle = () => ui.main.querySelector("section:not([hidden]) h2")?.focus({ preventScroll: true });

export function clearMessages() {
  ui.error.hidden = true;
  ui.notice.textContent = "";
}
