// Recurrent sequences as handlers of XLA's foreign function interface, one exported symbol each.

#include "recurrent.h"

#include <string>

#include "pool_guard.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace hotloop {
namespace {

using Flat = ffi::Buffer<ffi::F32, 2>;
using Vector = ffi::Buffer<ffi::F32, 1>;
using Floats = ffi::Buffer<ffi::F32>;  // of any rank
using Sequence = ffi::Buffer<ffi::F32, 3>;
template <class Buffer>
using Result = ffi::Result<Buffer>;

bool is_empty_or(size_t found, int64_t expected) {
  return found == 0 || static_cast<int64_t>(found) == expected;
}

// The sizes of a recurrence over h[steps, batch, hidden], or why these are none.
std::string complaint(const Sizes& s, Flat u, size_t z, size_t bias, size_t h0, size_t c0) {
  const int64_t state = s.batch * s.hidden, gates = gates_of(s.cell);
  if (s.cell < Cell::rnn || s.cell > Cell::lstm) return "there is no such cell";
  if (s.steps < 1 || state < 1) return "an empty sequence cannot be run";
  if (u.dimensions()[0] != s.hidden || u.dimensions()[1] != gates * s.hidden ||
      static_cast<int64_t>(z) != s.steps * state * gates) {
    return "the sizes of a sequence and its weights do not fit together";
  }
  if (!is_empty_or(h0, state) || c0 != (s.cell == Cell::lstm ? h0 : 0)) return "a first state of another size";
  if (static_cast<int64_t>(bias) != (s.cell == Cell::gru_reset_after ? s.hidden : 0)) return "a bias of another size";
  return "";
}

ffi::Error forward_pass(ffi::ThreadPool& pool, Sequence z, Flat u, Vector bias, Floats h0, Floats c0,
                        Result<Sequence> h, Result<Floats> c, float* sums, int64_t cell) {
  const auto of_h = h->dimensions();
  const Sizes sizes{static_cast<Cell>(cell), of_h[0], of_h[1], of_h[2]};
  const auto why = complaint(sizes, u, z.element_count(), bias.element_count(), h0.element_count(), c0.element_count());
  if (!why.empty()) return refuse(why);
  const int64_t kept = (sums ? sizes.steps : 1) * sizes.batch * sizes.hidden;
  if (static_cast<int64_t>(c->element_count()) != (sizes.cell == Cell::lstm ? kept : 0)) {
    return refuse("a state of another size");
  }
  const Forward pass{sizes,   z.typed_data(), data_or_null(bias), data_or_null(h0), data_or_null(c0), nullptr,
                              h->typed_data(), data_or_null(*c), sums, nullptr, nullptr};
  return guarded(pool, [&](int64_t threads, auto schedule) {
    run_forward(pass, u.typed_data(), threads, schedule);
  });
}

// All h and the last c.
ffi::Error infer(ffi::ThreadPool pool, Sequence z, Flat u, Vector bias, Floats h0, Floats c0, Result<Sequence> h,
                 Result<Floats> c, int64_t cell) {
  return forward_pass(pool, z, u, bias, h0, c0, h, c, nullptr, cell);
}

// All h, all c and the sums of the gates.
ffi::Error forward(ffi::ThreadPool pool, Sequence z, Flat u, Vector bias, Floats h0, Floats c0, Result<Sequence> h,
                   Result<Floats> c, Result<Sequence> sums, int64_t cell) {
  const auto of_h = h->dimensions();
  const int64_t expected = of_h[0] * of_h[1] * of_h[2] * sums_of(static_cast<Cell>(cell));
  if (static_cast<int64_t>(sums->element_count()) != expected) return refuse("sums of another size");
  return forward_pass(pool, z, u, bias, h0, c0, h, c, sums->typed_data(), cell);
}

ffi::Error backward(ffi::ThreadPool pool, Floats d_outputs, Flat u, Sequence sums, Sequence h, Floats c, Floats h0,
                    Floats c0, Flat dh_last, Floats dc_last, Result<Sequence> dz, Result<Flat> du, Result<Vector> d_bias,
                    Result<Flat> dh0, Result<Floats> dc0, int64_t cell, bool wants_start) {
  const auto of_h = h.dimensions();
  const Sizes sizes{static_cast<Cell>(cell), of_h[0], of_h[1], of_h[2]};
  const auto why = complaint(sizes, u, dz->element_count(), d_bias->element_count(), h0.element_count(),
                             c0.element_count());
  if (!why.empty()) return refuse(why);
  const int64_t state = sizes.batch * sizes.hidden, of_c = sizes.cell == Cell::lstm ? state : 0;
  const auto differs = [](const auto& buffer, int64_t count) {
    return static_cast<int64_t>(buffer.element_count()) != count;
  };
  if (!is_empty_or(d_outputs.element_count(), sizes.steps * state) || differs(dh_last, state) ||
      differs(dc_last, of_c) || differs(*dh0, state) || differs(*dc0, of_c) || differs(c, sizes.steps * of_c) ||
      differs(*du, static_cast<int64_t>(u.element_count())) ||
      differs(sums, sizes.steps * state * sums_of(sizes.cell))) {
    return refuse("gradients of another size");
  }
  const Backward pass{sizes, data_or_null(d_outputs), sums.typed_data(), h.typed_data(), data_or_null(c),
                               data_or_null(h0), data_or_null(c0), dh_last.typed_data(), data_or_null(dc_last), nullptr,
                               dz->typed_data(), dh0->typed_data(), data_or_null(*dc0), nullptr};
  return guarded(pool, [&](int64_t threads, auto schedule) {
    run_backward(pass, u.typed_data(), wants_start, du->typed_data(), data_or_null(*d_bias), threads, schedule);
  });
}

}  // namespace

#pragma GCC visibility push(default)
#define HOTLOOP_SEQUENCE \
  Bind().Ctx<ffi::ThreadPool>().Arg<Sequence>().Arg<Flat>().Arg<Vector>().Arg<Floats>().Arg<Floats>().Ret<Sequence>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_recurrent_infer, infer,
    ffi::Ffi::HOTLOOP_SEQUENCE.Ret<Floats>().Attr<int64_t>("cell"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_recurrent_forward, forward,
    ffi::Ffi::HOTLOOP_SEQUENCE.Ret<Floats>().Ret<Sequence>().Attr<int64_t>("cell"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_recurrent_backward, backward,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
        .Arg<Floats>().Arg<Flat>().Arg<Sequence>().Arg<Sequence>().Arg<Floats>().Arg<Floats>().Arg<Floats>()
        .Arg<Flat>().Arg<Floats>()
        .Ret<Sequence>().Ret<Flat>().Ret<Vector>().Ret<Flat>().Ret<Floats>()
        .Attr<int64_t>("cell").Attr<bool>("wants_start"));

}  // namespace hotloop
