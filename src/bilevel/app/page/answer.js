// The prediction for the current picture: its class, all probabilities, the nearest examples.

import { colour, get, keyed, make, percent } from "./elements.js";

const ROWS = 8; // if there are more classes, only the most probable are shown

let announcement = 0; // the timer of the text for screen readers

// The next steps for the user, while there is no prediction.
export function showSteps(desk, inHand) {
  const known = desk.classes.length;
  const steps = [
    ["Draw something, and give it a name.", known >= 1],
    ["Draw something else, and give it another name.", known >= 2],
    ["Draw either of them again. It is recognised while you draw.", false],
  ];
  const now = steps.findIndex(([, done]) => !done);
  get("answer-empty").replaceChildren(
    make("ol", {}, ...steps.map(([text, done], i) => make("li", { class: done ? "done" : i === now ? "now" : "" }, text))),
    desk.problem ? make("p", { class: "small" }, desk.problem) : "",
    inHand && now < 2 ? make("p", { class: "small" }, "Write its name under the pad.") : "",
  );
  get("answer-empty").hidden = false;
  get("answer-full").hidden = true;
  get("verdict").textContent = "";
}

export function showAnswer(answer, desk) {
  const best = answer.ranked?.[0];
  get("answer-empty").hidden = true;
  get("answer-full").hidden = false;
  get("answer").classList.toggle("none", Boolean(answer.none));
  const said = answer.blank ? "Nothing" : answer.none ? "None of these" : best.name;
  const sure = answer.blank ? "the picture is blank" : answer.none ? `nearest: ${best.name}` : percent(best.probability);
  get("said").textContent = said;
  get("said").className = answer.blank || answer.none ? "" : colour(best.class);
  get("sure").textContent = sure;
  // On phones the answer is below the pad and not visible, so it is also shown above the pad.
  get("verdict").replaceChildren(make("b", { class: get("said").className }, said), ` ${sure}`);
  // Announced after a pause, because a screen reader cannot follow every stroke.
  clearTimeout(announcement);
  announcement = setTimeout(() => { get("said-aloud").textContent = `${said}, ${sure}.`; }, 700);
  bars(answer, desk);
  nearest(answer, desk);
  get("seen").lastElementChild.src = answer.seen;
  get("done").textContent = answer.done.length
    ? `Before the model saw it, ${listed(answer.done)}.`
    : "";
}

function bars(answer, desk) {
  const all = answer.ranked ?? [];
  const byClass = new Map(all.map((one) => [one.class, one]));
  const few = desk.classes.length <= ROWS;
  // A few classes keep their order, so that their bars can be followed. Of many, the most probable are shown.
  const rows = few ? desk.classes.map((one) => byClass.get(one.number)).filter(Boolean) : all.slice(0, ROWS);
  keyed(
    get("bars"),
    rows,
    (row) => row.class,
    () => make("li", {}, make("span", { class: "name" }), make("span", { class: "bar" }, make("i")), make("span", { class: "share" })),
    (element, row) => {
      element.className = `${colour(row.class)}${row.class === all[0].class && !answer.none ? " best" : ""}`;
      const [name, bar, share] = element.children;
      name.textContent = row.name;
      bar.firstChild.style.width = `${100 * row.probability}%`;
      share.textContent = percent(row.probability);
    },
  );
}

function nearest(answer, desk) {
  const names = new Map(desk.classes.map((one) => [one.number, one.name]));
  const light = new Set(desk.classes.flatMap((one) => one.pictures.filter((p) => p.light).map((p) => p.number)));
  const examples = answer.nearest ?? [];
  get("nearest").hidden = !examples.length;
  keyed(
    get("nearest").querySelector("ul"),
    examples,
    (one) => one.picture,
    (one) => make("li", {}, make("div", {}, make("img", { src: `pictures/${one.picture}/shown.png`, alt: "" })), make("span", {})),
    (element, one) => {
      element.className = `${colour(one.class)}${light.has(one.picture) ? " light" : ""}`;
      element.title = `Distance ${one.distance.toFixed(2)}: one minus the cosine of the features`;
      element.lastChild.textContent = names.get(one.class) ?? "";
    },
  );
}

const listed = (words) => (words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")}, and ${words.at(-1)}`);
