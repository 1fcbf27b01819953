// Pictures to the bytes that a model takes, and back.

/** Bytes [height, width, channels] of a canvas of that size; grey is the mean of the colours. */
export function bytesOf(canvas, channels) {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const found = new Uint8Array(canvas.width * canvas.height * channels);
  for (let i = 0; i < found.length / channels; i++)
    if (channels === 1) found[i] = Math.round((data[4 * i] + data[4 * i + 1] + data[4 * i + 2]) / 3);
    else for (let c = 0; c < channels; c++) found[channels * i + c] = data[4 * i + c];
  return found;
}

export function canvasOf(width, height) {
  return Object.assign(document.createElement("canvas"), {width, height});
}

/** A source drawn onto a canvas of another size, all of it. */
export function resized(source, width, height) {
  const found = canvasOf(width, height), context = found.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(source, 0, 0, width, height);
  return found;
}

/** Shares of white [height, width] as a picture. */
export function pictureOf(shares, width, height) {
  const found = canvasOf(width, height), context = found.getContext("2d"), image = context.createImageData(width, height);
  shares.forEach((share, i) => image.data.set([255 * share, 255 * share, 255 * share, 255], 4 * i));
  context.putImageData(image, 0, 0);
  return found;
}

/** A white drawing on black as MNIST has its digits: fitted into 20 of 28 pixels, its centre of mass in the middle.
 * Null where nothing is drawn. */
export function asDigit(drawing, side) {
  const {data} = drawing.getContext("2d").getImageData(0, 0, drawing.width, drawing.height);
  let left = Infinity, top = Infinity, right = -1, bottom = -1, mass = 0, x = 0, y = 0;
  for (let i = 0; i < data.length / 4; i++) {
    const ink = data[4 * i];
    if (ink < 32) continue;
    const column = i % drawing.width, row = Math.floor(i / drawing.width);
    left = Math.min(left, column); right = Math.max(right, column);
    top = Math.min(top, row); bottom = Math.max(bottom, row);
    mass += ink; x += ink * column; y += ink * row;
  }
  if (!mass) return null;
  const found = canvasOf(side, side), context = found.getContext("2d");
  const scale = (20 / 28) * side / Math.max(right - left + 1, bottom - top + 1);
  context.fillRect(0, 0, side, side);
  context.imageSmoothingQuality = "high";
  // Halved until it is near: at once, a browser would leave out most of the pixels.
  let source = drawing, factor = scale;
  for (; factor < 0.5; factor *= 2) source = resized(source, source.width / 2, source.height / 2);
  // The centre of mass in the middle, or as near as the whole drawing allows.
  const start = (mean, low, high) => Math.min(side - scale * (high + 1), Math.max(-scale * low, side / 2 - scale * mean));
  context.drawImage(source, start(x / mass, left, right), start(y / mass, top, bottom), scale * drawing.width, scale * drawing.height);
  return found;
}
