#include "convolution.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "dnnl.hpp"
#include "plan_cache.h"
#include "runtime.h"
#include "workspace.h"

namespace hotloop {
namespace {

using dnnl::memory;
using Desc = memory::desc;
using Forward = dnnl::convolution_forward::primitive_desc;

constexpr size_t PLANS_KEPT = 512;  // training a ResNet-50 takes 70

// Everything that oneDNN is told of a convolution. The images stay as the program has them; it chooses the kernel's
// layout.
struct Shapes {
  Desc x, y, bias, any_kernel, hwio;
  memory::dims strides, before, after;
};

Desc nhwc(int64_t images, int64_t height, int64_t width, int64_t channels) {
  return {{images, channels, height, width}, memory::data_type::f32, memory::format_tag::nhwc};
}

Shapes shapes_of(const Geometry& g) {
  const int64_t inputs = g.channels / g.groups, outputs = g.filters / g.groups;
  const int64_t column = inputs * g.filters, row = g.kernel_width * column;
  memory::dims dims{outputs, inputs, g.kernel_height, g.kernel_width};
  memory::dims hwio{1, g.filters, row, column};
  if (g.groups > 1) {
    dims.insert(dims.begin(), g.groups);
    hwio.insert(hwio.begin(), outputs);
  }
  const auto f32 = memory::data_type::f32;
  return {nhwc(g.images, g.height, g.width, g.channels),
          nhwc(g.images, g.rows, g.columns, g.filters),
          Desc({g.filters}, f32, memory::format_tag::x),
          Desc(dims, f32, memory::format_tag::any),
          Desc(dims, f32, hwio),
          {g.row_stride, g.column_stride},
          {g.top, g.left},
          {g.bottom, g.right}};
}

// A primitive keeps no memory of its own: so any number of threads may execute it at once.
dnnl::primitive_attr own_scratchpad() {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

Forward describe_forward(Pass pass, const Shapes& s) {
  const auto kind = dnnl::prop_kind::forward_inference;
  const auto direct = dnnl::algorithm::convolution_direct;
  const bool sums = pass == Pass::bias_sum || pass == Pass::bias_sum_relu;
  const bool rectifies = pass == Pass::bias_relu || pass == Pass::bias_sum_relu;
  dnnl::post_ops after;
  if (sums) after.append_binary(dnnl::algorithm::binary_add, s.y);
  if (rectifies) after.append_eltwise(dnnl::algorithm::eltwise_relu, 0.0f, 0.0f);
  auto attributes = own_scratchpad();
  attributes.set_post_ops(after);
  const bool has_bias = sums || rectifies || pass == Pass::bias;
  return {engine(), kind,      direct,   s.x,     s.any_kernel, has_bias ? s.bias : Desc(),
          s.y,      s.strides, s.before, s.after, attributes};
}

// A compiled pass, and what turns the kernel from HWIO into the layout that it wants (or its gradient back).
struct Plan {
  Pass pass;
  Shapes shapes;
  dnnl::primitive compute;
  Desc kernel, scratchpad;
  std::optional<dnnl::reorder> turn;
  Desc turn_scratchpad;
  size_t kernel_bytes = 0;  // of the workspace's start; 0: HWIO is what it wants
};

template <class Primitive, class Described>
Plan plan_of(Pass pass, const Shapes& s, const Described& described, const Desc& kernel) {
  Plan plan{pass, s, Primitive(described), kernel, described.scratchpad_desc(), std::nullopt, Desc(), 0};
  if (kernel == s.hwio) return plan;
  const bool back = pass == Pass::kernel_gradient;
  const dnnl::reorder::primitive_desc turn(engine(), back ? kernel : s.hwio, engine(), back ? s.hwio : kernel,
                                           own_scratchpad());
  plan.turn.emplace(turn);
  plan.turn_scratchpad = turn.scratchpad_desc();
  plan.kernel_bytes = rounded_up(kernel.get_size());
  return plan;
}

Plan make_plan(Pass pass, const Geometry& g) {
  const Shapes s = shapes_of(g);
  const auto direct = dnnl::algorithm::convolution_direct;
  const Forward forward = describe_forward(pass, s);
  if (pass == Pass::input_gradient) {
    const dnnl::convolution_backward_data::primitive_desc described(
        engine(), direct, s.x, s.any_kernel, s.y, s.strides, s.before, s.after, forward, own_scratchpad());
    return plan_of<dnnl::convolution_backward_data>(pass, s, described, described.weights_desc());
  }
  if (pass == Pass::kernel_gradient) {
    const dnnl::convolution_backward_weights::primitive_desc described(
        engine(), direct, s.x, s.any_kernel, s.y, s.strides, s.before, s.after, forward, own_scratchpad());
    return plan_of<dnnl::convolution_backward_weights>(pass, s, described, described.diff_weights_desc());
  }
  return plan_of<dnnl::convolution_forward>(pass, s, forward, forward.weights_desc());
}

PlanCache<Plan>& plans() {
  static PlanCache<Plan>& shared = *new PlanCache<Plan>(PLANS_KEPT);
  return shared;
}

Key key_of(Pass pass, const Geometry& g, int64_t threads) {
  return {static_cast<int64_t>(pass), threads,      g.images,        g.height,        g.width, g.channels,
          g.kernel_height,            g.kernel_width, g.filters,     g.rows,          g.columns, g.row_stride,
          g.column_stride,            g.top,        g.bottom,        g.left,          g.right, g.groups};
}

memory view(const Desc& desc, const void* data) { return {desc, engine(), const_cast<void*>(data)}; }

void execute(const Plan& plan, const float* first, const float* second, const float* bias, const float* residual,
             float* result) {
  const Shapes& s = plan.shapes;
  Workspace workspace(plan.kernel_bytes + std::max(plan.scratchpad.get_size(), plan.turn_scratchpad.get_size()));
  char* scratch = workspace.data() + plan.kernel_bytes;
  const bool back = plan.pass == Pass::kernel_gradient;
  const memory hwio = view(s.hwio, back ? result : second);
  const memory kernel = plan.turn ? view(plan.kernel, workspace.data()) : hwio;
  const auto turn = [&](const memory& from, const memory& to) {
    if (!plan.turn) return;
    plan.turn->execute(stream(), {{DNNL_ARG_FROM, from},
                                  {DNNL_ARG_TO, to},
                                  {DNNL_ARG_SCRATCHPAD, view(plan.turn_scratchpad, scratch)}});
  };
  std::unordered_map<int, memory> operands{{DNNL_ARG_SCRATCHPAD, view(plan.scratchpad, scratch)}};
  if (back) {
    operands.insert({{DNNL_ARG_SRC, view(s.x, first)}, {DNNL_ARG_DIFF_DST, view(s.y, second)}});
    operands.insert({DNNL_ARG_DIFF_WEIGHTS, kernel});
    plan.compute.execute(stream(), operands);
    turn(kernel, hwio);
    return;
  }
  turn(hwio, kernel);
  operands.insert({DNNL_ARG_WEIGHTS, kernel});
  if (plan.pass == Pass::input_gradient) {
    operands.insert({{DNNL_ARG_DIFF_DST, view(s.y, first)}, {DNNL_ARG_DIFF_SRC, view(s.x, result)}});
  } else {
    operands.insert({{DNNL_ARG_SRC, view(s.x, first)}, {DNNL_ARG_DST, view(s.y, result)}});
    if (bias) operands.insert({DNNL_ARG_BIAS, view(s.bias, bias)});
    if (residual) operands.insert({DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1, view(s.y, residual)});
  }
  plan.compute.execute(stream(), operands);
}

bool any_below(int64_t least, std::initializer_list<int64_t> numbers) {
  return std::any_of(numbers.begin(), numbers.end(), [&](int64_t number) { return number < least; });
}

int64_t positions(int64_t size, int64_t before, int64_t after, int64_t kernel, int64_t stride) {
  const int64_t room = size + before + after - kernel;
  return room < 0 ? 0 : room / stride + 1;
}

}  // namespace

std::string complaint(const Geometry& g) {
  if (any_below(1, {g.row_stride, g.column_stride, g.groups})) return "strides and groups must be 1 or more";
  if (any_below(0, {g.top, g.bottom, g.left, g.right})) return "pads must be 0 or more";
  if (any_below(1, {g.images, g.height, g.width, g.channels, g.kernel_height, g.kernel_width, g.filters, g.rows,
                    g.columns})) {
    return "an empty image, kernel or result cannot be convolved";
  }
  if (g.channels % g.groups || g.filters % g.groups) return "groups must divide channels and filters";
  if (g.rows != positions(g.height, g.top, g.bottom, g.kernel_height, g.row_stride) ||
      g.columns != positions(g.width, g.left, g.right, g.kernel_width, g.column_stride)) {
    return "the sizes of image, kernel and result do not fit together";
  }
  return "";
}

void convolve(Pass pass, const Geometry& g, int64_t threads, const float* first, const float* second,
              const float* bias, const float* residual, float* result) {
  run_on(threads, [&] {
    const auto plan = plans().get(key_of(pass, g, available_threads()), [&] { return make_plan(pass, g); });
    execute(*plan, first, second, bias, residual, result);
  });
}

}  // namespace hotloop
