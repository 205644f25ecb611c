// The page: its subject (the drawing on the pad, or a selected picture), the state of the server, and all events.

import { showAnswer, showSteps } from "./answer.js";
import * as api from "./api.js";
import { showChips, showClasses } from "./classes.js";
import { DOODLES } from "./doodles.js";
import { dropped, pasted } from "./dropped.js";
import { colour, get, keyed, make, percent } from "./elements.js";
import { drawn, Pad } from "./pad.js";

const MOST_ASKED = 60; // the most pictures that are classified at a time

let desk = null; // the server's state
let pictures = []; // {key, file, url, answer}: pictures that are classified
let inHand = null; // the selected picture, or null for the pad
let adding = null; // the class to which chosen files are added, or null to classify them
let keys = 0;

const pad = new Pad(get("pad"), () => {
  if (!pad.empty && inHand) select(null);
  showHand();
  updateAnswer();
});

// ------------------------------------------------------------------------------------------- errors

let errorsShown = 0;

function showError(message) {
  errorsShown += 1;
  get("error").hidden = false;
  get("error").firstElementChild.textContent = message;
}

get("error").lastElementChild.addEventListener("click", () => { get("error").hidden = true; });

// Run a request that the server may refuse. Then its message is shown, and the result is null. A success hides the
// errors from before the request, and not one that was shown while it ran.
async function attempt(work) {
  const before = errorsShown;
  try {
    const result = await work();
    if (errorsShown === before) get("error").hidden = true;
    return result;
  } catch (error) {
    if (!(error instanceof api.Refused)) throw error;
    showError(error.message);
    return null;
  }
}

// ------------------------------------------------------------------------------------------- the state of the server

async function changed(work, then = () => {}) {
  const state = await attempt(work);
  if (!state) return null;
  showState(state);
  then(state);
  await updateAnswer();
  for (const picture of pictures) if (picture !== inHand) await ask(picture);
  return state;
}

function showState(state) {
  desk = state;
  api.limit(desk.limits.picture_bytes);
  showClasses(desk, acts);
  showChips(desk, teach);
  showHand();
  showSettings();
  get("settings").hidden = false;
}

const acts = {
  rename: (number, name) => changed(() => api.rename(number, name)),
  removeClass: (number) => changed(() => api.removeClass(number)),
  removePicture: (number) => changed(() => api.removePicture(number)),
  choose: (number) => { adding = number; get("files").click(); },
};

const current = async () => (inHand ? inHand.file : pad.empty ? null : pad.picture());

async function teach(number) {
  const picture = await current();
  if (picture) await changed(() => api.addPicture(number, picture), clearSubject);
}

async function teachNew(name) {
  const picture = await current();
  if (!picture || !name) return;
  await changed(() => api.addClass(name, picture), () => {
    get("new-name").value = "";
    clearSubject();
  });
}

// After a picture was added to a class: clear the pad, or select the next picture.
function clearSubject() {
  if (inHand) {
    const place = pictures.indexOf(inHand);
    forget(inHand);
    select(pictures[place] ?? pictures[place - 1] ?? null);
  } else {
    pad.clear();
    get("pad").focus({ preventScroll: true });
  }
}

// ------------------------------------------------------------------------------------------- answers

let wanted = false;
let updating = null;

// Classify the subject. While a request is running, at most one further request waits: the newest.
function updateAnswer() {
  wanted = true;
  updating ??= (async () => {
    while (wanted) {
      wanted = false;
      await updateAnswerOnce();
    }
  })().finally(() => { updating = null; });
  return updating;
}

async function updateAnswerOnce() {
  const subject = inHand;
  const file = await current();
  if (!desk) return; // it is called again when the state has arrived
  if (!file) return showAbout(null);
  const answer = await attempt(() => api.ask(file));
  if (subject !== inHand || (!subject && pad.empty)) return;
  if (subject && answer) subject.answer = answer;
  showAbout(answer);
  showPictures();
}

function showAbout(answer) {
  if (answer && (answer.ranked || answer.blank)) showAnswer(answer, desk);
  else showSteps(desk, Boolean(inHand) || !pad.empty);
}

async function ask(picture) {
  const answer = await attempt(() => api.ask(picture.file));
  if (!answer) return forget(picture);
  picture.answer = answer;
  showPictures();
}

// ------------------------------------------------------------------------------------------- the subject and the pictures

function showHand() {
  const some = Boolean(inHand) || !pad.empty;
  get("pad-hint").hidden = some;
  get("undo-stroke").disabled = pad.empty;
  get("clear-pad").disabled = !some;
  get("teach").firstElementChild.disabled = !some;
  const shown = get("pad-picture");
  shown.hidden = !inHand;
  if (inHand && shown.dataset.key !== String(inHand.key)) {
    shown.dataset.key = inHand.key;
    shown.alt = inHand.file.name;
    shown.src = inHand.url;
  }
}

// If the browser cannot show a format, the server sends the picture as PNG.
get("pad-picture").addEventListener("error", () => {
  const shown = get("pad-picture");
  if (inHand?.answer && shown.src !== inHand.answer.shown) shown.src = inHand.answer.shown;
});

function select(picture) {
  inHand = picture;
  if (picture && !pad.empty) pad.clear();
  showHand();
  showPictures();
  if (picture?.answer) showAbout(picture.answer);
  else updateAnswer();
}

function showPictures() {
  get("asked").hidden = !pictures.length;
  keyed(
    get("pictures"),
    pictures,
    (picture) => picture.key,
    (picture) => make("li", {}, make("button", { type: "button", onclick: () => select(picture) },
      make("img", { alt: "", width: 96, height: 96 }), make("b"), make("span"))),
    (element, picture) => {
      const [image, name, share] = element.firstChild.children;
      const { answer } = picture;
      const best = answer?.ranked?.[0];
      if (answer && image.getAttribute("src") !== answer.shown) image.src = answer.shown;
      element.className = `${best && !answer.none ? colour(best.class) : ""}${answer?.light ? " light" : ""}`;
      element.firstChild.setAttribute("aria-pressed", String(picture === inHand));
      element.firstChild.title = picture.file.name;
      name.textContent = !best ? "…" : answer.none ? "none of these" : best.name;
      share.textContent = best ? percent(best.probability) : "";
    },
  );
}

async function addPictures(files) {
  if (files.length > MOST_ASKED) showError(`${files.length} pictures were dropped; only the first ${MOST_ASKED} are classified.`);
  for (const file of files.slice(0, MOST_ASKED)) {
    if (pictures.length >= MOST_ASKED) forget(pictures[0]);
    const picture = { key: ++keys, file, url: URL.createObjectURL(file), answer: null };
    pictures.push(picture);
    await ask(picture);
    if (!inHand && pad.empty && pictures.includes(picture)) select(picture);
  }
}

function forget(picture) {
  pictures = pictures.filter((one) => one !== picture);
  URL.revokeObjectURL(picture.url);
  if (inHand === picture) select(null);
  showPictures();
}

async function teachAll(number, files) {
  for (const file of files) if (!await attempt(async () => showState(await api.addPicture(number, file)) ?? true)) break;
  await changed(api.state);
}

async function teachFolders(classes) {
  for (const [name, [first, ...rest]] of Object.entries(classes)) {
    const known = desk.classes.find((one) => one.name === name);
    const number = known?.number ?? (await changed(() => api.addClass(name, first)))?.made;
    if (number) await teachAll(number, known ? [first, ...rest] : rest);
  }
}

// ------------------------------------------------------------------------------------------- settings

function showSettings() {
  const { model, none } = desk;
  fill(get("model"), desk.models.map((name) => [name, name === "automatic" ? "chosen for the pictures" : name]), model.asked);
  fill(get("rate"), none.rates.map((rate) => [rate, rate ? `${Math.round(100 * rate)} % false alarms` : "never"]), none.rate);
  get("save").hidden = !desk.ready;
  const calibrated = model.temperature !== null && model.temperature !== 1;
  get("used").textContent = `${model.used}, trained on ${model.training}${calibrated ? "; calibrated probabilities" : ""}`;
  const why = [
    model.why,
    calibrated ? `Scores are divided by ${model.temperature.toPrecision(3)} before they become probabilities, as the model's card says.` : "",
    none.why || (desk.ready && none.rate ? none.why_not : ""),
    "For a model of drawings, the paper of a picture is evened out, its ink is moved to the middle, and its strokes get the width of the training pictures.",
  ];
  get("why").replaceChildren(...why.filter(Boolean).map((text) => make("li", {}, text)));
}

function fill(select, choices, value) {
  select.replaceChildren(...choices.map(([key, text]) => make("option", { value: key }, text)));
  select.value = String(value);
}

get("model").addEventListener("change", (event) => changed(() => api.settings({ model: event.target.value })));
get("rate").addEventListener("change", (event) => changed(() => api.settings({ rate: Number(event.target.value) })));

// ------------------------------------------------------------------------------------------- buttons, keys, dropping

get("undo-stroke").addEventListener("click", () => pad.undo());
get("clear-pad").addEventListener("click", () => (inHand ? forget(inHand) : pad.clear()));
get("choose").addEventListener("click", () => { adding = null; get("files").click(); });
get("files").addEventListener("change", async (event) => {
  const files = [...event.target.files];
  event.target.value = "";
  await (adding ? teachAll(adding, files) : addPictures(files));
});
get("teach").addEventListener("submit", (event) => {
  event.preventDefault();
  teachNew(get("new-name").value.trim());
});
get("undo").addEventListener("click", () => changed(api.undo));
get("clear").addEventListener("click", () => changed(api.clear));
get("clear-asked").addEventListener("click", () => { for (const picture of [...pictures]) forget(picture); });
get("doodles").addEventListener("click", async () => {
  for (const [name, strokes] of Object.entries(DOODLES)) {
    const picture = await drawn(strokes);
    if (!await attempt(async () => showState(await api.addClass(name, picture)) ?? true)) break;
  }
  await updateAnswer();
});

document.addEventListener("keydown", (event) => {
  const writing = event.target.closest("input, select, textarea");
  if (writing || event.ctrlKey || event.metaKey || event.altKey || !desk) return;
  if (/^[1-9]$/.test(event.key) && desk.classes[event.key - 1]) teach(desk.classes[event.key - 1].number);
  else if (event.key === "n" && (inHand || !pad.empty)) get("new-name").focus();
  else return;
  event.preventDefault();
});

document.addEventListener("paste", (event) => {
  const files = pasted(event.clipboardData);
  if (files.length) addPictures(files);
});

let inside = 0;
const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
const target = (event) => event.target.closest?.("[data-class]");

for (const [kind, step] of [["dragenter", 1], ["dragleave", -1]]) {
  document.addEventListener(kind, (event) => {
    if (!carriesFiles(event)) return;
    inside += step;
    get("drop").hidden = inside <= 0;
  });
}
document.addEventListener("dragover", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  for (const one of get("classes").children) one.classList.toggle("over", one === target(event));
});
document.addEventListener("drop", async (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  inside = 0;
  get("drop").hidden = true;
  const onto = target(event);
  for (const one of get("classes").children) one.classList.remove("over");
  const { files, classes } = await dropped(event.dataTransfer);
  if (!files.length && !Object.keys(classes).length) return showError("No picture was dropped.");
  await teachFolders(classes);
  if (files.length) await (onto ? teachAll(Number(onto.dataset.class), files) : addPictures(files));
});

// ------------------------------------------------------------------------------------------- start

followTheme(() => pad.paint())();
changed(api.state);
