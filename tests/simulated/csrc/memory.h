// Memory of the simulated device, and the host memory that it reaches asynchronously.
//
// [Note: When freed memory may be reused]
// CUDA's caching allocator gives a freed block to the next allocation in the *same* stream, and not before the events
// of the streams named by record_stream() have passed. So a block is filled with 0xFF (NaN as a float) in the order of
// its stream, at the next allocation there. Filling it when it is freed would accuse correct programs: a block may be
// freed while another stream reads it, if its own stream waits for that one before its next allocation.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <set>
#include <unordered_map>

#include "queues.h"

namespace sim {

constexpr int kPoison = 0xFF;
constexpr size_t kAlignment = 64;

inline c10::Device device() { return c10::Device(c10::DeviceType::PrivateUse1, 0); }

inline void* aligned(size_t bytes) {
  void* pointer = nullptr;
  TORCH_CHECK(posix_memalign(&pointer, kAlignment, std::max<size_t>(bytes, 1)) == 0, "out of host memory");
  return pointer;
}

// An item of a stream that must have run before memory can be reused.
struct Use {
  int64_t stream;
  uint64_t position;

  bool over() const { return Queues::get().has_run(stream, position); }
};

struct Block {
  void* pointer;
  size_t bytes;
  int64_t stream;                  // of the allocation
  std::set<int64_t> other_streams; // named by record_stream()
  std::vector<Use> uses;           // what must be over before it can be reused, once it is freed
};

inline void free_block(void* context);
inline void free_pinned(void* context);

class DeviceAllocator final : public c10::Allocator {
 public:
  static DeviceAllocator& get() {
    static DeviceAllocator* allocator = new DeviceAllocator();
    return *allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    Queues::get().check_alive();
    if (bytes == 0) return {nullptr, nullptr, &free_block, device()};
    const int64_t stream = current_stream();
    std::vector<Block*> reusable;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK_WITH(
          OutOfMemoryError, allocated_ + bytes <= capacity_, "simulated device out of memory: ", bytes,
          " bytes asked, ", capacity_ - allocated_, " of ", capacity_, " free");
      take_reusable(stream, reusable);
      allocated_ += bytes;
      peak_ = std::max(peak_, allocated_);
    }
    poison(stream, reusable);
    auto* block = new Block{aligned(bytes), bytes, stream, {}, {}};
    std::memset(block->pointer, kPoison, bytes);  // new memory holds anything, too
    return {block->pointer, block, &free_block, device()};
  }

  void free(Block* block) {
    std::vector<Use> uses;
    for (int64_t stream : block->other_streams) uses.push_back({stream, Queues::get().launched(stream)});
    std::lock_guard<std::mutex> lock(mutex_);
    block->uses = std::move(uses);
    allocated_ -= block->bytes;
    freed_[block->stream].push_back(block);
  }

  void record_stream(const c10::DataPtr& data, int64_t stream) {
    if (data.get_deleter() != &free_block || !data.get_context()) return;
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard<std::mutex> lock(mutex_);
    if (stream != block->stream) block->other_streams.insert(stream);
  }

  // After Queues::configure(): nothing is queued that could use a freed block.
  void configure(size_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [stream, blocks] : freed_) {
      for (Block* block : blocks) release(block);
      blocks.clear();
    }
    capacity_ = capacity;
    peak_ = allocated_;
  }

  size_t allocated() { return locked(allocated_); }
  size_t peak() { return locked(peak_); }
  size_t capacity() { return locked(capacity_); }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = allocated_;
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    // Asked by Storage::clone(), without a stream: wait, as a blocking copy would.
    Queues::get().synchronize_device();
    Counts::get().add("D2D storage clone");
    std::memcpy(to, from, bytes);
  }

 private:
  size_t locked(const size_t& value) {
    std::lock_guard<std::mutex> lock(mutex_);
    return value;
  }

  void take_reusable(int64_t stream, std::vector<Block*>& reusable) {
    auto& blocks = freed_[stream];
    auto kept = std::partition(blocks.begin(), blocks.end(), [](Block* block) {
      return !std::all_of(block->uses.begin(), block->uses.end(), [](const Use& use) { return use.over(); });
    });
    reusable.assign(kept, blocks.end());
    blocks.erase(kept, blocks.end());
  }

  static void poison(int64_t stream, const std::vector<Block*>& blocks) {
    if (blocks.empty()) return;
    std::vector<std::pair<void*, size_t>> ranges;
    for (Block* block : blocks) ranges.emplace_back(block->pointer, block->bytes);
    Item item;
    item.name = "reuse of freed memory";
    item.counted = false;  // the caching allocator queues nothing
    item.run = [ranges] {
      for (auto [pointer, bytes] : ranges) std::memset(pointer, kPoison, bytes);
    };
    Queues::get().launch(stream, std::move(item));
    for (Block* block : blocks) release(block);
  }

  static void release(Block* block) {
    Queues::get().free_after(Queues::get().last_id(), block->pointer);
    delete block;
  }

  std::mutex mutex_;
  std::unordered_map<int64_t, std::vector<Block*>> freed_;  // by stream of allocation
  size_t allocated_ = 0, peak_ = 0, capacity_ = size_t{1} << 33;
};

inline void free_block(void* context) {
  if (context) DeviceAllocator::get().free(static_cast<Block*>(context));
}

// Pinned allocations and registered ranges. PyTorch's caching host allocator reuses a block at the next allocation,
// after the copies that it knows of are over; memory that is only registered is the caller's.
class HostMemory final : public c10::Allocator {
 public:
  static HostMemory& get() {
    static HostMemory* memory = new HostMemory();
    return *memory;
  }

  c10::DataPtr allocate(size_t bytes) override {
    Queues::get().check_alive();
    TORCH_CHECK(can_pin_, "the simulated driver refuses to pin memory");
    std::lock_guard<std::mutex> lock(mutex_);
    auto kept = std::partition(freed_.begin(), freed_.end(), [](Block* block) {
      return !std::all_of(block->uses.begin(), block->uses.end(), [](const Use& use) { return use.over(); });
    });
    for (auto block = kept; block != freed_.end(); ++block) {
      std::memset((*block)->pointer, kPoison, (*block)->bytes);
      Queues::get().free_after(Queues::get().last_id(), (*block)->pointer);
      delete *block;
    }
    freed_.erase(kept, freed_.end());
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    auto* block = new Block{aligned(bytes), bytes, 0, {}, {}};
    std::memset(block->pointer, kPoison, bytes);
    pinned_[reinterpret_cast<uintptr_t>(block->pointer)] = block;
    return {block->pointer, block, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }

  void free(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    pinned_.erase(reinterpret_cast<uintptr_t>(block->pointer));
    freed_.push_back(block);
  }

  // Whether all of the range is pinned or registered.
  bool contains(const void* pointer, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(pointer, bytes) || find_registered(pointer, bytes);
  }

  // Keep a pinned block from being reused before an item has run.
  void record_use(const void* pointer, size_t bytes, Use use) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Block* block = find(pointer, bytes)) block->uses.push_back(use);
  }

  void add_range(uintptr_t address, size_t bytes) {
    Queues::get().check_alive();
    std::lock_guard<std::mutex> lock(mutex_);
    if (!can_register_) throw std::runtime_error("simulated driver: registration of host memory is refused");
    if (find_registered(reinterpret_cast<void*>(address), 1)) {
      throw std::runtime_error("simulated driver: the memory is already registered");
    }
    registered_[address] = bytes;
  }

  void remove_range(uintptr_t address) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!registered_.erase(address)) throw std::runtime_error("simulated driver: the memory is not registered");
  }

  size_t registered_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t total = 0;
    for (auto& [address, bytes] : registered_) total += bytes;
    return total;
  }

  void configure(bool can_pin, bool can_register) {
    std::lock_guard<std::mutex> lock(mutex_);
    can_pin_ = can_pin;
    can_register_ = can_register;
    registered_.clear();
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static bool within(uintptr_t address, size_t bytes, uintptr_t start, size_t size) {
    return address >= start && address + bytes <= start + size;
  }

  Block* find(const void* pointer, size_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    auto found = pinned_.upper_bound(address);
    if (found == pinned_.begin()) return nullptr;
    --found;
    return within(address, bytes, found->first, found->second->bytes) ? found->second : nullptr;
  }

  bool find_registered(const void* pointer, size_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    auto found = registered_.upper_bound(address);
    if (found == registered_.begin()) return false;
    --found;
    return within(address, bytes, found->first, found->second);
  }

  std::mutex mutex_;
  std::map<uintptr_t, Block*> pinned_;  // in use, by address
  std::vector<Block*> freed_;
  std::map<uintptr_t, size_t> registered_;  // bytes by address
  std::atomic<bool> can_pin_{true};
  bool can_register_ = true;
};

inline void free_pinned(void* context) {
  if (context) HostMemory::get().free(static_cast<Block*>(context));
}

}  // namespace sim
