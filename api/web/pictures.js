// How a stored picture looks in a list: its thumbnail and its labels.

import { alike } from "/web/url.js";
import { el, inside, unseen } from "/web/dom.js";
import { noun } from "/web/service.js";

// An upload is stored under a name made of its content; an attribute has its own.
export const named = (image) => image.key || image.attributes.filename || image.path.split("/").pop();
export const described = (image) => image.labels.join(", ") || named(image);
export const day = (time, more = {}) => new Date(time).toLocaleString("en-GB", { dateStyle: "medium", ...more });

export function chips(labels, shared = new Set(), most = Infinity) {
  const ordered = [...labels].sort((a, b) => shared.has(b) - shared.has(a)); // stable: shared ones first
  const items = ordered.slice(0, most).map((label) => (shared.has(label)
    ? el("li", { className: "chip shared" }, label, unseen(" (shared with the query)"))
    : el("li", { className: "chip" }, label)));
  const rest = ordered.slice(most);
  return rest.length ? [...items, el("li", { className: "chip rest", title: rest.join(", ") }, `+${rest.length}`)] : items;
}

// Why a picture does not load.
export async function whyBroken(url) {
  const answer = await fetch(url, { method: "HEAD" }).catch(() => null);
  return answer?.status === 410 ? "File missing" : "Cannot be shown now";
}

export const searchLink = (image) => inside(alike(image.id), thumbnail(image), { className: "frame", ariaLabel: `Search with ${noun()} ${image.id}: ${described(image)}` });

export function thumbnail(image) {
  const { url, width, height } = image;
  if (url === null) return el("span", { className: "name" }, named(image)); // a vector has no picture
  // loading comes before src: set afterwards it would be too late to be lazy
  const picture = el("img", { loading: "lazy", decoding: "async", draggable: false, alt: described(image), width, height,
    onerror: async () => picture.replaceWith(el("span", { className: "name" }, await whyBroken(picture.src), el("small", {}, named(image)))),
    srcset: `${url}?size=256, ${url}?size=512 2x`, src: `${url}?size=256` });
  return picture;
}
