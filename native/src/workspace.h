// Memory for the length of one call: a buffer from a pool, so that calls in a row do not fault their pages in again.
//
// The pool holds as many buffers as there were calls at once, each as large as the largest call needed, and none
// larger than LARGEST_KEPT: what needs more computes for so long that fresh memory does not matter.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace hotloop {

constexpr size_t ALIGNMENT = 64;
constexpr size_t LARGEST_KEPT = size_t{64} << 20;

inline size_t rounded_up(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

class Workspace {
 public:
  explicit Workspace(size_t bytes) : buffer_(take()) {
    if (buffer_.bytes >= bytes) return;
    const size_t rounded = rounded_up(bytes);
    buffer_.data.reset();  // before the larger one: never both at once
    buffer_.data.reset(std::aligned_alloc(ALIGNMENT, rounded));
    buffer_.bytes = rounded;
    if (!buffer_.data) throw std::bad_alloc();
  }

  ~Workspace() {
    if (buffer_.bytes == 0 || buffer_.bytes > LARGEST_KEPT) return;
    std::lock_guard<std::mutex> lock(pool().mutex);
    pool().free.push_back(std::move(buffer_));
  }

  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  char* data() { return static_cast<char*>(buffer_.data.get()); }

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  struct Buffer {
    std::unique_ptr<void, Free> data;
    size_t bytes = 0;
  };
  struct Pool {
    std::mutex mutex;
    std::vector<Buffer> free;
  };

  static Pool& pool() {
    static Pool& shared = *new Pool;  // never destroyed: calls may outlive the statics of this library
    return shared;
  }

  static Buffer take() {
    std::lock_guard<std::mutex> lock(pool().mutex);
    if (pool().free.empty()) return {};
    Buffer latest = std::move(pool().free.back());
    pool().free.pop_back();
    return latest;
  }

  Buffer buffer_;
};

}  // namespace hotloop
