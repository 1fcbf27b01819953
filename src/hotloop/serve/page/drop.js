// An image to drop, choose or paste, for classifiers of images. A JPEG or PNG goes as it is to a model that takes such;
// anything else that the browser can show goes as PNG, or as the pixels themselves.
import {infer, oneRow} from "./ask.js";
import {Answer, classified, make} from "./show.js";
import {bytesOf, resized} from "./pixels.js";

const SENT = ["image/jpeg", "image/png"], PREVIEW = 280;

export function fitsImages(about) {
  const {datatype, shape} = about.inputs[0];
  return about.inputs.length === 1 && datatype === "UINT8" && shape.length === 4 && (shape[3] === 1 || shape[3] === 3);
}

export function dropPanel(about) {
  const [image] = about.inputs, [, height, width, channels] = image.shape;
  const answer = new Answer(`The model sees ${width} × ${height} pixels of it, and answers with its classes.`);
  const input = make("input", {type: "file", accept: "image/*", "aria-label": `An image for ${about.name}`});
  const place = make("span", {}, make("strong", {text: "Drop an image here"}), make("br"), "or choose or paste one");
  const zone = make("label", {className: "drop"}, input, place);

  async function tell(file) {
    let picture;
    try {
      picture = await createImageBitmap(file);
    } catch {
      throw new Error(`${file.name || "that"} is no image that this browser can read: take a JPEG or PNG`);
    }
    const shown = Math.min(1, PREVIEW / Math.max(picture.width, picture.height));
    const preview = resized(picture, Math.max(1, picture.width * shown), Math.max(1, picture.height * shown));
    preview.setAttribute("role", "img");
    preview.setAttribute("aria-label", file.name || "the image");
    zone.replaceChildren(input, preview, make("span", {className: "dim small", text: file.name || "pasted"}));
    let body = file;
    if (about.parameters?.kind !== "image")
      body = {inputs: [oneRow(image, bytesOf(resized(picture, width, height), channels))]};
    else if (!SENT.includes(file.type))
      body = await new Promise(done => resized(picture, picture.width, picture.height).toBlob(done, "image/png"));
    return classified(await infer(about.name, body), about);
  }

  const take = files => { if (files.length) answer.run(() => tell(files[0])); };
  input.onchange = () => take(input.files);
  zone.ondragover = event => { event.preventDefault(); zone.classList.add("over"); };
  zone.ondragleave = () => zone.classList.remove("over");
  zone.ondrop = event => { event.preventDefault(); zone.classList.remove("over"); take(event.dataTransfer.files); };
  zone.onpaste = event => take(event.clipboardData.files);
  return make("div", {className: "try"}, make("div", {}, make("h3", {text: "Classify an image"}), zone), answer.node);
}
