// Requests to the server. Every answer is JSON; a refused request has a message in `error`.

export class Refused extends Error {}

let mostBytes = Infinity;

// Larger files are not sent, because the server would close the connection without reading them.
export function limit(bytes) { mostBytes = bytes; }

async function call(method, path, body, headers = {}) {
  if (body instanceof Blob && body.size > mostBytes) {
    const megabytes = (bytes) => `${Math.round(bytes / 1e5) / 10} MB`;
    throw new Refused(`${body.name} has ${megabytes(body.size)}; a picture may have ${megabytes(mostBytes)}.`);
  }
  let answer;
  try {
    answer = await fetch(path, { method, body, headers });
  } catch {
    throw new Refused("The server does not answer. It may have been stopped; start `bilevel app` again.");
  }
  let content;
  try {
    content = await answer.json();
  } catch {
    throw new Refused(`The server answered with an error (${answer.status}).`);
  }
  if (!answer.ok) throw new Refused(content.error || `The server answered with an error (${answer.status}).`);
  return content;
}

const named = (picture) => ({ "X-Picture-Name": encodeURIComponent(picture.name || "the drawing") });

export const state = () => call("GET", "state");
export const settings = (changes) => call("PUT", "settings", JSON.stringify(changes));
export const ask = (picture) => call("POST", "ask", picture, named(picture));
export const addClass = (name, picture) =>
  call("POST", "classes", picture, { ...named(picture), "X-Class-Name": encodeURIComponent(name) });
export const rename = (number, name) => call("PUT", `classes/${number}`, JSON.stringify({ name }));
export const removeClass = (number) => call("DELETE", `classes/${number}`);
export const addPicture = (number, picture) => call("POST", `classes/${number}/pictures`, picture, named(picture));
export const removePicture = (number) => call("DELETE", `pictures/${number}`);
export const clear = () => call("DELETE", "classes");
export const undo = () => call("POST", "undo");
