// Items to search and rate for a recommender, and what it recommends then. Titles are the server's --titles; without
// them items go by their numbers.
import {ask, infer, named, oneRow} from "./ask.js";
import {Answer, bar, button, make} from "./show.js";

const FOUND = 8;
// Of a thousand items each is unlikely: three digits tell them apart.
const shareOf = share => `${share >= .1 ? (100 * share).toFixed(1) : (100 * share).toPrecision(3)} %`;

export function fitsItems(about) {
  const has = name => named(about.inputs, name);
  return Boolean(has("items") && has("ratings") && named(about.outputs, "items"));
}

let reading = null;
const readTitles = () => reading ??= ask("/page/titles.json").catch(error => { reading = null; throw error; });

/** Up to FOUND [id, title] pairs for what was typed: a number is an item, words are looked for in titles. */
function search(typed, titles) {
  const words = typed.trim().toLowerCase().split(/\s+/).filter(Boolean), found = [];
  if (/^\d+$/.test(typed.trim())) found.push([Number(typed), titles[Number(typed)]]);
  if (words.length)
    for (const [id, title] of Object.entries(titles)) {
      if (found.length >= FOUND) break;
      const text = title.toLowerCase();
      if (words.every(word => text.includes(word)) && Number(id) !== found[0]?.[0]) found.push([Number(id), title]);
    }
  return found;
}

export function pickPanel(about) {
  const {low = 1, high = 5, relevant} = about.parameters?.ratings ?? {}, most = named(about.inputs, "items").shape[1];
  const answer = new Answer("Rate a few items, and see what the model recommends.");
  const rated = new Map(), list = make("ul", {className: "rated", "aria-label": "Rated items"});
  const found = make("ul", {className: "found", "aria-label": "Items found"});
  const field = make("input", {type: "search", placeholder: "Title or item number", "aria-label": "Search for items by title or number", autocomplete: "off"});
  const user = named(about.inputs, "user") && make("input", {type: "number", min: 0, "aria-label": "Number of a user of the training, if any"});
  let titles = {};
  const call = id => titles[id] ?? `item ${id}`;

  async function tell() {
    if (!rated.size && !user?.value) return make("p", {className: "dim", text: "Nothing is rated."});
    if (rated.size > most) throw new Error(`${rated.size} items are rated, and the model takes ${most}`);
    const fill = (values, blank) => [...values, ...Array(most - values.length).fill(blank)];
    const data = {items: fill([...rated.keys()], -1), ratings: fill([...rated.values()], 0), user: [user?.value ? Number(user.value) : -1]};
    const outputs = await infer(about.name, {inputs: about.inputs.map(each => oneRow(each, data[each.name]))});
    const scores = outputs.predictions?.data ?? [], best = Math.max(...scores), worst = Math.min(...scores);
    // Ratings fill the bar from the lowest that there is; log-probabilities by how likely an item is beside the first.
    const share = score => relevant ? Math.exp(score - best) : (score - low) / (high - low || 1);
    const rows = outputs.items.data.flatMap((id, place) => id < 0 ? [] : [make("li", {className: place ? "" : "best"},
      make("span", {className: "what", text: call(id)}), bar(share(scores[place] ?? worst)),
      make("span", {className: "much", text: relevant ? shareOf(Math.exp(scores[place])) : scores[place]?.toFixed(2) ?? ""}))]);
    const said = relevant ? "How likely each is to be liked next:" : `Predicted ratings, from ${low} to ${high}:`;
    return make("div", {}, make("p", {text: said}), make("ol", {className: "ranks bars"}, ...rows));
  }

  function rate(id) {
    if (!rated.has(id)) rated.set(id, high);
    field.value = "";
    look();
    show();
    field.focus();
  }

  function show() {
    list.replaceChildren(...[...rated].map(([id, rating]) => {
      const value = make("input", {type: "number", min: low, max: high, step: "any", value: rating, "aria-label": `Rating of ${call(id)}, from ${low} to ${high}`});
      value.onchange = () => { rated.set(id, Number(value.value)); answer.run(tell); };
      const remove = button("Remove", () => { rated.delete(id); show(); });
      remove.setAttribute("aria-label", `Remove ${call(id)}`);
      return make("li", {}, make("span", {className: "what", text: call(id)}), value, remove);
    }));
    answer.run(tell);
  }

  function look() {
    found.replaceChildren(...search(field.value, titles).map(([id]) => make("li", {}, button(call(id), () => rate(id)))));
    if (field.value.trim() && !found.children.length)
      found.replaceChildren(make("li", {className: "dim", text: Object.keys(titles).length ? "No such title." : "There are no titles here: type an item's number."}));
  }

  field.oninput = look;
  field.onkeydown = event => {
    if (event.key === "Enter") found.querySelector("button")?.click();
    if (event.key === "ArrowDown") { event.preventDefault(); found.querySelector("button")?.focus(); }
  };
  found.onkeydown = event => {
    const next = {ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling"}[event.key];
    if (!next) return;
    event.preventDefault();
    (event.target.closest("li")[next]?.querySelector("button") ?? field).focus();
  };
  readTitles().then(known => { titles = known; look(); }, error => answer.run(() => { throw error; }));
  const parts = [make("h3", {text: "Rate items"}), field, found, list];
  if (user) {
    user.onchange = () => answer.run(tell);
    parts.push(make("label", {className: "small"}, "With the training ratings of user ", user));
  }
  return make("div", {className: "try"}, make("div", {}, ...parts), answer.node);
}
