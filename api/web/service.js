// Requests to the service, signing in, and what the collection holds.

import { asked, ui } from "/web/dom.js";

export let stats = null; // of /v1/stats; null until they have arrived
export let session = { key: null, role: "read" };

export const ofVectors = () => stats?.holds === "vectors";
export const inFolder = () => "built" in stats.index; // otherwise another server keeps it, and some requests are refused
export const noun = () => (ofVectors() ? "vector" : "picture");
export const titled = (id) => `${ofVectors() ? "Vector" : "Picture"} ${id}`;
// Relative, since the API of a collection is below its page at /collections/NAME/.
export const imagePath = (id) => `v1/images/${encodeURIComponent(id)}`;
export const mayChange = () => !stats.read_only && session.role !== "read";

export async function loadStats() {
  const { collections } = await api("/v1/collections");
  if (location.pathname === "/" && collections.length && collections[0].url !== "/") {
    location.replace(collections[0].url);
    await new Promise(() => {}); // until the user leaves this page
  }
  ui.collection.replaceChildren(...collections.map(({ name, url }) => new Option(name, url, false, url === location.pathname)));
  ui.choice.hidden = collections.length < 2;
  stats = await api("v1/stats");
  session = await api("/v1/session");
}

ui.collection.onchange = () => location.assign(ui.collection.value);

export const json = (method, content) => ({ method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) });

// The JSON answer, or an Error with one message for the reader. Waits while the service starts or is busy.
export async function api(path, options = {}) {
  for (;;) {
    const response = await fetch(path, options).catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Error("Cannot reach the service. Is it still running?");
    });
    if (response.ok) {
      ui.starting.textContent = "";
      return response.status === 204 ? null : response.json();
    }
    const { type = "", detail, title } = await response.json().catch(() => ({}));
    if (response.status === 401 && type.endsWith(":KeyNeeded") && (await signIn())) continue;
    if (response.status !== 503 && response.status !== 429) {
      const message = detail || title || `The service returned ${response.status} ${response.statusText}.`;
      throw Object.assign(new Error(message), { final: response.status < 500 && response.status !== 401 });
    }
    ui.starting.textContent = type.endsWith(":NotReady")
      ? "The service is starting. This page will continue when it is ready."
      : "The service is busy. This page will try again automatically.";
    await new Promise((done) => setTimeout(done, 1000 * Math.min(Number(response.headers.get("Retry-After")) || 1, 30)));
    options.signal?.throwIfAborted();
  }
}

let signingIn = null; // if several requests need a key at the same time, the user is asked once

function signIn() {
  signingIn ??= asked(ui.signIn).then((answer) => answer === "done").finally(() => (signingIn = null));
  return signingIn;
}

ui.signInForm.onsubmit = async (event) => {
  event.preventDefault();
  ui.signInError.textContent = "";
  // The service keeps the key in a cookie that no script can read.
  const headers = { Authorization: `Bearer ${ui.key.value.trim()}` };
  const response = await fetch("/v1/session", { method: "POST", headers }).catch(() => null);
  if (response?.ok) {
    ui.key.value = "";
    ui.signIn.close("done");
  } else {
    const { detail } = (await response?.json().catch(() => null)) ?? {};
    ui.signInError.textContent = detail ?? "Cannot reach the service.";
    ui.key.select();
  }
};

ui.signOut.onclick = async () => {
  await fetch("/v1/session", { method: "DELETE" });
  location.assign("./");
};
