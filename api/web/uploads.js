// Pictures that were dropped, chosen or cropped. IndexedDB keeps them for a day, so that reload and Back find them again.

const DAY = 86_400_000;
const inMemory = new Map(); // key -> {file, url, stored}

const settled = (request) => new Promise((done, fail) => {
  request.onsuccess = () => done(request.result);
  request.onerror = () => fail(request.error);
});

async function store(mode) {
  const request = indexedDB.open("hashseek", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("uploads");
  return (await settled(request)).transaction("uploads", mode).objectStore("uploads");
}

// The key under which `find` has the picture from now on.
export async function keep(file) {
  const key = Date.now() + Math.random(); // a number that begins with the time, for `IDBKeyRange`
  inMemory.set(key, { file, url: URL.createObjectURL(file), stored: null });
  try {
    const uploads = await store("readwrite");
    uploads.delete(IDBKeyRange.upperBound(Date.now() - DAY));
    await settled(uploads.put(file, key));
  } catch { /* a private window may have no database: the picture lasts until the page is left */ }
  return key;
}

// The picture, or null if it is gone.
export async function find(key) {
  if (!inMemory.has(key)) {
    const file = await store("readonly").then((uploads) => settled(uploads.get(key))).catch(() => null);
    if (!file) return null;
    inMemory.set(key, { file, url: URL.createObjectURL(file), stored: null });
  }
  return inMemory.get(key);
}

export function forgetStored(id) {
  for (const upload of inMemory.values()) if (upload.stored === id) upload.stored = null;
}
