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

template <class Buffer>
bool differs(const Buffer& buffer, int64_t count) {
  return static_cast<int64_t>(buffer.element_count()) != count;
}

// What both passes are given: x[steps, batch, inputs], the weights u, and first states.
Sizes sizes_of(int64_t cell, Sequence x, Flat u) {
  const auto of_x = x.dimensions();
  return {static_cast<Cell>(cell), of_x[0], of_x[1], of_x[2], u.dimensions()[0]};
}

// Why a recurrence cannot have these, or nothing.
std::string complaint(const Sizes& s, Flat u, Floats h0, Floats c0) {
  const int64_t state = s.batch * s.hidden;
  if (s.cell < Cell::rnn || s.cell > Cell::lstm) return "there is no such cell";
  if (s.steps < 1 || state < 1 || s.inputs < 1) return "an empty sequence cannot be run";
  if (u.dimensions()[1] != gates_of(s.cell) * s.hidden) return "the sizes of a sequence and its weights do not fit together";
  if (!is_empty_or(h0.element_count(), state) || differs(c0, s.cell == Cell::lstm ? h0.element_count() : 0)) {
    return "a first state of another size";
  }
  return "";
}

int64_t of_candidate(const Sizes& s) { return s.cell == Cell::gru_reset_after ? s.hidden : 0; }

bool are_packed_weights(const Sizes& s, const Vector& packed) {
  return static_cast<int64_t>(packed.element_count()) >= packed_weights(s);
}

// `packed`: both weights once more, or null.
ffi::Error forward_pass(ffi::ThreadPool& pool, Sequence x, Flat w, Vector input_bias, Flat u, const Vector* packed, Vector bias,
                        Floats h0, Floats c0, Result<Sequence> h, Result<Floats> c, float* sums, int64_t cell) {
  const Sizes s = sizes_of(cell, x, u);
  const auto why = complaint(s, u, h0, c0);
  if (!why.empty()) return refuse(why);
  const int64_t gates = gates_of(s.cell) * s.hidden, state = s.batch * s.hidden;
  if (w.dimensions()[0] != s.inputs || w.dimensions()[1] != gates || differs(*h, s.steps * state)) {
    return refuse("the sizes of a sequence and its weights do not fit together");
  }
  if (packed && !are_packed_weights(s, *packed)) return refuse("packed weights of another size");
  if (differs(input_bias, gates) || differs(bias, of_candidate(s))) return refuse("a bias of another size");
  if (differs(*c, s.cell == Cell::lstm ? (sums ? s.steps : 1) * state : 0)) return refuse("a state of another size");
  const Forward pass{s, x.typed_data(), input_bias.typed_data(), data_or_null(bias), data_or_null(h0), data_or_null(c0),
                     nullptr, nullptr, h->typed_data(), data_or_null(*c), sums, nullptr, nullptr};
  return guarded(pool, [&](int64_t threads, auto schedule) {
    run_forward(pass, {w.typed_data(), u.typed_data(), packed ? packed->typed_data() : nullptr}, threads, schedule);
  });
}

// Weights as `infer` reads them: an operation of its own, which XLA takes out of a loop that does not change them. How many
// floats they take depends on the processor; there may be more.
ffi::Error pack(ffi::ThreadPool pool, Flat w, Flat u, Result<Vector> packed, int64_t cell) {
  const Sizes s{static_cast<Cell>(cell), 1, 1, w.dimensions()[0], u.dimensions()[0]};
  if (s.cell < Cell::rnn || s.cell > Cell::lstm) return refuse("there is no such cell");
  const int64_t gates = gates_of(s.cell) * s.hidden;
  if (s.inputs < 1 || s.hidden < 1 || w.dimensions()[1] != gates || u.dimensions()[1] != gates) {
    return refuse("the sizes of a sequence and its weights do not fit together");
  }
  if (!are_packed_weights(s, *packed)) return refuse("packed weights of another size");
  return guarded(pool, [&](int64_t threads, auto schedule) {
    pack_weights(s, w.typed_data(), u.typed_data(), packed->typed_data(), threads, schedule);
  });
}

// All h and the last c.
ffi::Error infer(ffi::ThreadPool pool, Sequence x, Flat w, Vector input_bias, Flat u, Vector bias, Floats h0, Floats c0,
                 Vector packed, Result<Sequence> h, Result<Floats> c, int64_t cell) {
  return forward_pass(pool, x, w, input_bias, u, &packed, bias, h0, c0, h, c, nullptr, cell);
}

// All h, all c and the sums of the gates.
ffi::Error forward(ffi::ThreadPool pool, Sequence x, Flat w, Vector input_bias, Flat u, Vector bias, Floats h0, Floats c0,
                   Result<Sequence> h, Result<Floats> c, Result<Sequence> sums, int64_t cell) {
  const auto of_h = h->dimensions();
  if (differs(*sums, of_h[0] * of_h[1] * of_h[2] * sums_of(static_cast<Cell>(cell)))) return refuse("sums of another size");
  return forward_pass(pool, x, w, input_bias, u, nullptr, bias, h0, c0, h, c, sums->typed_data(), cell);
}

ffi::Error backward(ffi::ThreadPool pool, Floats d_outputs, Sequence x, Flat u, Sequence sums, Sequence h, Floats c,
                    Floats h0, Floats c0, Flat dh_last, Floats dc_last, Result<Sequence> dz, Result<Flat> dw,
                    Result<Vector> d_input_bias, Result<Flat> du, Result<Vector> d_bias, Result<Flat> dh0,
                    Result<Floats> dc0, int64_t cell, bool wants_start) {
  const Sizes s = sizes_of(cell, x, u);
  const auto why = complaint(s, u, h0, c0);
  if (!why.empty()) return refuse(why);
  const int64_t state = s.batch * s.hidden, of_c = s.cell == Cell::lstm ? state : 0, gates = gates_of(s.cell) * s.hidden;
  if (!is_empty_or(d_outputs.element_count(), s.steps * state) || differs(h, s.steps * state) ||
      differs(c, s.steps * of_c) || differs(sums, s.steps * state * sums_of(s.cell)) || differs(dh_last, state) ||
      differs(dc_last, of_c) || differs(*dz, s.steps * s.batch * gates) || differs(*dw, s.inputs * gates) ||
      differs(*d_input_bias, gates) || differs(*du, s.hidden * gates) || differs(*d_bias, of_candidate(s)) ||
      differs(*dh0, state) || differs(*dc0, of_c)) {
    return refuse("gradients of another size");
  }
  const Backward pass{s, data_or_null(d_outputs), x.typed_data(), sums.typed_data(), h.typed_data(), data_or_null(c),
                      data_or_null(h0), data_or_null(c0), dh_last.typed_data(), data_or_null(dc_last), nullptr,
                      dz->typed_data(), dh0->typed_data(), data_or_null(*dc0), nullptr};
  const WeightGradients gradients{dw->typed_data(), d_input_bias->typed_data(), du->typed_data(), data_or_null(*d_bias)};
  return guarded(pool, [&](int64_t threads, auto schedule) {
    run_backward(pass, u.typed_data(), wants_start, gradients, threads, schedule);
  });
}

}  // namespace

#pragma GCC visibility push(default)
#define HOTLOOP_SEQUENCE \
  Bind().Ctx<ffi::ThreadPool>().Arg<Sequence>().Arg<Flat>().Arg<Vector>().Arg<Flat>().Arg<Vector>().Arg<Floats>() \
      .Arg<Floats>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_recurrent_pack, pack,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Flat>().Arg<Flat>().Ret<Vector>().Attr<int64_t>("cell"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_recurrent_infer_packed, infer,
    ffi::Ffi::HOTLOOP_SEQUENCE.Arg<Vector>().Ret<Sequence>().Ret<Floats>().Attr<int64_t>("cell"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_recurrent_forward, forward,
    ffi::Ffi::HOTLOOP_SEQUENCE.Ret<Sequence>().Ret<Floats>().Ret<Sequence>().Attr<int64_t>("cell"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hotloop_recurrent_backward, backward,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
        .Arg<Floats>().Arg<Sequence>().Arg<Flat>().Arg<Sequence>().Arg<Sequence>().Arg<Floats>().Arg<Floats>()
        .Arg<Floats>().Arg<Flat>().Arg<Floats>()
        .Ret<Sequence>().Ret<Flat>().Ret<Vector>().Ret<Flat>().Ret<Vector>().Ret<Flat>().Ret<Floats>()
        .Attr<int64_t>("cell").Attr<bool>("wants_start"));

}  // namespace hotloop
