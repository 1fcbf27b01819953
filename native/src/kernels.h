// The inner loops of products, recurrences, norms and tied layers, compiled for three generations of x86-64 processors;
// `kernels()` gives the best that this one can run. They know nothing of threads: a caller hands each a range of rows and
// of panels.
#pragma once

#include <cstdint>

namespace hotloop {

// So many terms of a sum are added in registers; their weights, of one panel, stay in the second-level cache.
constexpr int64_t BLOCK = 512;

// The element of row i and column j is data[i * row + j * column].
struct Matrix {
  const float* data;
  int64_t row, column;
};

struct Range {
  int64_t begin, end;
};

// c[rows, columns] (row by row, `width` apart) = a[rows, terms] b[terms, columns].
struct Product {
  int64_t rows, terms, columns;
  Matrix a, b;
  float* c;
  int64_t width;
  bool add;  // to what is in c
};

enum class Cell : int64_t { rnn, gru, gru_reset_after, lstm };

struct Sizes {
  Cell cell;
  int64_t steps, batch, inputs, hidden;
};

// Arrays [steps, batch, gates * hidden] unless said; null where the cell has none.
struct Forward {
  Sizes sizes;
  const float *x, *input_bias;            // [steps, batch, inputs], [gates * hidden]
  const float* bias;                      // [hidden], of the candidate's product (reset after)
  const float *h0, *c0;                   // [batch, hidden]; null: zero
  const float *input_weights, *weights;   // [inputs, gates * hidden], [hidden, gates * hidden], or packed gate after gate
  float *h, *c, *sums;      // sums: null where nothing is kept for gradients; c is then [batch, hidden], the last
  float *reset_h, *update;  // [batch, hidden], between the two phases of a step (reset before)
  bool is_packed = true;    // the weights are
};

struct Backward {
  Sizes sizes;
  const float *d_outputs, *x, *sums, *h, *c, *h0, *c0;  // no d_outputs: nothing comes in at each step
  const float *dh_last, *dc_last;                   // [batch, hidden]
  const float* weights;                             // packed and transposed, part after part: see `parts`
  float *dz, *dh0, *dc0;  // dh0, dc0: [batch, hidden], also what is carried from step to step
  float* beside;          // [steps, batch, hidden], reset h (reset before) or d candidate * reset (reset after)
};

// Images [rows, channels]; `middle`: a row that is no edge of its image, where that has others, since edges have seen padding
// and may be far from the rest; `residual`: added before the ReLU, null where there is none.
struct Norm {
  int64_t rows, channels, middle;
  bool relu;
  const float *x, *residual;
  float* y;
};

// What becomes of a pixel: slope (x - mean) + offset, one number a channel each.
struct NormLine {
  const float *slope, *mean, *offset;
};

// `y`: what came out, where something was added, else null. `d_residual`: null where nothing was.
struct NormGradient {
  int64_t rows, channels;
  bool relu;
  const float *dy, *x, *y;
  float *dx, *d_residual;
};

// x[inputs] weights[inputs, outputs] + bias; `transposed`: the weights once more, [outputs, inputs].
struct NetworkLayer {
  int64_t inputs, outputs;
  const float *weights, *bias, *transposed;
};

// ReLU between layers, logits of Bernoulli variables at the end. Rows of images and inputs belong together.
struct BernoulliNetwork {
  const NetworkLayer* layers;
  int64_t count, rows;
  const float *images, *inputs;
  float *values, *gradients;  // log p(image | input) [rows]; its gradient in the input
};

// A convolution of groups of `size` channels and as many filters: x[images, height, width, channels] by
// kernel[kernel_height, kernel_width, size, channels] gives y[images, rows, columns, channels].
struct Groups {
  int64_t size, height, width, channels, kernel_height, kernel_width, rows, columns, row_stride, column_stride, top, left;
  const float *x, *kernel;
  float* y;
};

// The last layer of an autoencoder whose weights [items, units] are those of its first one, too. Arrays of its passes are
// [items, users] or, codes and what is multiplied like them, [users, units].
struct Tied {
  int64_t items, users, units;
  const float* weights;
};

// y = selu(weights code.T + bias).
struct TiedForward {
  Tied layer;
  const float *bias, *code;
  float* y;
};

// z = selu(weights code.T + bias), and dz = scale (z - y) slope(z).
struct TiedRefeed {
  Tied layer;
  const float *bias, *code, *y;
  float scale;
  float* z;
};

// dz as above, dy = (weights dz_first.T - scale (z - y)) slope(y); d_weights = dz z_code + y dz_first + dy y_code.
struct TiedGradient {
  Tied layer;
  const float *y, *z, *y_code, *z_code, *dz_first;
  float scale;
  float *d_weights, *d_bias;
};

struct Kernels {
  int64_t width;  // columns of a panel
  // Panels of columns, padded with zeros: terms * padded columns floats in all. Blocks of terms, panels, terms, columns.
  void (*pack)(Matrix b, int64_t terms, int64_t columns, Range panels, float* packed);
  // The part of a product: `columns` begins at a multiple of the width. `work`: `product_work` floats.
  void (*multiply)(const Product& product, Range rows, Range columns, float* work);
  int64_t product_work;
  // One phase (of `phases_of` a step) for some rows and panels of units. `work`: `forward_work(...)` floats, the same in
  // all phases of these rows and panels, since the input products of several steps are made at once and lie there.
  void (*forward)(const Forward& pass, int64_t phase, Range rows, Range panels, float* work);
  int64_t (*forward_work)(Sizes sizes, int64_t rows, int64_t panels);
  // Phase 0 is the first of the last step; after the first step's last, one phase more gives the gradient of h0. Adds the
  // gradients of all biases (`biases_of` * hidden) to `totals`.
  void (*backward)(const Backward& pass, int64_t phase, Range rows, Range panels, float* work, double* totals);
  int64_t (*backward_work)(Sizes sizes);
  int64_t (*rows_at_once)(int64_t terms);  // rows whose packed form stays in the second-level cache
  // Passes over some rows; vectors are of one number a channel. `work`: `norm_work(channels)` floats.
  void (*norm_sums)(const Norm& norm, Range rows, const float* near, float* work, double* sum, double* square);
  void (*norm_apply)(const Norm& norm, Range rows, const NormLine& line);
  void (*norm_gradient_sums)(const NormGradient& gradient, Range rows, const NormLine& line, float* work, double* total,
                             double* along);
  void (*norm_gradient_apply)(const NormGradient& gradient, Range rows, const NormLine& line, const float* tilt,
                              const float* base);
  int64_t (*norm_work)(int64_t channels);
  void (*bernoulli_rows)(const BernoulliNetwork& network, Range rows, float* work);
  int64_t (*bernoulli_work)(const BernoulliNetwork& network);  // floats
  bool (*groups_fit)(int64_t channels, int64_t size);          // whether the next takes them
  void (*convolve_groups)(const Groups& groups, Range rows);   // `rows`: of the results of all images
  // Passes over some items. `work`: `tied_work(layer)` floats, of which the first [users, units padded to the width] become
  // these items' part of y.T weights, dz.T weights or dy.T weights. A refeed gives the sum of (z - y) squared.
  void (*tied_forward)(const TiedForward& pass, Range items, float* work);
  double (*tied_refeed)(const TiedRefeed& pass, Range items, float* work);
  void (*tied_gradient)(const TiedGradient& pass, Range items, float* work);
  int64_t (*tied_work)(const Tied& layer);
};

const Kernels& kernels();

// Static: each build of the kernels has its own.
static inline int64_t gates_of(Cell cell) { return cell == Cell::rnn ? 1 : cell == Cell::lstm ? 4 : 3; }
static inline int64_t sums_of(Cell cell) { return cell == Cell::rnn ? 1 : cell == Cell::gru ? 3 : 4; }
// Those of the gates, and the one of the candidate's product.
static inline int64_t biases_of(Cell cell) { return gates_of(cell) + (cell == Cell::gru_reset_after ? 1 : 0); }
static inline int64_t phases_of(Cell cell) { return cell == Cell::gru ? 2 : 1; }
// Gates whose gradients are multiplied with the transposed weights together; the rest follow as a second part.
static inline int64_t first_part(Cell cell) { return cell == Cell::rnn ? 1 : cell == Cell::lstm ? 4 : 2; }

}  // namespace hotloop
