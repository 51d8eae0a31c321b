// libcuda: the driver's functions that PyTorch, Triton and cuda-bindings call. As the real ones, those that work on a
// device fail in a thread without a context.

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "device.h"

#define API extern "C" __attribute__((visibility("default"))) int

#define NEEDS_CONTEXT                                                         \
  if (context() == nullptr) {                                                 \
    count(__func__, "without a context");                                     \
    std::fprintf(stderr, "fake GPU: %s in a thread without a context\n", __func__); \
    return kInvalidContext;                                                   \
  }                                                                           \
  if (fault() != kSuccess) return fault()

using namespace fake;

namespace {

struct Module {};

struct Function {
  std::string name;
};

int load(void** module, const char* call) {
  *module = new Module;
  count(call);
  return fault();
}

int launch_function(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, void* stream) {
  const char* name = static_cast<Function*>(function)->name.c_str();
  if (x == 0 || y == 0 || z == 0 || y > 65535 || z > 65535 || threads == 0 || threads > 1024) {
    std::fprintf(stderr, "fake GPU: %s has a grid of %u %u %u and %u threads\n", name, x, y, z, threads);
    return kInvalidValue;
  }
  launch("cuLaunchKernel", name, stream_of(stream));
  return kSuccess;
}

// Whether the device can write to or wait for the number there.
int check_value(uint64_t address, const char* call) {
  if (attribute(122) == 0) return kNotSupported;
  if (address % 4 == 0 && kind_of(reinterpret_cast<void*>(address)) != kPageable) return kSuccess;
  std::fprintf(stderr, "fake GPU: %s of memory that the device does not know\n", call);
  return kInvalidValue;
}

}  // namespace

// ---- devices and contexts

API cuInit(unsigned) { return devices() == 0 ? kNoDevice : kSuccess; }
API cuDriverGetVersion(int* version) {
  *version = static_cast<int>(setting("FAKE_GPU_DRIVER", 13000));
  return kSuccess;
}
API cuDeviceGet(int* device, int number) {
  *device = number;
  return kSuccess;
}
API cuDeviceGetCount(int* number) {
  *number = devices();
  return kSuccess;
}
API cuDeviceGetAttribute(int* value, int number, int) {
  *value = attribute(number);
  return kSuccess;
}
API cuDeviceGetName(char* name, int length, int) {
  std::snprintf(name, length, "NVIDIA H100 80GB HBM3");
  return kSuccess;
}
API cuDeviceGetUuid_v2(void* uuid, int) {
  std::memset(uuid, 0, 16);
  return kSuccess;
}
API cuDeviceTotalMem_v2(size_t* total, int) {
  size_t free_bytes;
  memory_info(&free_bytes, total);
  return kSuccess;
}
API cuDevicePrimaryCtxRetain(void** found, int) {
  *found = primary_context();
  return kSuccess;
}
API cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return kSuccess;
}
API cuCtxGetCurrent(void** found) {
  *found = context();
  return kSuccess;
}
API cuCtxSetCurrent(void* given) {
  set_context(given);
  return kSuccess;
}
API cuCtxPushCurrent_v2(void* given) {
  contexts().push_back(given);
  return kSuccess;
}
API cuCtxPopCurrent_v2(void** found) {
  if (contexts().empty()) return kInvalidContext;
  *found = context();
  contexts().pop_back();
  return kSuccess;
}
API cuCtxGetDevice(int* device) {
  *device = 0;
  return kSuccess;
}
API cuCtxGetLimit(size_t* value, int) {
  *value = 0;
  return kSuccess;
}
API cuCtxSetLimit(int, size_t) { return kSuccess; }
API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kSuccess;
}
API cuCtxSynchronize() {
  NEEDS_CONTEXT;
  wait_for_all("cuCtxSynchronize");
  return fault();
}
API cuGetErrorString(int error, const char** text) {
  static thread_local char written[48];
  std::snprintf(written, sizeof written, "driver error %d of the fake GPU", error);
  *text = written;
  return kSuccess;
}
API cuGetErrorName(int error, const char** text) { return cuGetErrorString(error, text); }

// ---- modules and kernels

API cuModuleLoad(void** module, const char*) { return load(module, "cuModuleLoad"); }
API cuModuleLoadData(void** module, const void*) { return load(module, "cuModuleLoadData"); }
API cuModuleLoadDataEx(void** module, const void*, unsigned, void*, void*) {
  return load(module, "cuModuleLoadDataEx");
}
API cuModuleUnload(void*) { return kSuccess; }
API cuModuleGetFunction(void** function, void*, const char* name) {
  *function = new Function{name};
  return kSuccess;
}
API cuLibraryLoadData(void** module, ...) { return load(module, "cuLibraryLoadData"); }
API cuLibraryGetKernel(void** function, void*, const char* name) {
  *function = new Function{name};
  return kSuccess;
}
API cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  return kSuccess;
}
API cuFuncGetAttribute(int* value, int number, void*) {
  *value = number == 0 ? 1024 : number == 4 ? 32 : 0;  // threads per block, registers
  return kSuccess;
}
API cuFuncSetAttribute(void*, int, int) { return kSuccess; }
API cuFuncSetCacheConfig(void*, int) { return kSuccess; }
API cuOccupancyMaxActiveClusters(int* clusters, void*, const void*) {
  *clusters = 132;
  return kSuccess;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) {
  *blocks = 2;
  return kSuccess;
}
API cuTensorMapEncodeTiled(...) { return kSuccess; }
API cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned, void* stream, void**, void**) {
  NEEDS_CONTEXT;
  return launch_function(function, x, y, z, block_x * block_y * block_z, stream);
}
API cuLaunchCooperativeKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                              unsigned block_z, unsigned, void* stream, void**) {
  NEEDS_CONTEXT;
  return launch_function(function, x, y, z, block_x * block_y * block_z, stream);
}
// The beginning of CUlaunchConfig.
struct LaunchConfig {
  unsigned x, y, z, block_x, block_y, block_z, shared;
  void* stream;
};
API cuLaunchKernelEx(const LaunchConfig* config, void* function, void**, void**) {
  NEEDS_CONTEXT;
  const unsigned threads = config->block_x * config->block_y * config->block_z;
  return launch_function(function, config->x, config->y, config->z, threads, config->stream);
}
API cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  NEEDS_CONTEXT;
  count("cuLaunchHostFunc");
  push(stream_of(stream), "cuLaunchHostFunc", [=] { function(data); });
  return kSuccess;
}

// ---- streams and stream values

API cuStreamCreateWithPriority(void** stream, unsigned, int priority) {
  NEEDS_CONTEXT;
  count("cuStreamCreateWithPriority");
  *stream = new_stream(priority);
  return kSuccess;
}
API cuStreamCreate(void** stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }
API cuStreamDestroy_v2(void*) { return kSuccess; }
API cuStreamSynchronize(void* stream) {
  NEEDS_CONTEXT;
  count("cuStreamSynchronize");
  wait(stream_of(stream), "cuStreamSynchronize");
  return fault();
}
API cuStreamQuery(void* stream) {
  if (fault() != kSuccess) return fault();
  return idle(stream_of(stream)) ? kSuccess : kNotReady;
}
API cuStreamWriteValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned) {
  NEEDS_CONTEXT;
  count("cuStreamWriteValue32");
  if (const int error = check_value(address, "cuStreamWriteValue32")) return error;
  write_value(stream_of(stream), address, value);
  return kSuccess;
}
API cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned condition) {
  NEEDS_CONTEXT;
  count("cuStreamWaitValue32");
  if (const int error = check_value(address, "cuStreamWaitValue32")) return error;
  wait_value(stream_of(stream), address, value, condition);
  return kSuccess;
}

// ---- memory

API cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  NEEDS_CONTEXT;
  count("cuMemHostAlloc", "", bytes);
  *address = host_alloc(bytes);
  return *address != nullptr ? kSuccess : kOutOfMemory;
}
API cuMemFreeHost(void* address) { return host_free(address); }
API cuMemsetD32Async(uint64_t address, unsigned value, size_t words, void* stream) {
  NEEDS_CONTEXT;
  set_32(reinterpret_cast<void*>(address), value, words, stream_of(stream));
  return kSuccess;
}
API cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
  void* found;
  if (!range_of(reinterpret_cast<void*>(address), &found, bytes)) return kInvalidValue;
  *base = reinterpret_cast<uint64_t>(found);
  return kSuccess;
}
API cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  memory_info(free_bytes, total);
  return fault();
}
API cuPointerGetAttribute(void* data, int number, uint64_t address) {
  enum { kContext = 1, kMemoryType = 2, kDevicePointer = 3, kOrdinal = 9 };
  const Kind kind = kind_of(reinterpret_cast<void*>(address));
  if (kind == kPageable) return kInvalidValue;
  switch (number) {
    case kContext: *static_cast<void**>(data) = primary_context(); break;
    case kMemoryType: *static_cast<unsigned*>(data) = kind == kDevice ? 2 : 1; break;
    case kDevicePointer: *static_cast<uint64_t*>(data) = address; break;
    case kOrdinal: *static_cast<int*>(data) = 0; break;
    default: *static_cast<uint64_t*>(data) = 0;
  }
  return kSuccess;
}

// ---- look-up by name

namespace {

void* function_of(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  for (const char* version : {"_v3", "_v2", ""}) {
    if (void* found = dlsym(driver, (std::string(name) + version).c_str())) return found;
  }
  return nullptr;
}

}  // namespace

API cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  const bool itself = std::strcmp(name, "cuGetProcAddress") == 0;
  *function = itself ? reinterpret_cast<void*>(cuGetProcAddress_v2) : function_of(name);
  if (status != nullptr) *status = *function != nullptr ? 0 : 1;
  return *function != nullptr ? kSuccess : kNotFound;
}
API cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

// ---- what this does not have

#define REFUSED(name)              \
  API name(...) {                  \
    count(#name, "not supported"); \
    return kNotSupported;          \
  }
REFUSED(cuMemAddressReserve)
REFUSED(cuMemAddressFree)
REFUSED(cuMemCreate)
REFUSED(cuMemMap)
REFUSED(cuMemUnmap)
REFUSED(cuMemRelease)
REFUSED(cuMemSetAccess)
REFUSED(cuMemGetAllocationGranularity)
REFUSED(cuMemExportToShareableHandle)
REFUSED(cuMemImportFromShareableHandle)
REFUSED(cuMemGetAllocationPropertiesFromHandle)
REFUSED(cuMemRetainAllocationHandle)
REFUSED(cuMulticastCreate)
REFUSED(cuMulticastAddDevice)
REFUSED(cuMulticastBindMem)
REFUSED(cuMulticastUnbind)
REFUSED(cuLinkCreate_v2)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuCtxFromGreenCtx)
REFUSED(cuDevResourceGenerateDesc)
REFUSED(cuDevSmResourceSplitByCount)
REFUSED(cuDeviceGetDevResource)
REFUSED(cuGreenCtxCreate)
REFUSED(cuGreenCtxDestroy)
REFUSED(cuGreenCtxStreamCreate)
