// What was called, by thread, and who waited for how long with or without Python's lock.

#include <dlfcn.h>
#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>

#include "device.h"

namespace fake {

namespace {

struct Counter {
  uint64_t calls = 0;
  uint64_t bytes = 0;
};

using Key = std::tuple<std::string, std::string, std::string>;  // call, kind, thread

std::mutex mutex;
// Never destroyed: threads of the process may call at its end.
auto& calls = *new std::map<Key, Counter>;
auto& kernels = *new std::map<std::string, uint64_t>;

std::string thread_name() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

}  // namespace

long setting(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atol(value);
}

bool holds_gil() {
  static auto* initialized = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  static auto* check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return initialized != nullptr && check != nullptr && initialized() != 0 && check() != 0;
}

void count(const std::string& call, const std::string& kind, uint64_t bytes) {
  const Key key{call, kind, thread_name()};
  std::lock_guard<std::mutex> lock(mutex);
  Counter& counter = calls[key];
  ++counter.calls;
  counter.bytes += bytes;
}

void count_kernel(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex);
  ++kernels[name];
}

}  // namespace fake

extern "C" void fake_gpu_reset() {
  std::lock_guard<std::mutex> lock(fake::mutex);
  fake::calls.clear();
  fake::kernels.clear();
}

// Lines "call TAB kind TAB thread TAB calls TAB bytes", then "kernel TAB name TAB TAB launches TAB 0".
extern "C" int fake_gpu_write_counts(const char* path) {
  std::lock_guard<std::mutex> lock(fake::mutex);
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return 1;
  for (const auto& [key, counter] : fake::calls) {
    const auto& [call, kind, thread] = key;
    std::fprintf(file, "%s\t%s\t%s\t%lu\t%lu\n", call.c_str(), kind.c_str(), thread.c_str(),
                 static_cast<unsigned long>(counter.calls), static_cast<unsigned long>(counter.bytes));
  }
  for (const auto& [name, launches] : fake::kernels) {
    std::fprintf(file, "kernel\t%s\t\t%lu\t0\n", name.c_str(), static_cast<unsigned long>(launches));
  }
  return std::fclose(file);
}

// A function of a library that only has a stub.
extern "C" int fake_gpu_stub(const char* name) {
  fake::count(name, "stub");
  return 0;
}
