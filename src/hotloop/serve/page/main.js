// The models of the server: a panel to try each, and live figures. A panel is made once for a model's signature, so that
// what was drawn or typed stays while the figures change.
import {ask} from "./ask.js";
import {make} from "./show.js";
import {drawPanel, fitsDrawing} from "./draw.js";
import {dropPanel, fitsImages} from "./drop.js";
import {fitsItems, pickPanel} from "./pick.js";
import {formPanel} from "./form.js";

const EVERY = 2000;
const COLUMNS = ["version", "answered", "failed", "rows", "rows/s", "rows a batch", "padding", "queue ms", "compute ms", "late compilations"];
const PANELS = [[fitsItems, pickPanel], [fitsDrawing, drawPanel], [fitsImages, dropPanel]];
const before = new Map(), shown = new Map();

const average = (ns, count) => count ? (ns / count / 1e6).toFixed(2) : "–";

function figures(stats, now) {
  const key = stats.name + "/" + stats.version, last = before.get(key), rows = stats.inference_count;
  before.set(key, {rows, at: now});
  const rate = last && now > last.at ? (rows - last.rows) / (now - last.at) * 1000 : 0;
  const spent = stats.inference_stats, computed = rows + stats.padded_rows;
  return [
    stats.version, spent.success.count, spent.fail.count, rows, rate.toFixed(0),
    stats.execution_count ? (rows / stats.execution_count).toFixed(1) : "–",
    computed ? (100 * stats.padded_rows / computed).toFixed(0) + " %" : "–",
    average(spent.queue.ns, spent.queue.count), average(spent.compute_infer.ns, spent.compute_infer.count),
    stats.compilations_after_ready,
  ];
}

function signature(about) {
  const shape = tensor => tensor.name + ": " + tensor.datatype + " [" + tensor.shape.map(n => n < 0 ? "n" : n).join(", ") + "]";
  return about.inputs.map(shape).join("\n") + "\n→\n" + about.outputs.map(shape).join("\n");
}

function choosePanel(about) {
  const [, panel] = PANELS.find(([fits]) => fits(about)) ?? [null, formPanel];
  return panel(about);
}

/** A model's section, and how its figures are put into it. */
function makeSection(about) {
  const body = make("tbody"), versions = make("span", {className: "dim"});
  const head = make("tr", {}, ...COLUMNS.map(text => make("th", {scope: "col", text})));
  const wrap = make("div", {className: "wrap", tabIndex: 0, role: "region", "aria-label": `Figures of ${about.name}`},
    make("table", {}, make("thead", {}, head), body));
  const node = make("section", {"aria-label": about.name},
    make("div", {className: "head"}, make("h2", {text: about.name}), versions),
    choosePanel(about),
    make("details", {}, make("summary", {text: "Inputs and outputs"}), make("pre", {tabIndex: 0, text: signature(about)})),
    make("details", {open: true}, make("summary", {text: "Figures since the server started"}), wrap,
      make("p", {className: "hint", text: "Scroll sideways for more columns →"})));
  const update = (now, stats) => {
    versions.textContent = `version${now.versions.length > 1 ? "s" : ""} ${now.versions.join(", ")}`;
    body.replaceChildren(...stats.map(row => make("tr", {}, ...row.map(text => make("td", {text})))));
  };
  return {signature: signature(about), node, update};
}

async function look() {
  const ready = await fetch("/v2/health/ready").catch(() => null);
  if (!ready) throw new Error("no answer from the server");
  const [index, {model_stats: stats}] = await Promise.all([ask("/v2/repository/index", {method: "POST"}), ask("/v2/models/stats")]);
  const names = [...new Set(index.filter(one => one.state === "READY").map(one => one.name))], now = performance.now();
  const abouts = await Promise.all(names.map(name => ask("/v2/models/" + encodeURIComponent(name)).catch(() => null)));
  for (const about of abouts.filter(Boolean)) {
    if (shown.get(about.name)?.signature !== signature(about)) shown.set(about.name, makeSection(about));
    shown.get(about.name).update(about, stats.filter(one => one.name === about.name).map(one => figures(one, now)));
  }
  for (const name of shown.keys()) if (!names.includes(name)) shown.delete(name);
  return ready.ok;
}

async function refresh() {
  const state = document.getElementById("state"), models = document.getElementById("models");
  try {
    const ready = await look();
    const wanted = [...shown.values()].map(each => each.node);
    if (wanted.length !== models.children.length || wanted.some((node, place) => node !== models.children[place]))
      models.replaceChildren(...wanted);  // only where it has changed: nothing loses its focus
    for (const wrap of models.querySelectorAll(".wrap")) wrap.classList.toggle("scrolls", wrap.scrollWidth > wrap.clientWidth + 1);
    state.textContent = ready ? "ready" : "not ready";
    state.className = "state " + (ready ? "good" : "bad");
  } catch (error) {
    state.textContent = error.message;
    state.className = "state bad";
  }
}

refresh();
setInterval(refresh, EVERY);
