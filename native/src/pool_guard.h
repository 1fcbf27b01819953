// What handlers share: XLA's pool as a schedule, refusals in one line, empty operands.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace hotloop {

inline xla::ffi::Error refuse(const std::string& why) {
  return xla::ffi::Error::InvalidArgument("hotloop-native: " + why);
}

// Calls work(); no exception leaves.
template <class Work>
xla::ffi::Error guarded(Work work) {
  try {
    work();
  } catch (const std::exception& error) {
    return xla::ffi::Error::Internal(std::string("hotloop-native: ") + error.what());
  }
  return xla::ffi::Error::Success();
}

// Calls work(threads, schedule) with XLA's own pool; no exception leaves.
template <class Work>
xla::ffi::Error guarded(xla::ffi::ThreadPool& pool, Work work) {
  return guarded([&] {
    work(pool.num_threads(), [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
  });
}

// An operand or result that there is none of is empty.
template <class Buffer>
float* data_or_null(const Buffer& buffer) {
  return buffer.element_count() ? buffer.typed_data() : nullptr;
}

template <class Matrix>
bool is_matrix(const Matrix& buffer, int64_t rows, int64_t columns) {
  return buffer.dimensions()[0] == rows && buffer.dimensions()[1] == columns;
}

}  // namespace hotloop
