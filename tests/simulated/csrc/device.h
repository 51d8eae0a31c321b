// What PyTorch's C++ asks of a device: streams, events, generators, pinned memory.

#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace sim {

// Recorded any number of times; waiting for it means waiting for its last recording at the time of the call.
class Event {
 public:
  explicit Event(bool timed) : timed_(timed) {}

  void record(int64_t stream) {
    auto mark = std::make_shared<Mark>();
    Item item;
    item.name = "event record";
    item.mark = mark;
    Queues::get().launch(stream, std::move(item));
    std::lock_guard<std::mutex> lock(mutex_);
    mark_ = mark;
  }

  void block(int64_t stream) {
    MarkPtr mark = last();
    if (!mark) return;
    Item item;
    item.name = "event wait";
    item.after = mark;
    Queues::get().launch(stream, std::move(item));
  }

  bool query() {
    Queues::get().check_alive();
    MarkPtr mark = last();
    return !mark || mark->passed.load(std::memory_order_acquire);
  }

  void synchronize() {
    MarkPtr mark = last();
    Counts::get().add("event.synchronize");
    if (mark) Queues::get().synchronize_mark(mark);
    else Queues::get().check_alive();
  }

  double elapsed_ms(Event& end) {
    Queues::get().check_alive();
    MarkPtr from = last(), to = end.last();
    if (!timed_ || !end.timed_) throw std::runtime_error("both events must be made with enable_timing=True");
    if (!from || !to) throw std::runtime_error("both events must be recorded before the elapsed time is asked");
    if (!from->passed || !to->passed) throw std::runtime_error("both events must have happened");
    return to->time_ms - from->time_ms;
  }

 private:
  MarkPtr last() {
    std::lock_guard<std::mutex> lock(mutex_);
    return mark_;
  }

  std::mutex mutex_;
  MarkPtr mark_;
  const bool timed_;
};

inline void synchronize_stream(int64_t stream) {
  Counts::get().add("stream.synchronize");
  Queues::get().synchronize_stream(stream);
}

inline void synchronize_device() {
  Counts::get().add("device.synchronize");
  Queues::get().synchronize_device();
}

inline c10::Stream as_stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

// `noexcept` stands where a function cannot throw: some PyTorch versions declare it in the interface, some do not.
// `override` is missing where some version has no such function.
struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return as_stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_stream(Queues::get().make_stream());
  }
  c10::Stream getNewStream(c10::Device, int) const override { return as_stream(Queues::get().make_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return as_stream(std::exchange(current_stream(), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const { return reinterpret_cast<void*>(stream.id()); }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag)
      const override {
    if (!*event) *event = new Event(flag == c10::EventFlag::BACKEND_DEFAULT);
    static_cast<Event*>(*event)->record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) static_cast<Event*>(event)->block(stream.id());
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->query(); }
  void synchronizeEvent(void* event) const override {
    if (event) static_cast<Event*>(event)->synchronize();
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "both events must be recorded before the elapsed time is asked");
    return static_cast<Event*>(begin)->elapsed_ms(*static_cast<Event*>(end));
  }

  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream& stream) const override { return Queues::get().query_stream(stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const { synchronize_device(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    DeviceAllocator::get().record_stream(data, stream.id());
  }
};

// A Mersenne twister of the device. It is drawn from when an operator is launched, never when it runs: so numbers do
// not depend on delays.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(uint64_t seed = c10::default_rng_seed_val) : at::CPUGeneratorImpl(seed) {
    device_ = sim::device();  // the base has a function of this name
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

inline at::Generator& default_generator() {
  static auto* generator = new at::Generator(at::make_generator<DeviceGenerator>());
  return *generator;
}

// A CPU generator for one launch, seeded from a generator of the device.
inline at::Generator generator_for_launch(const std::optional<at::Generator>& given) {
  at::Generator source = given.has_value() && given->defined() ? *given : default_generator();
  TORCH_CHECK(
      source.device().type() == c10::DeviceType::PrivateUse1, "Expected a '", device().type(),
      "' device type for generator but found '", source.device().type(), "'");
  uint64_t seed = 0;
  {
    std::lock_guard<std::mutex> lock(source.mutex());
    seed = static_cast<DeviceGenerator*>(source.unsafeGetGeneratorImpl())->random64();
  }
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<DeviceGenerator>(); }
  at::Device getDeviceFromPtr(void*) const override { return device(); }
  bool isPinnedPtr(const void* pointer) const override { return HostMemory::get().contains(pointer, 1); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &HostMemory::get(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};

}  // namespace sim
