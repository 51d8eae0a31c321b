// A GPU that is not there, under the CUDA driver and runtime: streams, events, copies and stream values are real, and
// kernels compute nothing. Device memory is host memory that only this knows to be the device's.
//
// counters.cpp  what was called, by thread, and who waited
// devices.cpp   how many there are, what they can do, and contexts
// streams.cpp   streams with a thread and a bounded queue each, events, and the death of the device
// memory.cpp    device, pinned and registered memory, and copies with CUDA's rules
// runtime.cpp   libcudart: the runtime's functions that PyTorch calls
// driver.cpp    libcuda: the driver's functions that PyTorch, Triton and cuda-bindings call
// operators.cpp numbers: every aten operator of CUDA tensors as the CPU's kernel on the same memory
//
// Environment variables, read when the process starts:
//   FAKE_GPU_QUEUE            entries of a stream's queue (1024); who pushes into a full one waits
//   FAKE_GPU_MEMORY_MB        of the device (80000)
//   FAKE_GPU_KERNEL_NS        time of every kernel (0)
//   FAKE_GPU_DEVICES          how many there are (1); they share one memory. 0: cudaErrorNoDevice
//   FAKE_GPU_DRIVER           version of the driver (13000); older than 13000: cudaErrorInsufficientDriver
//   FAKE_GPU_WRITES=0         copies to the device write nothing: where kernels compute nothing, all of it stays zero
//   FAKE_GPU_STREAM_VALUES=0  the driver refuses cuStreamWriteValue32 and cuStreamWaitValue32
//   FAKE_GPU_REGISTER=0       the driver refuses cudaHostRegister
//   FAKE_GPU_PINNED_MB        page-locked memory that can be had (no limit)
//   FAKE_GPU_LARGEST_MB       the largest piece of device memory that can be had (no limit), as on a fragmented device
//   FAKE_GPU_HANG_S           a wait that takes longer is reported, and the process aborted (60)
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fake {

long setting(const char* name, long otherwise);

// CUDA's error codes that are used here. The driver's and the runtime's are the same numbers.
enum Error : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidConfiguration = 9,
  kInsufficientDriver = 35,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kAssert = 710,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotSupported = 801,
};

// ---- counters.cpp

void count(const std::string& call, const std::string& kind = "", uint64_t bytes = 0);
void count_kernel(const std::string& name);
bool holds_gil();

// ---- streams.cpp

struct Stream;
struct Event;

// The error that the device died of, or success. Work that is queued then never runs.
Error fault();
void die(Error error);

Stream* new_stream(int priority);
Stream* stream_of(void* handle);
int priority(Stream* stream);
void push(Stream* stream, const char* call, std::function<void()> work);
bool idle(Stream* stream);
void wait(Stream* stream, const char* call);
void wait_for_all(const char* call);
// Until no stream's thread is inside of work that was pushed before, also on a dead device; not counted.
void drain();

Event* new_event(bool timed);
void free_event(Event* event);
void record(Event* event, Stream* stream);
bool reached(Event* event);
void wait(Event* event, const char* call);
void wait(Stream* stream, Event* event);
Error elapsed(Event* first, Event* last, float* milliseconds);

void write_value(Stream* stream, uint64_t address, uint32_t value);
void wait_value(Stream* stream, uint64_t address, uint32_t value, unsigned condition);
void launch(const char* call, const char* kernel, Stream* stream);

// ---- memory.cpp

enum Kind { kPageable, kHost, kDevice };

Kind kind_of(const void* address);
bool range_of(const void* address, void** base, size_t* bytes);
void* device_alloc(size_t bytes);
Error device_free(void* address);
void* host_alloc(size_t bytes);
Error host_free(void* address);
Error host_register(void* address, size_t bytes);
Error host_unregister(void* address);
void memory_info(size_t* free, size_t* total);
void copy(void* target, const void* source, size_t bytes, Stream* stream, bool blocking, const char* call);
void copy_2d(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width, size_t height,
             Stream* stream);
void set(void* target, int value, size_t bytes, Stream* stream);
void set_32(void* target, uint32_t value, size_t count, Stream* stream);

// ---- devices.cpp

int devices();
int attribute(int number);

// A thread's contexts, of which the last one is current, and the one of all devices.
std::vector<void*>& contexts();
void* context();
void set_context(void* given);
void* primary_context();

}  // namespace fake
