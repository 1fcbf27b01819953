// Matrix products by tiles that stay in registers: rows and columns are copied ("packed") in the order in which a tile
// reads them, since rows a power of two apart would drive one another out of the cache.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace hotloop {
namespace HOTLOOP_ISA {

// c[ROWS, WIDTH] = a[terms, ROWS] b[terms, WIDTH], rows of b `stride` apart and rows of c `width`. Few rows take several
// sums at once, which hides an addition's latency.
template <int ROWS>
__attribute__((always_inline)) inline void multiply_tile(int64_t terms, const float* a, const float* b, int64_t stride,
                                                         float* c, int64_t width, bool add) {
  constexpr int SUMS = ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1;
  Vec s[SUMS][ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS * SUMS; ++r) s[r / ROWS][r % ROWS][0] = s[r / ROWS][r % ROWS][1] = Vec{};
  int64_t i = 0;
  for (; i + SUMS <= terms; i += SUMS) {
#pragma GCC unroll 4
    for (int u = 0; u < SUMS; ++u) {
      const float* line = b + (i + u) * stride;
      const Vec left = load(line, LANES), right = load(line + LANES, LANES);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const float x = a[(i + u) * ROWS + r];
        s[u][r][0] += x * left;
        s[u][r][1] += x * right;
      }
    }
  }
  for (; i < terms; ++i) {
    const Vec left = load(b + i * stride, LANES), right = load(b + i * stride + LANES, LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      s[0][r][0] += a[i * ROWS + r] * left;
      s[0][r][1] += a[i * ROWS + r] * right;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Vec sum = s[0][r][half];
#pragma GCC unroll 4
      for (int u = 1; u < SUMS; ++u) sum += s[u][r][half];
      float* out = c + r * width + half * LANES;
      store(out, add ? load(out, LANES) + sum : sum, LANES);
    }
  }
}

template <int ROWS>
__attribute__((noinline)) void tile(int64_t terms, const float* a, const float* b, int64_t stride, float* c, int64_t width,
                                    bool add) {
  multiply_tile<ROWS>(terms, a, b, stride, c, width, add);
}

using Tile = void (*)(int64_t, const float*, const float*, int64_t, float*, int64_t, bool);
#if defined(__AVX512F__)
constexpr Tile TILES[] = {tile<1>, tile<2>, tile<3>,  tile<4>,  tile<5>,  tile<6>,  tile<7>,
                          tile<8>, tile<9>, tile<10>, tile<11>, tile<12>, tile<13>, tile<14>};
#else
constexpr Tile TILES[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};
#endif

inline int64_t padded(int64_t columns) { return (columns + WIDTH - 1) / WIDTH * WIDTH; }

inline void pack_columns(Matrix b, int64_t terms, int64_t columns, Range panels, float* packed) {
  for (int64_t start = 0; start < terms; start += BLOCK) {
    const int64_t count = smaller(BLOCK, terms - start);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      float* to = packed + start * padded(columns) + panel * WIDTH * count;
      const int64_t first = panel * WIDTH, present = smaller(WIDTH, columns - first);
      const float* from = b.data + start * b.row + first * b.column;
      for (int64_t i = 0; i < count; ++i, from += b.row, to += WIDTH) {
        if (b.column == 1) {
          store(to, load(from, present), LANES);
          store(to + LANES, load(from + LANES, present - LANES), LANES);
        } else {
          for (int64_t j = 0; j < WIDTH; ++j) to[j] = j < present ? from[j * b.column] : 0.0f;
        }
      }
    }
  }
}

// Calls body(block) for blocks of nearly equal size, of at most `most` rows.
template <class Body>
inline void over_row_blocks(Range rows, int64_t most, Body body) {
  const int64_t count = rows.end - rows.begin, blocks = (count + most - 1) / most;
  for (int64_t block = 0; block < blocks; ++block) {
    body(Range{rows.begin + count * block / blocks, rows.begin + count * (block + 1) / blocks});
  }
}

// Rows in chunks of nearly equal height, none above TALLEST.
struct Chunks {
  int64_t rows, count;
  explicit Chunks(int64_t rows) : rows(rows), count((rows + TALLEST - 1) / TALLEST) {}
  int64_t begin(int64_t chunk) const { return rows * chunk / count; }
};

// As many terms of a chunk as come in whole vectors, from rows that lie term by term: how many. Each column is stored as a
// whole vector, of which what is too much is overwritten by the next; so LANES floats after the last must be ours.
inline int64_t pack_vectors(const float* from, int64_t row, int64_t height, int64_t terms, float* to) {
  if (TALLEST > LANES) return 0;
  const int64_t whole = terms / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) {
    Vec columns[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; ++r) columns[r] = r < height ? load(from + r * row + i, LANES) : Vec{};
    transpose(columns);
#pragma GCC unroll 16
    for (int j = 0; j < LANES; ++j) store(to + (i + j) * height, columns[j], LANES);
  }
  return whole;
}

// Blocks of terms, chunks of rows, terms, rows; and LANES floats more that may be written.
inline void pack_rows(Matrix a, int64_t rows, int64_t terms, float* packed) {
  const Chunks chunks(rows);
  for (int64_t start = 0; start < terms; start += BLOCK) {
    const int64_t count = smaller(BLOCK, terms - start);
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      const int64_t first = chunks.begin(chunk), height = chunks.begin(chunk + 1) - first;
      float* to = packed + start * rows + first * count;
      const float* from = a.data + first * a.row + start * a.column;
      const int64_t done = a.column == 1 ? pack_vectors(from, a.row, height, count, to) : 0;
      from += done * a.column;
      to += done * height;
      for (int64_t i = done; i < count; ++i, from += a.column, to += height) {
        for (int64_t r = 0; r < height; ++r) to[r] = from[r * a.row];
      }
    }
  }
}

// Rows that lie one after the other, packed: a single one is so where it lies.
inline const float* packed_rows(const float* rows, int64_t count, int64_t terms, float* packed) {
  if (count == 1) return rows;
  pack_rows({rows, terms, 1}, count, terms, packed);
  return packed;
}

// A matrix's columns: packed, or read where they lie, `across` floats from row to row.
struct Columns {
  const float* data;
  int64_t columns, across = 0;

  // The terms from `start` on, `count` of them, of one panel.
  const float* at(int64_t start, int64_t count, int64_t panel) const {
    return across ? data + start * across + panel * WIDTH : data + start * padded(columns) + panel * WIDTH * count;
  }
  int64_t stride() const { return across ? across : WIDTH; }
};

// c[rows, WIDTH] of one panel, from packed rows.
inline void multiply_panel(const float* a, int64_t rows, Columns b, int64_t terms, int64_t panel, float* c, int64_t width,
                           bool add) {
  if (rows <= TALLEST && terms <= BLOCK) {  // one tile, without the divisions that a row's product is not much longer than
    return TILES[rows - 1](terms, a, b.at(0, terms, panel), b.stride(), c, width, add);
  }
  const Chunks chunks(rows);
  for (int64_t start = 0; start < terms; start += BLOCK) {
    const int64_t count = smaller(BLOCK, terms - start);
    const float* weights = b.at(start, count, panel);
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      const int64_t first = chunks.begin(chunk), height = chunks.begin(chunk + 1) - first;
      TILES[height - 1](count, a + start * rows + first * count, weights, b.stride(), c + first * width, width,
                        add || start > 0);
    }
  }
}

// One row times some panels, each `apart` floats after the one before in c: packed weights are read from end to end, with
// nothing in between that would hold up their way from the cache.
__attribute__((noinline)) inline void multiply_row(const float* a, Columns b, int64_t terms, Range panels, float* c,
                                                   int64_t apart, bool add) {
  for (int64_t start = 0; start < terms; start += BLOCK) {
    const int64_t count = smaller(BLOCK, terms - start);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      multiply_tile<1>(count, a + start, b.at(start, count, panel), b.stride(), c + (panel - panels.begin) * apart, WIDTH,
                       add || start > 0);
    }
  }
}

// A product goes by blocks of so many rows, terms and columns: the packed columns take 2 MB, the packed rows 0.3 MB.
constexpr int64_t ROW_BLOCK = 10 * TALLEST, COLUMN_BLOCK = 1024;
constexpr int64_t PRODUCT_WORK = BLOCK * (COLUMN_BLOCK + ROW_BLOCK) + ROW_BLOCK * WIDTH;

// One panel of a block of rows, whose first row and column in c is `c`; `spare` takes panels that c has no room for.
inline void finish_panel(const Product& p, const float* a, int64_t rows, const float* b, int64_t terms, int64_t columns,
                         int64_t panel, int64_t column, bool add, float* c, float* spare) {
  const int64_t present = smaller(WIDTH, p.columns - column);
  if (present == WIDTH) return multiply_panel(a, rows, {b, columns}, terms, panel, c, p.width, add);
  multiply_panel(a, rows, {b, columns}, terms, panel, spare, WIDTH, false);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < present; ++j) {
      const float sum = spare[r * WIDTH + j];
      c[r * p.width + j] = add ? c[r * p.width + j] + sum : sum;
    }
  }
}

inline void multiply(const Product& p, Range rows, Range columns, float* work) {
  float *packed_columns = work, *packed_rows = work + BLOCK * COLUMN_BLOCK;
  float* spare = packed_rows + BLOCK * ROW_BLOCK;
  for (int64_t column = columns.begin; column < columns.end; column += COLUMN_BLOCK) {
    const int64_t across = smaller(COLUMN_BLOCK, columns.end - column), panels = padded(across) / WIDTH;
    for (int64_t term = 0; term < p.terms; term += BLOCK) {
      const int64_t terms = smaller(BLOCK, p.terms - term);
      const Matrix b{p.b.data + term * p.b.row + column * p.b.column, p.b.row, p.b.column};
      pack_columns(b, terms, across, {0, panels}, packed_columns);
      for (int64_t row = rows.begin; row < rows.end; row += ROW_BLOCK) {
        const int64_t high = smaller(ROW_BLOCK, rows.end - row);
        pack_rows({p.a.data + row * p.a.row + term * p.a.column, p.a.row, p.a.column}, high, terms, packed_rows);
        for (int64_t panel = 0; panel < panels; ++panel) {
          const int64_t first = column + panel * WIDTH;
          finish_panel(p, packed_rows, high, packed_columns, terms, across, panel, first, p.add || term > 0,
                       p.c + row * p.width + first, spare);
        }
      }
    }
  }
}

}  // namespace HOTLOOP_ISA
}  // namespace hotloop
