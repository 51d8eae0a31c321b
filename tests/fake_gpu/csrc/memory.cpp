// Device, pinned and registered memory, and copies with CUDA's rules: what is pageable makes the caller wait.

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device.h"

namespace fake {

namespace {

const uint64_t kMemory = static_cast<uint64_t>(setting("FAKE_GPU_MEMORY_MB", 80000)) << 20;
const uint64_t kLargest = static_cast<uint64_t>(setting("FAKE_GPU_LARGEST_MB", 1 << 30)) << 20;
const uint64_t kPinned = static_cast<uint64_t>(setting("FAKE_GPU_PINNED_MB", 1 << 30)) << 20;
const bool kWrites = setting("FAKE_GPU_WRITES", 1) != 0;
const bool kRegister = setting("FAKE_GPU_REGISTER", 1) != 0;
const size_t kStaged = 64 << 10;  // bytes of a pageable upload that the driver takes along without a wait

struct Range {
  size_t bytes;
  Kind kind;
  bool registered;
};

std::mutex mutex;
auto& ranges = *new std::map<uintptr_t, Range>;
uint64_t device_bytes = 0, pinned_bytes = 0;

std::map<uintptr_t, Range>::iterator find(const void* address) {
  auto found = ranges.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (found == ranges.begin()) return ranges.end();
  --found;
  return reinterpret_cast<uintptr_t>(address) < found->first + found->second.bytes ? found : ranges.end();
}

void* map(size_t bytes) {
  void* address =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

void write(void* target, const void* source, size_t bytes, Kind to) {
  if (to != kDevice || kWrites) std::memcpy(target, source, bytes);
}

const char* direction(Kind target, Kind source) {
  if (target == kDevice) return source == kDevice ? "D2D" : source == kHost ? "H2D" : "H2D pageable";
  if (source == kDevice) return target == kHost ? "D2H" : "D2H pageable";
  return "H2H";
}

}  // namespace

Kind kind_of(const void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = find(address);
  return found == ranges.end() ? kPageable : found->second.kind;
}

bool range_of(const void* address, void** base, size_t* bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = find(address);
  if (found == ranges.end()) return false;
  *base = reinterpret_cast<void*>(found->first);
  *bytes = found->second.bytes;
  return true;
}

void* device_alloc(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  if (device_bytes + bytes > kMemory || bytes > kLargest) return nullptr;
  void* address = map(bytes);
  if (address == nullptr) return nullptr;
  device_bytes += bytes;
  ranges[reinterpret_cast<uintptr_t>(address)] = {bytes, kDevice, false};
  return address;
}

Error device_free(void* address) {
  if (address == nullptr) return kSuccess;
  wait_for_all("cudaFree");
  drain();
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = ranges.find(reinterpret_cast<uintptr_t>(address));
  if (found == ranges.end() || found->second.kind != kDevice) return kInvalidValue;
  munmap(address, found->second.bytes);
  device_bytes -= found->second.bytes;
  ranges.erase(found);
  return kSuccess;
}

void* host_alloc(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  if (pinned_bytes + bytes > kPinned) return nullptr;
  void* address = map(bytes);
  if (address == nullptr) return nullptr;
  pinned_bytes += bytes;
  ranges[reinterpret_cast<uintptr_t>(address)] = {bytes, kHost, false};
  return address;
}

Error host_free(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = ranges.find(reinterpret_cast<uintptr_t>(address));
  if (found == ranges.end() || found->second.kind != kHost || found->second.registered) return kInvalidValue;
  munmap(address, found->second.bytes);
  pinned_bytes -= found->second.bytes;
  ranges.erase(found);
  return kSuccess;
}

Error host_register(void* address, size_t bytes) {
  if (!kRegister) return kNotSupported;
  if (bytes == 0) return kInvalidValue;
  std::lock_guard<std::mutex> lock(mutex);
  if (pinned_bytes + bytes > kPinned) return kOutOfMemory;
  const auto begin = reinterpret_cast<uintptr_t>(address);
  auto next = ranges.upper_bound(begin + bytes - 1);
  if (next != ranges.begin() && (--next)->first + next->second.bytes > begin) return kAlreadyRegistered;
  ranges[begin] = {bytes, kHost, true};
  pinned_bytes += bytes;
  return kSuccess;
}

Error host_unregister(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = ranges.find(reinterpret_cast<uintptr_t>(address));
  if (found == ranges.end() || !found->second.registered) return kNotRegistered;
  pinned_bytes -= found->second.bytes;
  ranges.erase(found);
  return kSuccess;
}

void memory_info(size_t* free, size_t* total) {
  std::lock_guard<std::mutex> lock(mutex);
  *total = kMemory;
  *free = kMemory - device_bytes;
}

void copy(void* target, const void* source, size_t bytes, Stream* stream, bool blocking, const char* call) {
  const Kind to = kind_of(target), from = kind_of(source);
  count(call, direction(to, from), bytes);
  if (to == kDevice && from == kPageable && !blocking) {
    // The driver stages it: the caller's memory is free on return. More than a little waits for the stream.
    const auto* begin = static_cast<const char*>(source);
    const auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    push(stream, call, [=] { write(target, staged->data(), bytes, to); });
    if (bytes > kStaged) wait(stream, call);
    return;
  }
  push(stream, call, [=] { write(target, source, bytes, to); });
  if (blocking || to == kPageable || from == kPageable) wait(stream, call);
}

void copy_2d(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width, size_t height,
             Stream* stream) {
  const Kind to = kind_of(target), from = kind_of(source);
  count("cudaMemcpy2DAsync", direction(to, from), width * height);
  push(stream, "cudaMemcpy2DAsync", [=] {
    for (size_t row = 0; row < height; ++row) {
      write(static_cast<char*>(target) + row * target_pitch, static_cast<const char*>(source) + row * source_pitch, width,
            to);
    }
  });
  if (to == kPageable || from == kPageable) wait(stream, "cudaMemcpy2DAsync");
}

void set(void* target, int value, size_t bytes, Stream* stream) {
  count("cudaMemsetAsync", "", bytes);
  push(stream, "cudaMemsetAsync", [=] {
    if (kWrites) std::memset(target, value, bytes);
  });
}

void set_32(void* target, uint32_t value, size_t count, Stream* stream) {
  push(stream, "cuMemsetD32Async", [=] {
    for (size_t index = 0; kWrites && index < count; ++index) static_cast<uint32_t*>(target)[index] = value;
  });
}

}  // namespace fake
