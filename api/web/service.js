// Requests to the service, signing in, and what the collection holds.

import { asked, fail, ui } from "/web/dom.js";
import { forgetAll } from "/web/uploads.js";

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
  ui.collection.replaceChildren(...collections.map(({ name, url }) => {
    const isHere = decodeURI(url) === decodeURI(location.pathname);
    return new Option(name, url, isHere, isHere);
  }));
  ui.choice.hidden = collections.length < 2;
  stats = await api("v1/stats");
  session = await api("/v1/session");
}

ui.collection.onchange = () => {
  const { value } = ui.collection;
  for (const option of ui.collection.options) option.selected = option.defaultSelected; // Back shows the page as it was left
  location.assign(value);
};

export const deleteImage = (id) => api(imagePath(id), { method: "DELETE" }).catch((error) => {
  if (error.status !== 404) throw error; // it was deleted elsewhere
});
export const json = (method, content) => ({ method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) });

// The JSON answer, or an Error with one message for the reader. Waits while the service starts or is busy.
export async function api(path, options = {}) {
  for (;;) {
    const response = await fetch(path, options).catch((error) => {
      if (error.name === "AbortError") throw error;
      ui.starting.textContent = "";
      throw new Error("Cannot reach the service. Is it still running?");
    });
    const { status, ok, headers } = response;
    const mayWait = status === 503 || status === 429;
    const { type = "", detail, title } = ok ? {} : await response.json().catch(() => ({}));
    ui.starting.textContent = !mayWait ? ""
      : type.endsWith(":NotReady") ? "The service is starting. This page will continue when it is ready."
      : `The service is busy${detail ? `: ${detail}` : ""}. This page will try again automatically.`;
    if (ok) return status === 204 ? null : response.json();
    if (mayWait) {
      await new Promise((done) => setTimeout(done, 1000 * Math.min(Number(headers.get("Retry-After")) || 1, 30)));
      options.signal?.throwIfAborted();
    } else if (status === 401 && type.endsWith(":KeyNeeded")) {
      if (!(await signIn())) throw new Error("Sign in to continue.");
    } else {
      const message = detail || title || `The service returned ${status} ${response.statusText}.`;
      throw Object.assign(new Error(message), { status, final: status < 500 && status !== 401 });
    }
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
    session = await response.json();
    ui.signInForm.reset();
    ui.signIn.close("done");
  } else {
    const { detail } = (await response?.json().catch(() => null)) ?? {};
    ui.signInError.textContent = detail ?? "Cannot reach the service.";
    ui.key.select();
  }
};

ui.signOut.onclick = async () => {
  try {
    await api("/v1/session", { method: "DELETE" });
    await forgetAll();
    location.assign("./");
  } catch (error) {
    fail(error);
  }
};
