// The passes of tied layers as handlers of XLA's foreign function interface, one exported symbol each.

#include "tied.h"

#include "pool_guard.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace hotloop {
namespace {

using Flat = ffi::Buffer<ffi::F32, 2>;
using Vector = ffi::Buffer<ffi::F32, 1>;
using Number = ffi::Buffer<ffi::F32, 0>;
template <class Buffer>
using Result = ffi::Result<Buffer>;

bool has(const Vector& vector, int64_t count) { return vector.dimensions()[0] == count; }

// The layer of these weights and codes.
Tied layer_of(Flat weights, Flat code) {
  return {weights.dimensions()[0], code.dimensions()[0], weights.dimensions()[1], weights.typed_data()};
}

// Whether all are [users, units].
template <class... Codes>
bool are_codes(const Tied& t, const Codes&... codes) {
  return (is_matrix(codes, t.users, t.units) && ...);
}

// Whether all are [items, users].
template <class... Outputs>
bool are_outputs(const Tied& t, const Outputs&... outputs) {
  return (is_matrix(outputs, t.items, t.users) && ...);
}

// Calls work(threads, schedule) unless a layer is empty or its sizes do not agree.
template <class Work>
ffi::Error checked(ffi::ThreadPool& pool, const Tied& t, bool agree, Work work) {
  if (t.items < 1 || t.users < 1 || t.units < 1) return refuse("an empty tied layer cannot be run");
  if (!agree) return refuse("the sizes of a tied layer's arrays do not agree");
  return guarded(pool, work);
}

ffi::Error forward(ffi::ThreadPool pool, Flat weights, Vector bias, Flat code, Result<Flat> y, Result<Flat> next) {
  const Tied t = layer_of(weights, code);
  const bool agree = has(bias, t.items) && are_codes(t, code, *next) && are_outputs(t, *y);
  return checked(pool, t, agree, [&](int64_t threads, auto schedule) {
    tied_forward({t, bias.typed_data(), code.typed_data(), y->typed_data()}, next->typed_data(), threads, schedule);
  });
}

ffi::Error refeed(ffi::ThreadPool pool, Flat weights, Vector bias, Flat code, Flat y, Result<Flat> z, Result<Flat> back,
                  Result<Number> squares, float scale) {
  const Tied t = layer_of(weights, code);
  const bool agree = has(bias, t.items) && are_codes(t, code, *back) && are_outputs(t, y, *z);
  return checked(pool, t, agree, [&](int64_t threads, auto schedule) {
    tied_refeed({t, bias.typed_data(), code.typed_data(), y.typed_data(), scale, z->typed_data()}, back->typed_data(),
                squares->typed_data(), threads, schedule);
  });
}

ffi::Error gradient(ffi::ThreadPool pool, Flat weights, Flat y, Flat z, Flat y_code, Flat z_code, Flat dz_first,
                    Result<Flat> d_weights, Result<Vector> d_bias, Result<Flat> back, float scale) {
  const Tied t = layer_of(weights, y_code);
  const bool agree = has(*d_bias, t.items) && is_matrix(*d_weights, t.items, t.units) && are_outputs(t, y, z) &&
                     are_codes(t, y_code, z_code, dz_first, *back);
  return checked(pool, t, agree, [&](int64_t threads, auto schedule) {
    tied_gradient({t, y.typed_data(), z.typed_data(), y_code.typed_data(), z_code.typed_data(), dz_first.typed_data(),
                   scale, d_weights->typed_data(), d_bias->typed_data()},
                  back->typed_data(), threads, schedule);
  });
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_tied_forward, forward,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Flat>().Arg<Vector>().Arg<Flat>().Ret<Flat>().Ret<Flat>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_tied_refeed, refeed,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Flat>().Arg<Vector>().Arg<Flat>().Arg<Flat>()
        .Ret<Flat>().Ret<Flat>().Ret<Number>().Attr<float>("scale"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_tied_gradient, gradient,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
        .Arg<Flat>().Arg<Flat>().Arg<Flat>().Arg<Flat>().Arg<Flat>().Arg<Flat>()
        .Ret<Flat>().Ret<Vector>().Ret<Flat>().Attr<float>("scale"));

}  // namespace hotloop
