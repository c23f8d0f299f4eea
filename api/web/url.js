// The URL is the state: ?id=12&max_distance=40&rank=float&label=sky&without=people, or ?view=duplicates&radius=2.
// Links, Reload, Back and Forward all end in show(). history.state has what a URL cannot share: the dropped picture, and
// the scroll position.

import { focusTitle, ui } from "/web/dom.js";
import { ofVectors, stats } from "/web/service.js";

const VIEWS = ["duplicates", "overview"]; // besides searches and the list of all pictures
export const FILTERS = ["label", "any_label", "without", "where"];
const KNOWN = ["view", "radius", "id", "max_distance", "rank", ...FILTERS];

let show = null;
let moved = false; // whether the reader followed a link, which may be gone when its target is shown
export const onMove = (listener) => (show = listener);

export function wanted() {
  const params = new URLSearchParams(location.search);
  const whole = (name) => (/^\d+$/.test(params.get(name) ?? "") ? Number(params.get(name)) : null);
  const id = whole("id");
  const upload = id === null ? (history.state?.upload ?? null) : null;
  const rank = params.get("rank") ?? "";
  const view = id === null && !upload && VIEWS.includes(params.get("view")) ? params.get("view") : null;
  const unknown = [...new Set(params.keys())].filter((name) => !KNOWN.includes(name));
  const filters = FILTERS.flatMap((name) => params.getAll(name).filter(Boolean).map((value) => [name, value]));
  return { view, radius: whole("radius"), id, upload, max: whole("max_distance"), rank, filters, unknown };
}

// Whether the service can order hits this way: a stored query has no outputs. "" leaves the choice to the service.
export const canRank = (rank, id) =>
  ({ "": true, hamming: true, asymmetric: id === null && !ofVectors(), float: stats?.keeps_features })[rank] ?? false;

// The present URL with some parts changed; null removes a part.
export function urlWith(changes) {
  const { view, radius, id, max, rank, filters } = { ...wanted(), ...changes };
  const single = Object.entries({ view, radius, id, max_distance: max, rank }).filter(([, value]) => value !== null && value !== "");
  const search = new URLSearchParams([...single.filter(([name]) => name !== "rank" || canRank(rank, id)), ...filters]);
  return search.size ? `?${search}` : "./";
}

export const alike = (id) => urlWith({ view: null, radius: null, id });

export const remember = (more) => history.replaceState({ ...history.state, ...more }, "");

// A step in the history; `state` has the key of a dropped picture.
export async function go(href, state = null) {
  remember({ y: scrollY });
  history.pushState({ ...state, y: 0 }, "", href);
  moved = true;
  await show();
}

// For show() when it has shown everything.
export function arrived() {
  if (moved) focusTitle();
  moved = false;
}

// Which query and filters are shown: a slider that moved on another page counts no more.
export const place = () => `${location.search} ${history.state?.upload}`;

// Another filter is a step in the history; a radius or an order is not.
export function refine(changes, { step = false } = {}) {
  const { upload } = wanted();
  if (step) remember({ y: scrollY });
  const y = Math.min(scrollY, ui.main.offsetTop);
  history[step ? "pushState" : "replaceState"]({ upload, y }, "", urlWith(changes));
  show();
}
