// A digit to draw, by pointer or by keys, for models of small grey images: classes as bars, or what a model of images
// makes of it.
import {infer, named, oneRow} from "./ask.js";
import {Answer, button, classified, make} from "./show.js";
import {asDigit, bytesOf, canvasOf, pictureOf} from "./pixels.js";

const SIDE = 280, PEN = 20, STEP = 14;
const KEYS = {ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP]};

export function fitsDrawing(about) {
  const [, height, width, channels] = about.inputs[0].shape;
  return about.inputs[0].datatype === "UINT8" && height === width && channels === 1 && height >= 8 && height <= 64;
}

/** A pad; `onstroke` is called when a stroke ends. */
function makePad(onstroke) {
  const pad = Object.assign(canvasOf(SIDE, SIDE), {className: "pad", tabIndex: 0}), context = pad.getContext("2d", {willReadFrequently: true});
  pad.setAttribute("role", "application");
  pad.setAttribute("aria-label", "Drawing area. Arrow keys move the pen, with Shift they draw; Delete clears.");
  Object.assign(context, {lineWidth: PEN, lineCap: "round", lineJoin: "round", strokeStyle: "#fff"});
  let last = null, pen = [SIDE / 2, SIDE / 4];
  const clear = () => { context.fillRect(0, 0, SIDE, SIDE); pen = [SIDE / 2, SIDE / 4]; };
  const line = (from, to) => { context.beginPath(); context.moveTo(...from); context.lineTo(...to); context.stroke(); };
  const spot = event => {
    const box = pad.getBoundingClientRect();
    return [(event.clientX - box.left) * SIDE / box.width, (event.clientY - box.top) * SIDE / box.height];
  };
  pad.onpointerdown = event => { pad.setPointerCapture(event.pointerId); last = spot(event); line(last, last); };
  pad.onpointermove = event => {
    if (!last) return;
    for (const each of event.getCoalescedEvents?.() ?? [event]) { line(last, spot(each)); last = spot(each); }
  };
  pad.onpointerup = pad.onpointercancel = () => { if (last) onstroke(); last = null; };
  pad.onkeydown = event => {
    if (event.key === "Delete" || event.key === "Backspace") { clear(); onstroke(); }
    const move = KEYS[event.key];
    if (!move) return;
    event.preventDefault();
    const to = pen.map((each, axis) => Math.min(SIDE - PEN, Math.max(PEN, each + move[axis])));
    if (event.shiftKey) line(pen, to);
    pen = to;
  };
  pad.onkeyup = event => { if (event.key === "Shift") onstroke(); };
  clear();
  return {pad, clear};
}

export function drawPanel(about) {
  const [image, ...others] = about.inputs, side = image.shape[1];
  const rebuilds = named(about.outputs, "reconstruction");
  const answer = new Answer(rebuilds ? "Draw a digit, and see what the model makes of it." : "Draw a digit, and see what the model takes it for.");
  let seed = 0;

  async function tell() {
    const digit = asDigit(pad, side);
    if (!digit) return make("p", {className: "dim", text: "Nothing is drawn."});
    const rest = others.map(each => oneRow(each, [each.name === "seed" ? seed : 0]));
    const outputs = await infer(about.name, {inputs: [oneRow(image, bytesOf(digit, 1)), ...rest]});
    const seen = make("figure", {}, digit, make("figcaption", {text: "as it was sent"}));
    if (!rebuilds) return make("div", {}, classified(outputs, about), make("details", {}, make("summary", {text: "What the model saw"}), seen));
    const made = make("figure", {}, pictureOf(outputs.reconstruction.data, side, side), make("figcaption", {text: "as the model rebuilds it"}));
    const parts = [make("div", {className: "pair"}, seen, made)];
    if (outputs.elbo) parts.push(make("p", {}, "ELBO ", make("strong", {className: "elbo", text: `${outputs.elbo.data[0].toFixed(1)} nats`}),
      ": a lower bound of the drawing's log-likelihood. The more, the more it is like what the model was trained on."));
    return make("div", {}, ...parts);
  }

  const {pad, clear} = makePad(() => answer.run(tell));
  const buttons = [button("Clear", () => { clear(); answer.run(tell); })];
  if (named(about.inputs, "seed")) buttons.push(button("Another sample", () => { seed += 1; answer.run(tell); }));
  const own = make("div", {}, make("h3", {text: "Draw a digit"}), pad, make("div", {className: "buttons"}, ...buttons));
  return make("div", {className: "try drawing"}, own, answer.node);
}
