// A request as JSON for any other model, with an example that its inputs make.
import {infer, oneRow} from "./ask.js";
import {Answer, button, make, numbers} from "./show.js";

const MANY = 20_000;

/** A row of zeros for every input: the least that it takes. */
function example(about) {
  const size = tensor => tensor.shape.slice(1).reduce((a, b) => a * b, 1);
  if (about.inputs.some(each => size(each) > MANY)) return null;
  return {inputs: about.inputs.map(each => oneRow(each, Array(size(each)).fill(each.datatype === "BOOL" ? false : 0)))};
}

/** JSON with a line for each input. */
function write({inputs}) {
  return `{"inputs": [\n${inputs.map(each => "  " + JSON.stringify(each)).join(",\n")}\n]}`;
}

export function formPanel(about) {
  const answer = new Answer("The answer's numbers appear here."), first = example(about);
  const text = make("textarea", {rows: 4 + 2 * about.inputs.length, spellcheck: false, "aria-label": `Request to ${about.name} as JSON`, value: first ? write(first) : ""});

  async function tell() {
    let request;
    try {
      request = JSON.parse(text.value);
    } catch (error) {
      throw new Error(`this is no JSON: ${error.message}`);
    }
    return numbers(await infer(about.name, request));
  }

  const note = first ? "An example of zeros: put your numbers in." : "Its rows are too large for an example here: send tensors as bytes.";
  const own = make("div", {}, make("h3", {text: "Ask with JSON"}), make("p", {className: "dim small", text: note}), text,
    make("div", {className: "buttons"}, button("Ask", () => answer.run(tell), "main")));
  text.onkeydown = event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) answer.run(tell); };
  return make("div", {className: "try"}, own, answer.node);
}
