// Streams with a thread and a bounded queue each, events, stream values, kernels that take a given time, and the death
// of the device, after which nothing that was queued runs.

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device.h"

namespace fake {

namespace {

const size_t kQueue = setting("FAKE_GPU_QUEUE", 1024);
const uint64_t kKernelNs = setting("FAKE_GPU_KERNEL_NS", 0);
const uint64_t kHangNs = setting("FAKE_GPU_HANG_S", 60) * 1'000'000'000ull;
const auto kPoll = std::chrono::microseconds(100);

std::atomic<int> died_of{kSuccess};

// Told whenever work of any stream has ended.
std::mutex ended_mutex;
std::condition_variable ended;

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000ull + now.tv_nsec;
}

// What the streams have not done, by stream.
void print_pending();

// Blocks the calling thread. A wait that takes too long ends the process with its name.
template <class Predicate>
void wait_until(const char* call, Predicate done) {
  const bool gil = holds_gil();
  const uint64_t begin = now_ns();
  std::unique_lock<std::mutex> lock(ended_mutex);
  while (!done()) {
    ended.wait_for(lock, kPoll);
    if (now_ns() - begin > kHangNs) {
      std::fprintf(stderr, "fake GPU: %s has waited for %lu s, %s Python's lock\n", call,
                   static_cast<unsigned long>(kHangNs / 1'000'000'000ull), gil ? "with" : "without");
      print_pending();
      std::abort();
    }
  }
}

// Blocks the calling thread as the real call would, until the device dies at most, and counts that it did.
template <class Predicate>
void block_until(const char* call, Predicate done) {
  if (done()) return;
  const bool gil = holds_gil();
  wait_until(call, [&] { return done() || fault() != kSuccess; });
  count(call, gil ? "blocked with the GIL" : "blocked");
}

// Blocks the stream's own thread.
template <class Predicate>
void stall_until(Predicate done) {
  while (!done() && fault() == kSuccess) {
    std::unique_lock<std::mutex> lock(ended_mutex);
    ended.wait_for(lock, kPoll);
  }
}

}  // namespace

struct Stream {
  const int number;
  const int priority;
  std::mutex mutex;
  std::condition_variable filled;
  struct Work {
    const char* call;
    std::function<void()> run;
  };
  std::deque<Work> queue;
  uint64_t pushed = 0;
  std::atomic<uint64_t> done{0};

  [[noreturn]] void run() {
    char name[16];
    std::snprintf(name, sizeof name, "stream %d", number);
    pthread_setname_np(pthread_self(), name);
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex);
        filled.wait(lock, [&] { return !queue.empty(); });
        work = std::move(queue.front().run);
      }
      if (fault() == kSuccess) work();
      work = nullptr;
      {
        std::lock_guard<std::mutex> lock(mutex);
        queue.pop_front();
        ++done;
      }
      { std::lock_guard<std::mutex> lock(ended_mutex); }
      ended.notify_all();
    }
  }

  uint64_t count_pushed() {
    std::lock_guard<std::mutex> lock(mutex);
    return pushed;
  }
};

namespace {

std::mutex streams_mutex;
auto& streams = *new std::vector<Stream*>;

struct Mark {
  std::atomic<bool> reached{false};
  uint64_t ns = 0;
};

}  // namespace

// An event is what it was last recorded as: a wait that has begun is not moved by a later recording.
struct Event {
  const bool timed;
  std::mutex mutex;
  std::shared_ptr<Mark> mark;

  std::shared_ptr<Mark> get() {
    std::lock_guard<std::mutex> lock(mutex);
    return mark;
  }
};

Error fault() { return static_cast<Error>(died_of.load()); }

void die(Error error) {
  died_of = error;
  ended.notify_all();
}

Stream* new_stream(int priority) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  auto* stream = new Stream{static_cast<int>(streams.size()), priority};
  streams.push_back(stream);
  std::thread([stream] { stream->run(); }).detach();
  return stream;
}

Stream* stream_of(void* handle) {
  static Stream* the_default = new_stream(0);
  // 1 and 2: cudaStreamLegacy and cudaStreamPerThread
  const bool named = handle != nullptr && handle != reinterpret_cast<void*>(1) && handle != reinterpret_cast<void*>(2);
  return named ? static_cast<Stream*>(handle) : the_default;
}

int priority(Stream* stream) { return stream->priority; }

void push(Stream* stream, const char* call, std::function<void()> work) {
  block_until(call, [&] {
    std::lock_guard<std::mutex> lock(stream->mutex);
    return stream->queue.size() < kQueue;
  });
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->queue.push_back({call, std::move(work)});
    ++stream->pushed;
  }
  stream->filled.notify_one();
}

bool idle(Stream* stream) { return stream->done.load() >= stream->count_pushed(); }

void wait(Stream* stream, const char* call) {
  const uint64_t pushed = stream->count_pushed();
  block_until(call, [&] { return stream->done.load() >= pushed; });
}

namespace {

std::vector<Stream*> all_streams() {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return streams;
}

void print_pending() {
  for (Stream* stream : all_streams()) {
    std::lock_guard<std::mutex> lock(stream->mutex);
    if (stream->queue.empty()) continue;
    std::fprintf(stderr, "fake GPU: stream %d has not done", stream->number);
    for (const auto& work : stream->queue) std::fprintf(stderr, " %s", work.call);
    std::fputc('\n', stderr);
  }
}

}  // namespace

void wait_for_all(const char* call) {
  for (Stream* stream : all_streams()) wait(stream, call);
}

void drain() {
  for (Stream* stream : all_streams()) {
    const uint64_t pushed = stream->count_pushed();
    wait_until("drain", [=] { return stream->done.load() >= pushed; });
  }
}

Event* new_event(bool timed) { return new Event{timed}; }

void free_event(Event* event) { delete event; }

void record(Event* event, Stream* stream) {
  auto mark = std::make_shared<Mark>();
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->mark = mark;
  }
  push(stream, "cudaEventRecord", [mark] {
    mark->ns = now_ns();
    mark->reached = true;
  });
}

bool reached(Event* event) {
  const auto mark = event->get();
  return mark == nullptr || mark->reached;
}

void wait(Event* event, const char* call) {
  if (const auto mark = event->get()) block_until(call, [&] { return mark->reached.load(); });
}

void wait(Stream* stream, Event* event) {
  const auto mark = event->get();
  if (mark == nullptr || mark->reached) return;
  push(stream, "cudaStreamWaitEvent", [mark] { stall_until([&] { return mark->reached.load(); }); });
}

Error elapsed(Event* first, Event* last, float* milliseconds) {
  const auto begin = first->get(), end = last->get();
  if (!first->timed || !last->timed || begin == nullptr || end == nullptr) return kInvalidHandle;
  if (!begin->reached || !end->reached) return kNotReady;
  *milliseconds = static_cast<float>((static_cast<double>(end->ns) - static_cast<double>(begin->ns)) / 1e6);
  return kSuccess;
}

void write_value(Stream* stream, uint64_t address, uint32_t value) {
  push(stream, "cuStreamWriteValue32",
       [=] { __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE); });
}

void wait_value(Stream* stream, uint64_t address, uint32_t value, unsigned condition) {
  push(stream, "cuStreamWaitValue32", [=] {
    stall_until([=] {
      const uint32_t found = __atomic_load_n(reinterpret_cast<uint32_t*>(address), __ATOMIC_ACQUIRE);
      switch (condition & 3) {
        case 0: return static_cast<int32_t>(found - value) >= 0;  // at least, modulo 2**32
        case 1: return found == value;
        case 2: return (found & value) != 0;
        default: return ~(found | value) != 0;
      }
    });
  });
}

void launch(const char* call, const char* kernel, Stream* stream) {
  count(call);
  count_kernel(kernel);
  push(stream, call, [] {
    if (kKernelNs > 0) usleep(kKernelNs / 1000);
  });
}

}  // namespace fake

extern "C" void fake_gpu_die() { fake::die(fake::kAssert); }

// Holds a stream until the number at ``address`` is ``value``: what comes after it in the stream runs late.
extern "C" void fake_gpu_hold(void* stream, const uint32_t* address, uint32_t value) {
  fake::push(fake::stream_of(stream), "hold", [=] {
    fake::stall_until([=] { return __atomic_load_n(address, __ATOMIC_ACQUIRE) == value; });
  });
}

// For operators.cpp: the wait that computing on the CPU needs is none of the program's.
extern "C" void fake_gpu_wait_uncounted(void* stream) {
  fake::Stream* found = fake::stream_of(stream);
  const uint64_t pushed = found->count_pushed();
  if (found->done.load() < pushed) {
    fake::wait_until("an operator", [=] { return found->done.load() >= pushed; });
  }
}

extern "C" void fake_gpu_push(void* stream, void (*work)(void*), void* argument) {
  fake::push(fake::stream_of(stream), "kernel", [=] { work(argument); });
}

// Opens the number that holds the default stream, and waits for all streams. Returns whether anything was left to do.
extern "C" int fake_gpu_release_and_wait(uint32_t* address, uint32_t value) {
  const bool busy = !fake::idle(fake::stream_of(nullptr));
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
  fake::wait_for_all("paused");
  return busy;
}

extern "C" void fake_gpu_wait_for_all() { fake::wait_for_all("paused"); }
