// Helpers that create and update elements.

export const get = (id) => document.getElementById(id);

// An element with attributes, listeners (onclick: …) and children. Text is never parsed as markup.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Update the children of a list for `items`. Elements of items that were there before are reused, so that pictures are
// not loaded again, the focus stays, and changes can be animated.
export function keyed(list, items, keyOf, create, update) {
  const existing = new Map([...list.children].map((element) => [element.dataset.key, element]));
  const wanted = items.map((item) => {
    const key = String(keyOf(item));
    let element = existing.get(key);
    if (!element) {
      element = create(item);
      element.dataset.key = key;
    }
    existing.delete(key);
    update?.(element, item);
    return element;
  });
  for (const removed of existing.values()) removed.remove();
  wanted.forEach((element, place) => {
    if (list.children[place] !== element) list.insertBefore(element, list.children[place] ?? null);
  });
}

const COLOURS = 8;
const chosen = new Map();

// Assign a colour to every class. A class keeps its colour until it is removed.
export function colours(numbers) {
  for (const number of chosen.keys()) if (!numbers.includes(number)) chosen.delete(number);
  for (const number of numbers) {
    if (chosen.has(number)) continue;
    const uses = Array(COLOURS).fill(0);
    for (const colour of chosen.values()) uses[colour]++;
    chosen.set(number, uses.indexOf(Math.min(...uses)));
  }
}

export const colour = (number) => `k${chosen.get(number) ?? 0}`;

export function percent(share) {
  if (share > 0.995 && share < 1) return "> 99 %";
  if (share > 0 && share < 0.005) return "< 1 %";
  return `${Math.round(100 * share)} %`;
}
