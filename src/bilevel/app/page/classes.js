// The classes with their labelled pictures.

import { colour, colours, get, keyed, make } from "./elements.js";

// `acts` holds the actions: rename, removeClass, removePicture, choose (files for a class).
export function showClasses(desk, acts) {
  colours(desk.classes.map((one) => one.number));
  get("known-empty").hidden = desk.classes.length > 0;
  get("clear").disabled = !desk.classes.length;
  get("undo").disabled = !desk.undo;
  keyed(
    get("classes"),
    desk.classes,
    (one) => one.number,
    (one) => create(one, acts),
    (element, one) => {
      element.className = colour(one.number);
      const name = element.querySelector("input");
      if (document.activeElement !== name) name.value = one.name;
      name.dataset.before = one.name;
      element.querySelector(".remove").setAttribute("aria-label", `Remove the class ${one.name}`);
      element.querySelector(".more").setAttribute("aria-label", `Add pictures of ${one.name}`);
      keyed(
        element.querySelector("ul"),
        one.pictures,
        (picture) => picture.number,
        (picture) => createPicture(picture, acts),
        (item, picture) => {
          item.classList.toggle("light", picture.light);
          item.firstChild.setAttribute("aria-label", `Remove ${picture.name} from ${one.name}`);
        },
      );
    },
  );
}

function create(one, acts) {
  const name = make("input", {
    type: "text",
    maxlength: 40,
    spellcheck: "false",
    "aria-label": "Name of the class",
    onchange: () => acts.rename(one.number, name.value).then((taken) => { if (!taken) name.value = name.dataset.before; }),
    onkeydown: (event) => {
      if (event.key === "Enter") name.blur();
      if (event.key === "Escape") { name.value = name.dataset.before; name.blur(); }
    },
  });
  return make(
    "li",
    { "data-class": one.number },
    make("div", { class: "row" },
      make("span", { class: "dot", "aria-hidden": "true" }),
      name,
      make("button", { type: "button", class: "icon more", title: "Add pictures", onclick: () => acts.choose(one.number) }, "+"),
      make("button", { type: "button", class: "icon remove", title: "Remove the class", onclick: () => acts.removeClass(one.number) }, "×"),
    ),
    make("ul", { class: "examples" }),
  );
}

function createPicture(picture, acts) {
  return make("li", {}, make(
    "button",
    { type: "button", title: `${picture.name}: click to remove`, onclick: () => acts.removePicture(picture.number) },
    make("img", { src: `pictures/${picture.number}/shown.png`, alt: "", width: 56, height: 56 }),
    make("img", { class: "seen", src: `pictures/${picture.number}/seen.png`, alt: "", width: 56, height: 56, loading: "lazy" }),
  ));
}

// The buttons under the pad, one for every class. The first nine can be pressed with a key.
export function showChips(desk, teach) {
  keyed(
    get("chips"),
    desk.classes,
    (one) => one.number,
    (one) => make("button", { type: "button", onclick: () => teach(one.number) }, make("span", {}), make("kbd", {})),
    (element, one) => {
      const place = desk.classes.indexOf(one) + 1;
      element.className = `chip ${colour(one.number)}`;
      element.firstChild.textContent = one.name;
      element.lastChild.textContent = place < 10 ? place : "";
      element.title = place < 10 ? `Add it to ${one.name} (key ${place})` : `Add it to ${one.name}`;
    },
  );
}
