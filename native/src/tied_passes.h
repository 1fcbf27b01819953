// Passes over some items of a layer whose weights two passes of an autoencoder share: what is made of a block of weights is
// made while they are in the second-level cache, and what lies beside it [items, users] is read and written once.
#pragma once

#include "tiles.h"

namespace hotloop {
namespace HOTLOOP_ISA {

constexpr float SELU_SCALE = 1.0507009873554805f, SELU_BOTTOM = 1.0507009873554805f * 1.6732632423543772f;
constexpr int64_t TIED_ROWS = 8 * TALLEST > 96 ? 8 * TALLEST : 96;
constexpr int64_t TIED_FLOATS = 192 * 1024;  // of a block, with what is made of it

inline Vec selu(Vec x) {
  const Vec below = SELU_BOTTOM * (exponential(x) - 1.0f);  // NaN is not above 0
  return x > 0.0f ? SELU_SCALE * x : below;
}

// From SELU's value.
inline Vec selu_slope(Vec y) { return y > 0.0f ? all(SELU_SCALE) : y + SELU_BOTTOM; }

// c[ROWS, WIDTH] (+)= a[ROWS, terms] b[terms, WIDTH]. `a` is read where it lies: packing rows of weights that are used once
// costs a twentieth of the product.
template <int ROWS>
__attribute__((noinline)) void loose_tile(int64_t terms, Matrix a, const float* b, float* c, int64_t width, bool add) {
  Vec s[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) s[r][0] = s[r][1] = Vec{};
  // Three rows are within reach of one pointer, which leaves registers for all.
  const float* rows[(ROWS + 2) / 3];
#pragma GCC unroll 8
  for (int third = 0; third < (ROWS + 2) / 3; ++third) rows[third] = a.data + 3 * third * a.row;
  for (int64_t i = 0; i < terms; ++i, b += WIDTH) {
    const Vec left = load(b, LANES), right = load(b + LANES, LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const float x = rows[r / 3][r % 3 * a.row];
      s[r][0] += x * left;
      s[r][1] += x * right;
    }
#pragma GCC unroll 8
    for (int third = 0; third < (ROWS + 2) / 3; ++third) rows[third] += a.column;
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      float* out = c + r * width + half * LANES;
      store(out, add ? load(out, LANES) + s[r][half] : s[r][half], LANES);
    }
  }
}

using LooseTile = void (*)(int64_t, Matrix, const float*, float*, int64_t, bool);
#if defined(__AVX512F__)
constexpr LooseTile LOOSE_TILES[] = {loose_tile<1>, loose_tile<2>,  loose_tile<3>,  loose_tile<4>,  loose_tile<5>,
                                     loose_tile<6>, loose_tile<7>,  loose_tile<8>,  loose_tile<9>,  loose_tile<10>,
                                     loose_tile<11>, loose_tile<12>, loose_tile<13>, loose_tile<14>};
#else
constexpr LooseTile LOOSE_TILES[] = {loose_tile<1>, loose_tile<2>, loose_tile<3>,
                                     loose_tile<4>, loose_tile<5>, loose_tile<6>};
#endif

// An array with so many floats an item.
struct Rows {
  const float* data;
  int64_t floats;
};

// Asks the memory for what the next block reads and writes, a little before each tile, so that it comes meanwhile.
class Ahead {
 public:
  template <int COUNT>
  Ahead(const Rows (&arrays)[COUNT], Range items, int64_t tiles) : count_(items.begin < items.end ? COUNT : 0) {
    int64_t lines = 0;
    for (int i = 0; i < COUNT; ++i) {
      const Rows& rows = arrays[i];
      parts_[i] = {rows.data + items.begin * rows.floats, rows.data + items.end * rows.floats};
      lines += (items.end - items.begin) * rows.floats / LINE + 1;
    }
    each_ = lines / tiles + 1;
  }

  void ask() {
    for (int64_t i = 0; i < each_ && part_ < count_; ++i) {
      Part& part = parts_[part_];
      __builtin_prefetch(part.next, 0, 2);
      part.next += LINE;
      if (part.next >= part.end) ++part_;
    }
  }

 private:
  static constexpr int64_t LINE = 16;
  struct Part {
    const float *next, *end;
  };
  Part parts_[4];
  int64_t count_, part_ = 0, each_;
};

inline void multiply_rows(int64_t rows, int64_t terms, Matrix a, const float* panel, float* c, int64_t width, bool add,
                          Ahead& ahead) {
  const Chunks chunks(rows);
  for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
    ahead.ask();
    const int64_t first = chunks.begin(chunk), height = chunks.begin(chunk + 1) - first;
    LOOSE_TILES[height - 1](terms, {a.data + first * a.row, a.row, a.column}, panel, c + first * width, width, add);
  }
}

// Panels of columns, padded with zeros; these terms begin at `place` among `all` of a panel.
inline void pack_panels(Matrix b, int64_t terms, int64_t columns, int64_t place, int64_t all_terms, float* packed) {
  for (int64_t i = 0; i < terms; ++i) {
    for (int64_t first = 0; first < columns; first += WIDTH) {
      float* to = packed + first * all_terms + (place + i) * WIDTH;
      const float* from = b.data + i * b.row + first * b.column;
      const int64_t present = smaller(WIDTH, columns - first);
      if (b.column == 1) {
        store(to, load(from, present), LANES);
        store(to + LANES, load(from + LANES, present - LANES), LANES);
      } else {
        for (int64_t j = 0; j < WIDTH; ++j) to[j] = j < present ? from[j * b.column] : 0.0f;
      }
    }
  }
}

inline int64_t tied_rows(const Tied& t) {
  const int64_t each = 2 * t.units + 4 * t.users, fitting = TIED_FLOATS / each / TALLEST * TALLEST;
  return fitting < TALLEST ? TALLEST : smaller(fitting, TIED_ROWS);
}

// What a task works with. `total` [users, padded(units)] comes first: its part of the product with the weights.
struct TiedSpace {
  float *total, *code, *outer, *panels, *sums, *joined, *spare;

  TiedSpace(const Tied& t, float* work) {
    const int64_t rows = tied_rows(t), across = padded(t.units), users = padded(t.users);
    total = work;
    code = total + t.users * across;
    outer = code + t.units * users;
    panels = outer + 3 * t.users * across;
    sums = panels + rows * across;
    joined = sums + rows * users;
    spare = joined + rows * 3 * t.users;
  }
};

inline int64_t tied_work(const Tied& t) {
  const int64_t across = padded(t.units), users = padded(t.users);
  return 4 * t.users * across + t.units * users + tied_rows(t) * (across + users + 3 * t.users + WIDTH);
}

// Calls visit(first, rows, ahead) for every block of items; `arrays` are read or written beside what is kept of a block.
template <int COUNT, class Visit>
inline void each_block(const Tied& t, Range items, const Rows (&arrays)[COUNT], Visit visit) {
  const int64_t most = tied_rows(t);
  for (int64_t first = items.begin; first < items.end; first += most) {
    const int64_t end = smaller(first + most, items.end);
    const int64_t of_code = Chunks(end - first).count * padded(t.users), of_total = Chunks(t.users).count * padded(t.units);
    Ahead ahead(arrays, {end, smaller(end + most, items.end)}, (of_code + of_total) / WIDTH);
    visit(first, end - first, ahead);
  }
}

// Of a block: sums [rows, padded(users)] = weights [rows, units] code [units, users].
inline void multiply_code(const Tied& t, int64_t first, int64_t rows, const TiedSpace& space, Ahead& ahead) {
  const Matrix weights{t.weights + first * t.units, t.units, 1};
  for (int64_t user = 0; user < t.users; user += WIDTH) {
    multiply_rows(rows, t.units, weights, space.code + user * t.units, space.sums + user, padded(t.users), false,
                  ahead);
  }
}

// Adds values.T [users, rows] weights [rows, units] of a block to the total.
inline void add_back(const Tied& t, int64_t first, int64_t rows, const float* values, int64_t width,
                     const TiedSpace& space, Ahead& ahead) {
  pack_panels({t.weights + first * t.units, t.units, 1}, rows, t.units, 0, rows, space.panels);
  for (int64_t unit = 0; unit < t.units; unit += WIDTH) {
    multiply_rows(t.users, rows, {values, 1, width}, space.panels + unit * rows, space.total + unit, padded(t.units), true,
                  ahead);
  }
}

inline void start_tied(const Tied& t, const float* code, const TiedSpace& space) {
  for (int64_t i = 0; i < t.users * padded(t.units); ++i) space.total[i] = 0.0f;
  pack_panels({code, 1, t.units}, t.units, t.users, 0, t.units, space.code);
}

inline float sum_lanes(Vec v) {
  float sum = 0.0f;
  for (int lane = 0; lane < LANES; ++lane) sum += v[lane];
  return sum;
}

// Calls visit(vector, count) for every vector of a row.
template <class Visit>
inline void each_vector(int64_t users, Visit visit) {
  for (int64_t user = 0; user < users; user += LANES) visit(user, smaller(LANES, users - user));
}

inline void tied_forward(const TiedForward& p, Range items, float* work) {
  const Tied& t = p.layer;
  const TiedSpace space(t, work);
  start_tied(t, p.code, space);
  const Rows arrays[] = {{t.weights, t.units}, {p.y, t.users}};
  each_block(t, items, arrays, [&](int64_t first, int64_t rows, Ahead& ahead) {
    multiply_code(t, first, rows, space, ahead);
    for (int64_t row = 0; row < rows; ++row) {
      each_vector(t.users, [&](int64_t user, int64_t count) {
        const Vec sum = load(space.sums + row * padded(t.users) + user, LANES) + p.bias[first + row];
        store(p.y + (first + row) * t.users + user, selu(sum), count);
      });
    }
    add_back(t, first, rows, p.y + first * t.users, t.users, space, ahead);
  });
}

inline double tied_refeed(const TiedRefeed& p, Range items, float* work) {
  const Tied& t = p.layer;
  const TiedSpace space(t, work);
  start_tied(t, p.code, space);
  double squares = 0;
  const Rows arrays[] = {{t.weights, t.units}, {p.y, t.users}, {p.z, t.users}};
  each_block(t, items, arrays, [&](int64_t first, int64_t rows, Ahead& ahead) {
    multiply_code(t, first, rows, space, ahead);
    for (int64_t row = 0; row < rows; ++row) {
      Vec square{};
      each_vector(t.users, [&](int64_t user, int64_t count) {
        const int64_t at = (first + row) * t.users + user;
        const Vec z = selu(load(space.sums + row * padded(t.users) + user, LANES) + p.bias[first + row]);
        store(p.z + at, z, count);
        const Vec apart = load(p.z + at, count) - load(p.y + at, count);  // beyond the last user nothing
        square += apart * apart;
        store(space.joined + row * t.users + user, p.scale * apart * selu_slope(z), count);
      });
      squares += sum_lanes(square);
    }
    add_back(t, first, rows, space.joined, t.users, space, ahead);
  });
  return squares;
}

// Of a block, side by side as `joined`: dz, y and dy of each item; and the gradient of its bias.
inline void join_gradients(const TiedGradient& p, int64_t first, int64_t rows, const TiedSpace& space) {
  const int64_t users = p.layer.users;
  for (int64_t row = 0; row < rows; ++row) {
    float* joined = space.joined + row * 3 * users;
    Vec both{};
    each_vector(users, [&](int64_t user, int64_t count) {
      const int64_t at = (first + row) * users + user;
      const Vec y = load(p.y + at, count), z = load(p.z + at, count), apart = p.scale * (z - y);
      const Vec dz = apart * selu_slope(z);
      const Vec dy = (load(space.sums + row * padded(users) + user, LANES) - apart) * selu_slope(y);
      both += dz + dy;
      store(joined + user, dz, count);
      store(joined + users + user, y, count);
      store(joined + 2 * users + user, dy, count);
    });
    p.d_bias[first + row] = sum_lanes(both);
  }
}

// d_weights [rows, units] = joined [rows, 3 users] outer [3 users, units] of a block.
inline void multiply_outer(const TiedGradient& p, int64_t first, int64_t rows, const TiedSpace& space, Ahead& ahead) {
  const int64_t units = p.layer.units, terms = 3 * p.layer.users;
  for (int64_t unit = 0; unit < units; unit += WIDTH) {
    const int64_t present = smaller(WIDTH, units - unit);
    float* to = p.d_weights + first * units + unit;
    const bool whole = present == WIDTH;
    multiply_rows(rows, terms, {space.joined, terms, 1}, space.outer + unit * terms, whole ? to : space.spare,
                  whole ? units : WIDTH, false, ahead);
    for (int64_t row = 0; row < rows && !whole; ++row) {
      for (int64_t j = 0; j < present; ++j) to[row * units + j] = space.spare[row * WIDTH + j];
    }
  }
}

inline void tied_gradient(const TiedGradient& p, Range items, float* work) {
  const Tied& t = p.layer;
  const TiedSpace space(t, work);
  start_tied(t, p.dz_first, space);
  const float* inputs[] = {p.z_code, p.dz_first, p.y_code};
  for (int64_t i = 0; i < 3; ++i) {
    pack_panels({inputs[i], t.units, 1}, t.users, t.units, i * t.users, 3 * t.users, space.outer);
  }
  const Rows arrays[] = {{t.weights, t.units}, {p.y, t.users}, {p.z, t.users}, {p.d_weights, t.units}};
  each_block(t, items, arrays, [&](int64_t first, int64_t rows, Ahead& ahead) {
    multiply_code(t, first, rows, space, ahead);
    join_gradients(p, first, rows, space);
    multiply_outer(p, first, rows, space, ahead);
    add_back(t, first, rows, space.joined + 2 * t.users, 3 * t.users, space, ahead);
  });
}

}  // namespace HOTLOOP_ISA
}  // namespace hotloop
