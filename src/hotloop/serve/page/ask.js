// Requests to the server that this page is from, and tensors of the Open Inference Protocol. What goes wrong is an Error
// with a sentence for people.

export async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("no answer from the server: is it still running?");
  }
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(body.error ?? `the server answered with status ${answer.status}`);
  return body;
}

/** The outputs by name, each with its shape and data. `body` is an encoded image, or an object of inputs. */
export async function infer(model, body) {
  const isImage = body instanceof Blob;
  const sent = isImage ? body : JSON.stringify(body);
  const found = await ask(`/v2/models/${encodeURIComponent(model)}/infer`,
    {method: "POST", body: sent, headers: {"Content-Type": isImage ? body.type : "application/json"}});
  return Object.fromEntries(found.outputs.map(each => [each.name, each]));
}

/** An input of one row: what `about.inputs` says of it, and its numbers. */
export function oneRow(tensor, data) {
  return {name: tensor.name, datatype: tensor.datatype, shape: [1, ...tensor.shape.slice(1)], data: [...data]};
}

export function named(tensors, name) {
  return tensors.find(each => each.name === name);
}
