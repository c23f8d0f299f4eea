// Pictures that were dropped, chosen or cropped. IndexedDB keeps them for a day, so that Reload and Back find them.

const DAY = 86_400_000;
const inMemory = new Map(); // key -> the pictures of a query: {files, urls, stored}
const opened = (files) => ({ files, urls: files.map((file) => URL.createObjectURL(file)), stored: null });

const settled = (request) => new Promise((done, fail) => {
  request.onsuccess = () => done(request.result);
  request.onerror = () => fail(request.error);
});

async function store(mode) {
  const request = indexedDB.open("hashseek", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("uploads");
  return (await settled(request)).transaction("uploads", mode).objectStore("uploads");
}

// The key under which `find` has the pictures of a query from now on.
export async function keep(files) {
  const key = Date.now() + Math.random(); // a number that begins with the time, for `IDBKeyRange`
  inMemory.set(key, opened(files));
  try {
    const uploads = await store("readwrite");
    uploads.delete(IDBKeyRange.upperBound(Date.now() - DAY));
    await settled(uploads.put(files, key));
  } catch { /* a private window may have no database: the pictures last until the page is left */ }
  return key;
}

// The pictures, or null if they are gone.
export async function find(key) {
  if (!inMemory.has(key)) {
    const files = await store("readonly").then((uploads) => settled(uploads.get(key))).catch(() => null);
    if (!files) return null;
    inMemory.set(key, opened(files));
  }
  return inMemory.get(key);
}

export function forgetStored(id) {
  for (const upload of inMemory.values()) if (upload.stored === id) upload.stored = null;
}
