// The drawing pad. Strokes have coordinates in [0, 1]. They are shown in the page's colours and sent as black on white.

const PEN = 0.051; // the width of the pen relative to the pad, as in the training pictures
const SIDE = 280; // the width of the picture that is sent, in pixels
const STEP = 0.02; // the distance that an arrow key moves the pen

export class Pad {
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.changed = changed; // called with true while a stroke is being drawn
    this.strokes = [];
    this.current = null;
    this.pen = { x: 0.5, y: 0.5, down: false, shown: false };
    canvas.addEventListener("pointerdown", (event) => this.begin(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, () => this.end());
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.showPen(canvas.matches(":focus-visible")));
    canvas.addEventListener("blur", () => { this.lift(); this.showPen(false); });
    new ResizeObserver(() => this.paint()).observe(canvas);
  }

  get empty() { return this.strokes.length === 0; }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height };
  }

  begin(event) {
    if (event.button !== 0 || this.current) return;
    event.preventDefault();
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.focus({ preventScroll: true });
    this.showPen(false);
    this.current = [this.place(event)];
    this.strokes.push(this.current);
    this.paint();
    this.changed(true);
  }

  move(event) {
    if (!this.current) return;
    // A fast pen has several positions between two events.
    const events = event.getCoalescedEvents ? event.getCoalescedEvents() : [event];
    for (const one of events.length ? events : [event]) this.current.push(this.place(one));
    this.paint();
    this.changed(true);
  }

  end() {
    if (!this.current) return;
    this.current = null;
    this.changed(false);
  }

  undo() {
    this.lift();
    this.strokes.pop();
    this.paint();
    this.changed(false);
  }

  clear() {
    this.pen.down = false;
    this.current = null;
    this.strokes = [];
    this.paint();
    this.changed(false);
  }

  // ------------------------------------------------------------------------------------------- the keyboard

  key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") this.undo();
    else if (event.key === "Escape") this.clear();
    else if (event.key === " ") this.pen.down ? this.lift() : this.lower();
    else if (moves[event.key]) this.step(moves[event.key], event.shiftKey ? 3 * STEP : STEP);
    else return;
    event.preventDefault();
  }

  step([across, down], length) {
    const keep = (value) => Math.min(1, Math.max(0, value));
    this.pen.x = keep(this.pen.x + across * length);
    this.pen.y = keep(this.pen.y + down * length);
    this.pen.shown = true;
    if (this.pen.down) this.strokes.at(-1).push({ x: this.pen.x, y: this.pen.y });
    this.paint();
    if (this.pen.down) this.changed(true);
  }

  lower() {
    this.pen.down = this.pen.shown = true;
    this.strokes.push([{ x: this.pen.x, y: this.pen.y }]);
    this.paint();
    this.changed(true);
  }

  lift() {
    if (!this.pen.down) return;
    this.pen.down = false;
    this.paint();
    this.changed(false);
  }

  showPen(shown) {
    this.pen.shown = shown;
    this.paint();
  }

  // ------------------------------------------------------------------------------------------- drawing

  paint() {
    const { canvas, pen } = this;
    const side = Math.round(canvas.clientWidth * devicePixelRatio);
    if (!side) return;
    if (canvas.width !== side) canvas.width = canvas.height = side;
    const style = getComputedStyle(canvas);
    const brush = canvas.getContext("2d");
    brush.clearRect(0, 0, side, side);
    ink(brush, this.strokes, side, style.color);
    if (pen.shown) {
      brush.beginPath();
      brush.arc(pen.x * side, pen.y * side, 0.75 * PEN * side, 0, 2 * Math.PI);
      brush.lineWidth = 2 * devicePixelRatio;
      brush.strokeStyle = style.getPropertyValue("--accent");
      brush.stroke();
    }
  }

  picture() { return drawn(this.strokes); }
}

// Strokes as a PNG file: black ink on white paper.
export function drawn(strokes) {
  const paper = new OffscreenCanvas(SIDE, SIDE);
  const brush = paper.getContext("2d");
  brush.fillStyle = "white";
  brush.fillRect(0, 0, SIDE, SIDE);
  ink(brush, strokes, SIDE, "black");
  return paper.convertToBlob({ type: "image/png" });
}

function ink(brush, strokes, side, colour) {
  Object.assign(brush, { lineCap: "round", lineJoin: "round", lineWidth: PEN * side, strokeStyle: colour });
  for (const stroke of strokes) {
    const points = stroke.map(({ x, y }) => [x * side, y * side]);
    brush.beginPath();
    brush.moveTo(...points[0]);
    // Curves through the middles between points, so that a few points make a smooth line.
    for (let i = 1; i + 1 < points.length; i++) {
      const middle = [(points[i][0] + points[i + 1][0]) / 2, (points[i][1] + points[i + 1][1]) / 2];
      brush.quadraticCurveTo(...points[i], ...middle);
    }
    brush.lineTo(...points.at(-1));
    brush.stroke();
  }
}
