// A network with Bernoulli outputs as a handler of XLA's foreign function interface.

#include "bernoulli.h"

#include <vector>

#include "pool_guard.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace hotloop {
namespace {

using Vector = ffi::Buffer<ffi::F32, 1>;
using Rows = ffi::Buffer<ffi::F32, 2>;
template <class Buffer>
using Result = ffi::Result<Buffer>;

// The weights, bias and transposed weights of every layer, one after the other; an empty list where they do not fit
// together or a layer has no outputs.
std::vector<NetworkLayer> read_layers(ffi::RemainingArgs arrays, int64_t inputs) {
  std::vector<NetworkLayer> layers;
  for (size_t i = 0; i + 3 <= arrays.size(); i += 3) {
    const auto weights = arrays.get<Rows>(i), transposed = arrays.get<Rows>(i + 2);
    const auto bias = arrays.get<Vector>(i + 1);
    if (!weights || !bias || !transposed) return {};
    const int64_t outputs = bias->dimensions()[0];
    if (outputs == 0 || !is_matrix(*weights, inputs, outputs) || !is_matrix(*transposed, outputs, inputs)) return {};
    layers.push_back({inputs, outputs, weights->typed_data(), bias->typed_data(), transposed->typed_data()});
    inputs = outputs;
  }
  return layers;
}

ffi::Error gradient(ffi::ThreadPool pool, Rows images, Rows inputs, ffi::RemainingArgs arrays, Result<Vector> values,
                    Result<Rows> gradients) {
  const int64_t rows = inputs.dimensions()[0], width = inputs.dimensions()[1];
  const std::vector<NetworkLayer> layers = read_layers(arrays, width);
  if (layers.empty() || 3 * layers.size() != arrays.size() || !is_matrix(images, rows, layers.back().outputs) ||
      values->dimensions()[0] != rows || !is_matrix(*gradients, rows, width)) {
    return refuse("the sizes of a network's layers, images and inputs do not agree");
  }
  if (inputs.element_count() == 0) return refuse("a network needs rows and inputs");
  const BernoulliNetwork network{layers.data(),       static_cast<int64_t>(layers.size()), rows, images.typed_data(),
                                 inputs.typed_data(), values->typed_data(),                gradients->typed_data()};
  return guarded(pool, [&](int64_t threads, auto schedule) { bernoulli_gradient(network, threads, schedule); });
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_bernoulli_gradient, gradient,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Rows>().Arg<Rows>().RemainingArgs().Ret<Vector>().Ret<Rows>());

}  // namespace hotloop
