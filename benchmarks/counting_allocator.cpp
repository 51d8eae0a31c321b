// A CPU allocator that counts: bytes that tensors have now, and the most that they had at a time.
//
// Compiled with PyTorch's headers. It asks the allocator that was there before, so memory is what it would have been.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>

namespace {

std::atomic<int64_t> now{0}, peak{0};

void count(int64_t bytes) {
  const int64_t reached = now.fetch_add(bytes) + bytes;
  int64_t seen = peak.load();
  while (reached > seen && !peak.compare_exchange_weak(seen, reached)) {
  }
}

// One allocation. Destroying `memory` frees it, by the deleter of the allocator that gave it.
struct Counted {
  c10::DataPtr memory;
  int64_t bytes;
};

void discount(void* context) {
  auto* counted = static_cast<Counted*>(context);
  now.fetch_sub(counted->bytes);
  delete counted;
}

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* wrapped) : wrapped_(wrapped) {}

  c10::DataPtr allocate(size_t bytes) override {
    auto* counted = new Counted{wrapped_->allocate(bytes), static_cast<int64_t>(bytes)};
    count(counted->bytes);
    return {counted->memory.get(), counted, &discount, counted->memory.device()};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { wrapped_->copy_data(to, from, bytes); }

  c10::Allocator* wrapped() const { return wrapped_; }

 private:
  c10::Allocator* wrapped_;
};

CountingAllocator* installed = nullptr;  // never destroyed: storages keep a pointer to their allocator
bool counting = false;

constexpr uint8_t kPriority = 100;

}  // namespace

extern "C" {

// Count what is allocated from here on. Memory that was allocated before is freed by its own deleter, uncounted.
void counting_start() {
  if (counting) {
    return;  // the allocator would wrap itself
  }
  if (installed == nullptr) {
    installed = new CountingAllocator(c10::GetCPUAllocator());
  }
  c10::SetCPUAllocator(installed, kPriority);
  counting = true;
}

// Give the allocator that was there before its place back. What was counted is discounted when it is freed.
void counting_stop() {
  if (counting) {
    c10::SetCPUAllocator(installed->wrapped(), kPriority);
    counting = false;
  }
}

int64_t counting_now() { return now.load(); }

int64_t counting_peak() { return peak.load(); }

void counting_reset_peak() { peak.store(now.load()); }

}  // extern "C"
