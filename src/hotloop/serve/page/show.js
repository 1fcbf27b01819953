// Small parts that all panels are made of. Text goes in as text, never as HTML.

export function make(kind, {text, className, ...more} = {}, ...children) {
  const found = document.createElement(kind);
  if (text !== undefined) found.textContent = text;
  if (className) found.className = className;
  for (const [name, value] of Object.entries(more))
    if (name in found) found[name] = value; else found.setAttribute(name, value);
  found.append(...children);
  return found;
}

export const button = (text, onclick, className) => make("button", {type: "button", text, onclick, className});

/** Where answers appear, and are read out. `run(work)` shows what the work gives, or its error in words. Of several
 * that are under way only the last is shown. */
export class Answer {
  constructor(text) {
    this.node = make("div", {className: "answer", role: "status"}, make("p", {className: "dim", text}));
    this.newest = 0;
  }

  async run(work) {
    const own = ++this.newest, began = performance.now();
    let shown;
    try {
      shown = [await work(), make("p", {className: "dim small took", text: `answered in ${(performance.now() - began).toFixed(0)} ms`})];
    } catch (error) {
      shown = [make("p", {className: "error", role: "alert", text: error.message})];
    }
    if (own === this.newest) this.node.replaceChildren(...shown);
  }
}

export function bar(share) {
  const filled = make("span");
  filled.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return make("span", {className: "bar", "aria-hidden": "true"}, filled);
}

const ALL = 12, MOST = 5;

/** Shares of classes as bars: few classes in their order, of many the likeliest. */
export function bars(shares, classes) {
  const best = shares.indexOf(Math.max(...shares));
  let places = shares.map((_, place) => place);
  if (shares.length > ALL) places = places.sort((a, b) => shares[b] - shares[a]).slice(0, MOST);
  const name = place => classes?.[place] ?? `class ${place}`;
  const rows = places.map(place => make("li", {className: place === best ? "best" : ""},
    make("span", {className: "what", text: name(place)}), bar(shares[place]),
    make("span", {className: "much", text: `${(100 * shares[place]).toFixed(1)} %`})));
  return make("div", {}, make("p", {className: "verdict"}, "It is ", make("strong", {text: name(best)}),
    `, with ${(100 * shares[best]).toFixed(1)} %.`), make("ul", {className: "bars"}, ...rows));
}

/** The numbers of any outputs, as text. */
export function numbers(outputs) {
  const lines = Object.values(outputs).map(({name, shape, data}) => {
    const few = (data ?? []).slice(0, 100).map(each => typeof each === "number" ? Number(each.toPrecision(6)) : each);
    return `${name} [${shape.join(", ")}]: ${few.join(", ")}${few.length < (data ?? []).length ? ", …" : ""}`;
  });
  return make("pre", {tabIndex: 0, text: lines.join("\n")});
}

/** What a classifier gave: bars where there are shares of classes, else its numbers. */
export function classified(outputs, about) {
  const classes = about.parameters?.classes;
  const shares = outputs.probabilities ?? Object.values(outputs).find(
    each => /^FP/.test(each.datatype) && each.shape.length === 2 && each.shape[1] === classes?.length);
  return shares?.data?.length > 1 ? bars(shares.data, classes) : numbers(outputs);
}
