// The convolutions as handlers of XLA's foreign function interface, one exported symbol each.

#include <string>

#include "convolution.h"
#include "grouped.h"
#include "pool_guard.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using hotloop::Geometry;
using hotloop::Pass;
using hotloop::refuse;
using Image = ffi::Buffer<ffi::F32, 4>;
using Vector = ffi::Buffer<ffi::F32, 1>;
using Numbers = ffi::Span<const int64_t>;

Geometry geometry(Numbers x, Numbers w, Numbers y, Numbers strides, Numbers pads, int64_t groups) {
  return {x[0], x[1], x[2], x[3], w[0], w[1], w[3], y[1], y[2], strides[0], strides[1],
          pads[0], pads[1], pads[2], pads[3], groups};
}

// Small groups by our own kernels; everything else by oneDNN.
void compute(Pass pass, const Geometry& g, int64_t threads, const float* first, const float* second, const float* bias,
             const float* residual, float* result) {
  if (pass == Pass::forward && has_small_groups(g)) return convolve_small_groups(g, threads, first, second, result);
  convolve(pass, g, threads, first, second, bias, residual, result);
}

// `x`, `w`, `y`: the sizes of the image, the kernel and the result, whichever of them are computed.
ffi::Error run(Pass pass, Numbers x, Numbers w, Numbers y, Numbers strides, Numbers pads, int64_t groups,
               ffi::ThreadPool& pool, const float* first, const float* second, const float* bias, const float* residual,
               float* result) {
  if (strides.size() != 2 || pads.size() != 4) return refuse("strides are two numbers, pads four");
  if (groups < 1 || x[0] != y[0] || w[3] != y[3] || w[2] * groups != x[3]) {
    return refuse("images, channels or filters of the operands do not agree");
  }
  const Geometry g = geometry(x, w, y, strides, pads, groups);
  if (const std::string why = complaint(g); !why.empty()) return refuse(why);
  return hotloop::guarded([&] { compute(pass, g, pool.num_threads(), first, second, bias, residual, result); });
}

ffi::Error forward(ffi::ThreadPool pool, Image x, Image w, ffi::Result<Image> y, Numbers strides, Numbers pads,
                   int64_t groups) {
  return run(Pass::forward, x.dimensions(), w.dimensions(), y->dimensions(), strides, pads, groups, pool,
             x.typed_data(), w.typed_data(), nullptr, nullptr, y->typed_data());
}

ffi::Error bias(ffi::ThreadPool pool, Image x, Image w, Vector b, ffi::Result<Image> y, Numbers strides, Numbers pads,
                int64_t groups, bool relu) {
  if (b.dimensions()[0] != w.dimensions()[3]) return refuse("one bias is needed for each filter");
  return run(relu ? Pass::bias_relu : Pass::bias, x.dimensions(), w.dimensions(), y->dimensions(), strides, pads,
             groups, pool, x.typed_data(), w.typed_data(), b.typed_data(), nullptr, y->typed_data());
}

ffi::Error bias_sum(ffi::ThreadPool pool, Image x, Image w, Vector b, Image r, ffi::Result<Image> y, Numbers strides,
                    Numbers pads, int64_t groups, bool relu) {
  if (b.dimensions()[0] != w.dimensions()[3]) return refuse("one bias is needed for each filter");
  if (r.element_count() != y->element_count()) return refuse("what is added must have the result's size");
  return run(relu ? Pass::bias_sum_relu : Pass::bias_sum, x.dimensions(), w.dimensions(), y->dimensions(), strides, pads,
             groups, pool, x.typed_data(), w.typed_data(), b.typed_data(), r.typed_data(), y->typed_data());
}

ffi::Error input_gradient(ffi::ThreadPool pool, Image dy, Image w, ffi::Result<Image> dx, Numbers strides,
                          Numbers pads, int64_t groups) {
  return run(Pass::input_gradient, dx->dimensions(), w.dimensions(), dy.dimensions(), strides, pads, groups, pool,
             dy.typed_data(), w.typed_data(), nullptr, nullptr, dx->typed_data());
}

ffi::Error kernel_gradient(ffi::ThreadPool pool, Image x, Image dy, ffi::Result<Image> dw, Numbers strides,
                           Numbers pads, int64_t groups) {
  return run(Pass::kernel_gradient, x.dimensions(), dw->dimensions(), dy.dimensions(), strides, pads, groups, pool,
             x.typed_data(), dy.typed_data(), nullptr, nullptr, dw->typed_data());
}

}  // namespace

#pragma GCC visibility push(default)
#define HOTLOOP_SETTINGS \
  Ret<Image>().Attr<Numbers>("strides").Attr<Numbers>("pads").Attr<int64_t>("groups")

XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_conv_forward, forward,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Image>().Arg<Image>().HOTLOOP_SETTINGS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_conv_bias, bias,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Image>().Arg<Image>().Arg<Vector>().HOTLOOP_SETTINGS.Attr<bool>("relu"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_conv_bias_sum, bias_sum,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Image>().Arg<Image>().Arg<Vector>().Arg<Image>().HOTLOOP_SETTINGS
        .Attr<bool>("relu"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_conv_input_gradient, input_gradient,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Image>().Arg<Image>().HOTLOOP_SETTINGS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_conv_kernel_gradient, kernel_gradient,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Image>().Arg<Image>().HOTLOOP_SETTINGS);
