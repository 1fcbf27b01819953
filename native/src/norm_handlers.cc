// Batch norms as handlers of XLA's foreign function interface, one exported symbol each.

#include "norm.h"

#include "pool_guard.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace hotloop {
namespace {

using Image = ffi::Buffer<ffi::F32, 4>;
using Vector = ffi::Buffer<ffi::F32, 1>;
using Floats = ffi::Buffer<ffi::F32>;  // of any rank; empty: there is none
template <class Buffer>
using Result = ffi::Result<Buffer>;

// Whether all are vectors of so many numbers.
template <class... Vectors>
bool have(int64_t channels, const Vectors&... vectors) {
  return ((static_cast<int64_t>(vectors.element_count()) == channels) && ...);
}

bool is_empty_or(const Floats& buffer, size_t count) {
  return buffer.element_count() == 0 || buffer.element_count() == count;
}

ffi::Error forward(ffi::ThreadPool pool, Image x, Vector scale, Vector offset, Floats residual, Result<Image> y,
                   Result<Vector> mean, Result<Vector> variance, float epsilon, bool relu) {
  const int64_t height = x.dimensions()[1], width = x.dimensions()[2], channels = x.dimensions()[3];
  if (x.element_count() == 0) return refuse("no images cannot be normalised");
  if (!have(channels, scale, offset, *mean, *variance) || y->element_count() != x.element_count() ||
      !is_empty_or(residual, x.element_count())) {
    return refuse("the sizes of a norm's images and parameters do not agree");
  }
  const Norm norm{static_cast<int64_t>(x.element_count()) / channels, channels, height / 2 * width + width / 2, relu,
                  x.typed_data(), data_or_null(residual), y->typed_data()};
  return guarded([&] {
    normalise(norm, scale.typed_data(), offset.typed_data(), epsilon, mean->typed_data(), variance->typed_data(),
              pool.num_threads());
  });
}

// `y`: what came out, where something was added (a mask cannot be worked out without it). d_residual: empty, or wanted.
ffi::Error backward(ffi::ThreadPool pool, Image dy, Image x, Floats y, Vector scale, Vector offset, Vector mean,
                    Vector variance, Vector d_mean, Vector d_variance, Result<Image> dx, Result<Floats> d_residual,
                    Result<Vector> d_scale, Result<Vector> d_offset, float epsilon, bool relu) {
  const int64_t channels = x.dimensions()[3];
  const size_t count = x.element_count();
  if (count == 0) return refuse("no images cannot be normalised");
  if (!have(channels, scale, offset, mean, variance, d_mean, d_variance, *d_scale, *d_offset) ||
      dy.element_count() != count || dx->element_count() != count || !is_empty_or(y, count) ||
      !is_empty_or(*d_residual, count)) {
    return refuse("the sizes of a norm's images and parameters do not agree");
  }
  const NormGradient gradient{static_cast<int64_t>(count) / channels, channels, relu, dy.typed_data(), x.typed_data(),
                              data_or_null(y), dx->typed_data(), data_or_null(*d_residual)};
  const NormParameters parameters{scale.typed_data(),  offset.typed_data(),     mean.typed_data(),
                                  variance.typed_data(), d_mean.typed_data(),   d_variance.typed_data(),
                                  d_scale->typed_data(), d_offset->typed_data()};
  return guarded([&] { normalise_gradient(gradient, parameters, epsilon, pool.num_threads()); });
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_norm_forward, forward,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Image>().Arg<Vector>().Arg<Vector>().Arg<Floats>()
        .Ret<Image>().Ret<Vector>().Ret<Vector>().Attr<float>("epsilon").Attr<bool>("relu"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_norm_backward, backward,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
        .Arg<Image>().Arg<Image>().Arg<Floats>().Arg<Vector>().Arg<Vector>().Arg<Vector>().Arg<Vector>().Arg<Vector>()
        .Arg<Vector>().Ret<Image>().Ret<Floats>().Ret<Vector>().Ret<Vector>()
        .Attr<float>("epsilon").Attr<bool>("relu"));

}  // namespace hotloop
