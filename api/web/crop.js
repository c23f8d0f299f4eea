// A part of the query picture as a new query: a frame that the user drags, or moves with the arrow keys.

import { fail, ui } from "/web/dom.js";
import { whyBroken } from "/web/pictures.js";
import { query } from "/web/search.js";

let frame = { x: 0.2, y: 0.2, w: 0.6, h: 0.6 }; // shares of the picture's width and height
const THUMBNAIL = "?size=1024"; // the largest
const LEAST = 0.05;
const MOST_PIXELS = 2048; // of a side of the part
const between = (low, value, high) => Math.min(Math.max(value, low), high);

function draw() {
  const { x, y, w, h } = frame;
  Object.assign(ui.box.style, { left: `${100 * x}%`, top: `${100 * y}%`, width: `${100 * w}%`, height: `${100 * h}%` });
  const { naturalWidth, naturalHeight } = ui.cropImage;
  ui.cropSize.textContent = naturalWidth ? `${Math.round(w * naturalWidth)} × ${Math.round(h * naturalHeight)} of ${naturalWidth} × ${naturalHeight} px` : "";
}

const moveTo = (x, y) => (frame = { ...frame, x: between(0, x, 1 - frame.w), y: between(0, y, 1 - frame.h) });

function span(one, other) { // the frame between two corners
  const [x, y] = [0, 1].map((i) => between(0, Math.min(one[i], other[i]), 1 - LEAST));
  const [w, h] = [x, y].map((low, i) => between(LEAST, Math.max(one[i], other[i]) - low, 1 - low));
  frame = { x, y, w, h };
}

ui.stage.onpointerdown = (event) => {
  const size = ui.stage.getBoundingClientRect();
  const at = ({ clientX, clientY }) => [(clientX - size.left) / size.width, (clientY - size.top) / size.height];
  const start = at(event);
  const before = frame;
  const corners = [[0, 0], [1, 0], [0, 1], [1, 1]].map(([i, j]) => [before.x + i * before.w, before.y + j * before.h]);
  const isNear = ([x, y]) => Math.hypot((x - start[0]) * size.width, (y - start[1]) * size.height) < 20;
  const held = corners.findIndex(isNear);
  const isInside = start.every((value, i) => value > corners[0][i] && value < corners[3][i]);
  event.preventDefault();
  ui.box.focus();
  ui.stage.setPointerCapture(event.pointerId);
  ui.stage.onpointermove = (moved) => {
    const now = at(moved);
    if (held >= 0) span(corners[3 - held], now); // the opposite corner stays
    else if (isInside) moveTo(before.x + now[0] - start[0], before.y + now[1] - start[1]);
    else span(start, now);
    draw();
  };
};
ui.stage.onpointerup = ui.stage.onpointercancel = () => (ui.stage.onpointermove = null);

ui.box.onkeydown = (event) => {
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!way) return;
  event.preventDefault();
  const [dx, dy] = way.map((sign) => sign * 0.02);
  if (event.shiftKey) {
    const { x, y, w, h } = frame;
    frame = { x, y, w: between(LEAST, w + dx, 1 - x), h: between(LEAST, h + dy, 1 - y) };
  } else moveTo(frame.x + dx, frame.y + dy);
  draw();
};

ui.crop.onclick = () => {
  frame = { x: 0.2, y: 0.2, w: 0.6, h: 0.6 };
  ui.cropImage.removeAttribute("src"); // or the former picture would stay until this one has arrived
  ui.cropImage.src = query.urls[0];
  ui.cropSearch.disabled = true;
  ui.cropper.showModal();
  ui.box.focus();
  draw();
};
ui.cropImage.onload = () => {
  ui.cropSearch.disabled = false;
  draw();
};
ui.cropImage.onerror = async () => {
  const { src } = ui.cropImage;
  if (!query.upload && !src.endsWith(THUMBNAIL)) return (ui.cropImage.src = `${src}${THUMBNAIL}`); // a JPEG, unlike a HEIC file
  ui.cropper.close();
  const reason = query.upload ? "This browser cannot show the picture" : await whyBroken(src);
  fail(new Error(`${reason}, so it cannot be cropped.`));
};

// Calls `take` with the part as a file.
export function onCrop(take) {
  ui.cropSearch.onclick = async () => {
    const { naturalWidth, naturalHeight } = ui.cropImage;
    const [x, w] = [frame.x, frame.w].map((share) => Math.round(share * naturalWidth));
    const [y, h] = [frame.y, frame.h].map((share) => Math.round(share * naturalHeight));
    const scale = Math.min(1, MOST_PIXELS / Math.max(w, h));
    const [width, height] = [w, h].map((side) => Math.max(Math.round(scale * side), 1));
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    canvas.getContext("2d").drawImage(ui.cropImage, x, y, w, h, 0, 0, width, height);
    const blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.95));
    ui.cropper.close();
    if (!blob) return fail(new Error("This part could not be cut out."));
    take([new File([blob], `Part of ${ui.queryTitle.textContent.replace(/^Part of /, "")}`, { type: blob.type })]);
  };
}
