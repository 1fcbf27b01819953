// Drives the passes of tied layers without XLA or Python, so that the sanitizers see them: `make native-sanitize`.
// Results are compared with plain loops in double, on one thread and on several, on pools whose threads come late or
// never, and from several threads at once.

#include "../src/tied.h"

#include <cmath>
#include <cstdio>

#include "check.h"

namespace {

using namespace check;

constexpr double SCALE = 1.0507009873554805, BOTTOM = SCALE * 1.6732632423543772;
constexpr float FACTOR = 0.125f;

double selu(double x) { return x > 0 ? SCALE * x : BOTTOM * std::expm1(x); }
double slope(double y) { return y > 0 ? SCALE : y + BOTTOM; }

struct Sizes {
  int64_t items, users, units;
};

struct Results {
  Numbers y, next, z, back, squares, d_weights, d_bias, d_code;

  bool operator==(const Results& other) const {
    return y == other.y && next == other.next && z == other.z && back == other.back && squares == other.squares &&
           d_weights == other.d_weights && d_bias == other.d_bias && d_code == other.d_code;
  }
};

struct Trial {
  Sizes sizes;
  Numbers weights, bias, y_code, z_code, dz_first;

  explicit Trial(Sizes s)
      : sizes(s), weights(drawn(s.items * s.units, 1, 1 / std::sqrt(s.units))), bias(drawn(s.items, 2)),
        y_code(drawn(s.users * s.units, 3)), z_code(drawn(s.users * s.units, 4)), dz_first(drawn(s.users * s.units, 5)) {}

  Results run(int64_t threads, const Team::Schedule& schedule) const {
    const auto blank = [](size_t size) { return Numbers(size, NAN); };
    const size_t outputs = sizes.items * sizes.users, codes = y_code.size();
    Results r{blank(outputs), blank(codes),          blank(outputs),     blank(codes),
              blank(1),       blank(weights.size()), blank(bias.size()), blank(codes)};
    const hotloop::Tied t{sizes.items, sizes.users, sizes.units, weights.data()};
    const hotloop::TiedForward forward{t, bias.data(), y_code.data(), r.y.data()};
    const hotloop::TiedRefeed refeed{t, bias.data(), z_code.data(), r.y.data(), FACTOR, r.z.data()};
    const hotloop::TiedGradient gradient{t, r.y.data(), r.z.data(), y_code.data(), z_code.data(),
                                         dz_first.data(), FACTOR, r.d_weights.data(), r.d_bias.data()};
    tied_forward(forward, r.next.data(), threads, schedule);
    tied_refeed(refeed, r.back.data(), r.squares.data(), threads, schedule);
    tied_gradient(gradient, r.d_code.data(), threads, schedule);
    return r;
  }
};

// The same of a trial in double.
struct Reference {
  Exact y, next, z, back, squares, d_weights, d_bias, d_code;

  explicit Reference(const Trial& t)
      : y(t.sizes.items * t.sizes.users), next(t.y_code.size()), z(y), back(next), squares(1), d_weights(t.weights.size()),
        d_bias(t.bias.size()), d_code(next) {
    for (int64_t item = 0; item < t.sizes.items; ++item) {
      for (int64_t user = 0; user < t.sizes.users; ++user) add(t, item, user);
    }
  }

 private:
  void add(const Trial& t, int64_t item, int64_t user) {
    const int64_t units = t.sizes.units, at = item * t.sizes.users + user;
    const float* weights = t.weights.data() + item * units;
    const auto along = [&](const Numbers& codes) {
      double sum = 0;
      for (int64_t unit = 0; unit < units; ++unit) sum += double(weights[unit]) * codes[user * units + unit];
      return sum;
    };
    y[at] = selu(along(t.y_code) + t.bias[item]);
    z[at] = selu(along(t.z_code) + t.bias[item]);
    const double apart = z[at] - y[at], dz = FACTOR * apart * slope(z[at]);
    const double dy = (along(t.dz_first) - FACTOR * apart) * slope(y[at]);
    squares[0] += apart * apart;
    d_bias[item] += dz + dy;
    for (int64_t unit = 0; unit < units; ++unit) {
      const int64_t place = user * units + unit;
      next[place] += y[at] * weights[unit];
      back[place] += dz * weights[unit];
      d_code[place] += dy * weights[unit];
      d_weights[item * units + unit] += dz * t.z_code[place] + y[at] * t.dz_first[place] + dy * t.y_code[place];
    }
  }
};

void check_layer(Sizes sizes) {
  const Trial trial(sizes);
  const Reference expected(trial);
  const Results alone = trial.run(4, NEVER);
  require_close(alone.y, expected.y, "y is wrong");
  require_close(alone.next, expected.next, "the next layer's product is wrong");
  require_close(alone.z, expected.z, "z is wrong");
  require_close(alone.back, expected.back, "the gradient of z's code is wrong");
  require_close(alone.squares, expected.squares, "the sum of squares is wrong");
  require_close(alone.d_weights, expected.d_weights, "the gradient of the weights is wrong");
  require_close(alone.d_bias, expected.d_bias, "the gradient of the bias is wrong");
  require_close(alone.d_code, expected.d_code, "the gradient of y's code is wrong");
  Pool pool;
  require(trial.run(4, pool.at_once()) == alone, "threads change the numbers");
  require(trial.run(4, pool.when_over()) == alone, "threads that come late change the numbers");
}

void check_layers() {
  // Ones; no whole vectors; several blocks with a rest, shared evenly or not; users and units so many that blocks are low.
  for (Sizes sizes : {Sizes{1, 1, 1}, {3, 1, 40}, {5, 17, 3}, {29, 33, 31}, {300, 64, 32}, {1001, 19, 131}, {333, 70, 96},
                      {47, 900, 650}}) {
    check_layer(sizes);
  }
}

void check_no_number() {
  Trial trial({40, 19, 33});
  trial.bias[7] = NAN;
  const Results found = trial.run(1, NEVER);
  for (size_t at = 0; at < found.y.size(); ++at) {
    require(std::isnan(found.y[at]) == (at / 19 == 7) && std::isnan(found.z[at]) == (at / 19 == 7), "NaN does not stay");
  }
  require(std::isnan(found.squares[0]) && std::isnan(found.d_bias[7]), "NaN does not stay in sums");
}

}  // namespace

int main() {
  check_layers();
  check_no_number();
  from_threads(3, [](int) { check_layers(); });
  std::puts("tied_check: all is well");
}
