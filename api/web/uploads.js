// Pictures that were dropped, chosen or cropped. IndexedDB keeps them for a day, so that Reload and Back find them.

const DAY = 86_400_000;
const inMemory = new Map(); // key -> the pictures of a query: {files, urls, stored}
const opened = (files) => ({ files, urls: files.map((file) => URL.createObjectURL(file)), stored: null });

const settled = (request) => new Promise((done, fail) => {
  request.onsuccess = () => done(request.result);
  request.onerror = () => fail(request.error);
});

let database = null; // the promise of the connection

function connect() {
  const request = indexedDB.open("hashseek", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("uploads");
  return settled(request);
}

// What `work` makes of the database; null where there is none, as in a private window of some browsers.
async function withUploads(mode, work) {
  try {
    database ??= connect();
    return await settled(work((await database).transaction("uploads", mode).objectStore("uploads")));
  } catch {
    return null;
  }
}

const yesterday = () => Date.now() - DAY;
withUploads("readwrite", (uploads) => uploads.delete(IDBKeyRange.upperBound(yesterday())));

// The key under which `find` has the pictures of a query from now on.
export async function keep(files) {
  const key = Date.now() + Math.random(); // a number that begins with the time, for `IDBKeyRange`
  inMemory.set(key, opened(files));
  await withUploads("readwrite", (uploads) => uploads.put(files, key));
  return key;
}

// The pictures, or null if they are gone.
export async function find(key) {
  if (key < yesterday()) return null;
  if (!inMemory.has(key)) {
    const files = await withUploads("readonly", (uploads) => uploads.get(key));
    if (!files) return null;
    inMemory.set(key, opened(files));
  }
  return inMemory.get(key);
}

export const forgetAll = () => withUploads("readwrite", (uploads) => uploads.clear());

export function forgetStored(id) {
  for (const upload of inMemory.values()) if (upload.stored === id) upload.stored = null;
}
