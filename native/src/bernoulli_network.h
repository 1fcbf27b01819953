// Rows of a network of ReLU layers whose outputs are the logits of Bernoulli variables: log p(image | input) of each, and
// its gradient in the input. A block of rows goes through all layers and back while what it needs is in the cache.
#pragma once

#include "tiles.h"

namespace hotloop {
namespace HOTLOOP_ISA {

constexpr int64_t NETWORK_ROWS = 4 * TALLEST;
// Factors up to 2 of which a vector holds the product before its logarithm is taken: 2^100 is far from overflow.
constexpr int64_t MOST_FACTORS = 100;

// What a block of rows needs: packed rows, two gradients in turn, a panel of weights that is no whole one and the product
// with it, and what comes out of each layer.
struct NetworkSpace {
  int64_t widest, line, all = 0;
  float *packed, *gradients[2], *panel, *outputs;

  NetworkSpace(const BernoulliNetwork& n, float* memory) : widest(n.layers[0].inputs) {
    for (int64_t l = 0; l < n.count; ++l) {
      widest = larger(widest, n.layers[l].outputs);
      all += n.layers[l].outputs;
    }
    line = widest + LANES;  // packing writes somewhat more
    if (!memory) return;
    packed = memory;
    gradients[0] = packed + NETWORK_ROWS * line;
    gradients[1] = gradients[0] + NETWORK_ROWS * line;
    panel = gradients[1] + NETWORK_ROWS * line;
    outputs = panel + (widest + NETWORK_ROWS) * WIDTH;
  }

  int64_t floats() const { return NETWORK_ROWS * (3 * line + all) + (widest + NETWORK_ROWS) * WIDTH; }
};

inline int64_t bernoulli_work(const BernoulliNetwork& n) { return NetworkSpace(n, nullptr).floats(); }

// c[rows, columns] from packed rows and b[terms, columns] as it lies in memory: c's rows follow one another.
inline void multiply_plain(const float* a, int64_t rows, const float* b, int64_t stride, int64_t terms, float* c,
                           int64_t width) {
  const Chunks chunks(rows);
  for (int64_t start = 0; start < terms; start += BLOCK) {
    const int64_t count = smaller(BLOCK, terms - start);
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      const int64_t first = chunks.begin(chunk), height = chunks.begin(chunk + 1) - first;
      TILES[height - 1](count, a + start * rows + first * count, b + start * stride, stride, c + first * width, width,
                        start > 0);
    }
  }
}

// c[rows, columns] = x[rows, terms] weights[terms, columns]. The last panel ends where the columns do and shares some with
// the one before it; fewer columns than a panel has go by way of `space.panel`.
inline void apply_weights(const float* x, int64_t rows, const float* weights, int64_t terms, int64_t columns, float* c,
                          const NetworkSpace& space) {
  pack_rows({x, terms, 1}, rows, terms, space.packed);
  if (columns < WIDTH) {
    float* made = space.panel + terms * WIDTH;
    pack_columns({weights, columns, 1}, terms, columns, {0, 1}, space.panel);
    multiply_panel(space.packed, rows, {space.panel, columns}, terms, 0, made, WIDTH, false);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < columns; ++j) c[r * columns + j] = made[r * WIDTH + j];
    }
    return;
  }
  for (int64_t column = 0; column < columns; column += WIDTH) {
    const int64_t first = smaller(column, columns - WIDTH);
    multiply_plain(space.packed, rows, weights + first, columns, terms, c + first, columns);
  }
}

inline void add_bias_and_rectify(float* x, int64_t rows, int64_t columns, const float* bias) {
  for (int64_t r = 0; r < rows; ++r, x += columns) {
    for (int64_t j = 0; j < columns; j += LANES) {
      const int64_t count = smaller(LANES, columns - j);
      const Vec sum = load(x + j, count) + load(bias + j, count);
      store(x + j, sum < 0.0f ? Vec{} : sum, count);  // NaN stays
    }
  }
}

// log p(image) of one row's logits (without their bias), which become its gradient in them: image - sigmoid(logit).
// log(1 + e^l) is max(l, 0) + log(1 + e^-|l|), and a logarithm is taken of the product of many of the latter.
inline double read_logits(float* logits, const float* bias, const float* image, int64_t count) {
  Vec sum{}, product = all(1.0f);
  double logarithms = 0, total = 0;
  const auto take_logarithm = [&] {
    for (int lane = 0; lane < LANES; ++lane) logarithms += __builtin_log(product[lane]);
    product = all(1.0f);
  };
  int64_t factors = 0;
  for (int64_t j = 0; j < count; j += LANES) {
    const int64_t present = smaller(LANES, count - j);
    const Vec l = load(logits + j, present) + load(bias + j, present), x = load(image + j, present);
    Vec e = exponential(l < 0.0f ? l : -l);
    const Vec positive = 1.0f / (1.0f + e);
    store(logits + j, x - (l < 0.0f ? e * positive : positive), present);
    for (int64_t lane = present; lane < LANES; ++lane) e[lane] = 0.0f;
    sum += x * l - (l < 0.0f ? Vec{} : l);
    product *= 1.0f + e;
    if (++factors % MOST_FACTORS == 0) take_logarithm();
  }
  take_logarithm();
  for (int lane = 0; lane < LANES; ++lane) total += sum[lane];
  return total - logarithms;
}

inline void bernoulli_block(const BernoulliNetwork& n, Range block, const NetworkSpace& space) {
  const int64_t rows = block.end - block.begin, inputs = n.layers[0].inputs, pixels = n.layers[n.count - 1].outputs;
  const float* x = n.inputs + block.begin * inputs;
  float* y = space.outputs;
  for (int64_t l = 0; l < n.count; ++l) {
    const NetworkLayer& layer = n.layers[l];
    apply_weights(x, rows, layer.weights, layer.inputs, layer.outputs, y, space);
    if (l + 1 == n.count) break;
    add_bias_and_rectify(y, rows, layer.outputs, layer.bias);
    x = y;
    y += rows * layer.outputs;
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float *bias = n.layers[n.count - 1].bias, *image = n.images + (block.begin + r) * pixels;
    n.values[block.begin + r] = static_cast<float>(read_logits(y + r * pixels, bias, image, pixels));
  }
  const float* dy = y;
  for (int64_t l = n.count - 1; l > 0; --l) {
    const NetworkLayer& layer = n.layers[l];
    float* dx = space.gradients[l % 2];
    apply_weights(dy, rows, layer.transposed, layer.outputs, layer.inputs, dx, space);
    y -= rows * layer.inputs;
    for (int64_t i = 0; i < rows * layer.inputs; ++i) dx[i] = y[i] > 0.0f ? dx[i] : 0.0f;
    dy = dx;
  }
  apply_weights(dy, rows, n.layers[0].transposed, n.layers[0].outputs, inputs, n.gradients + block.begin * inputs, space);
}

inline void bernoulli_rows(const BernoulliNetwork& n, Range rows, float* work) {
  const NetworkSpace space(n, work);
  over_row_blocks(rows, NETWORK_ROWS, [&](Range block) { bernoulli_block(n, block, space); });
}

}  // namespace HOTLOOP_ISA
}  // namespace hotloop
