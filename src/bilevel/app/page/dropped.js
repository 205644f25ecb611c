// Pictures that are dropped or pasted. A dropped folder is a class, or contains folders that are classes.

const KINDS = /\.(png|jpe?g|bmp|gif|tiff?|webp|ppm|pgm|pbm|avif|heic|heif)$/i;
const isPicture = (file) => file.type.startsWith("image/") || KINDS.test(file.name);

// The dropped files: single files, and files of folders by the name of the class.
export async function dropped(transfer) {
  // The entries must be read before the first await, because the browser empties the list afterwards.
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const loose = [...transfer.files];
  if (!entries.some((entry) => entry.isDirectory)) return { files: loose.filter(isPicture), classes: {} };
  const found = { files: [], classes: {} };
  for (const entry of entries) {
    if (entry.isFile) found.files.push(await fileOf(entry));
    else await takeFolder(entry, found.classes);
  }
  found.files = found.files.filter(isPicture);
  return found;
}

export const pasted = (transfer) => [...transfer.files].filter(isPicture);

async function takeFolder(folder, classes) {
  const inside = (await list(folder)).filter((entry) => !entry.name.startsWith("."));
  const files = await Promise.all(inside.filter((entry) => entry.isFile).map(fileOf));
  const pictures = files.filter(isPicture);
  if (pictures.length) classes[folder.name] = pictures;
  for (const entry of inside.filter((one) => one.isDirectory)) await takeFolder(entry, classes);
}

async function list(folder) {
  const reader = folder.createReader();
  const all = [];
  // A reader returns a few entries at a time, and none at the end.
  for (;;) {
    const some = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (!some.length) return all.sort((a, b) => a.name.localeCompare(b.name));
    all.push(...some);
  }
}

const fileOf = (entry) => new Promise((done, failed) => entry.file(done, failed));
