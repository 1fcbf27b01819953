// The most recently used plans (compiled kernels and what belongs to them), by the numbers that describe them.
//
// Bounded, because a server may see any number of shapes; safe to use from any thread. A plan that is dropped lives on
// until the last call that uses it has returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace hotloop {

using Key = std::vector<int64_t>;

template <class Plan>
class PlanCache {
 public:
  explicit PlanCache(size_t capacity) : capacity_(capacity) {}

  // The plan of `key`, made by `make()` outside the lock where there is none: two threads that want the same new plan
  // at once both make it, and one is kept.
  template <class Make>
  std::shared_ptr<const Plan> get(const Key& key, Make make) {
    if (auto plan = find(key)) return plan;
    auto plan = std::make_shared<const Plan>(make());
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto place = index_.find(key); place != index_.end()) return place->second->second;
    entries_.emplace_front(key, plan);
    index_[key] = entries_.begin();
    if (entries_.size() > capacity_) {
      index_.erase(entries_.back().first);
      entries_.pop_back();
    }
    return plan;
  }

  size_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return entries_.size();
  }

 private:
  using Entry = std::pair<Key, std::shared_ptr<const Plan>>;

  std::shared_ptr<const Plan> find(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto place = index_.find(key);
    if (place == index_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, place->second);
    return place->second->second;
  }

  std::mutex mutex_;
  size_t capacity_;
  std::list<Entry> entries_;  // the latest used first
  std::map<Key, typename std::list<Entry>::iterator> index_;
};

}  // namespace hotloop
