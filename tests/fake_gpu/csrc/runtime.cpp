// libcudart: the runtime's functions that PyTorch calls. Each returns the error that the device died of, if it has.

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "device.h"
#include "driver_types.h"

#define API extern "C" __attribute__((visibility("default"))) cudaError_t
#define API_OF(type) extern "C" __attribute__((visibility("default"))) type

namespace fake {

namespace {

// Clock of the device that torch.cuda._sleep counts in.
constexpr long kCyclesPerUs = 1980;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

cudaError_t keep(int error) {
  if (fault() != kSuccess) error = fault();
  if (error != cudaSuccess) last_error = static_cast<cudaError_t>(error);
  return static_cast<cudaError_t>(error);
}

// The runtime makes the primary context current in a thread that has none.
void enter() {
  if (context() == nullptr) set_context(primary_context());
}

void called(const char* call, const char* kind = "", uint64_t bytes = 0) {
  enter();
  count(call, kind, bytes);
}

// Libraries are loaded, and symbols are looked up, while other threads launch.
std::mutex registry_mutex;

auto& kernel_names() {
  static auto& names = *new std::map<const void*, std::string>;
  return names;
}

struct Symbol {
  size_t bytes;
  void* address;
};

auto& symbols() {
  static auto& all = *new std::map<const void*, Symbol>;
  return all;
}

const char* name_of(const void* function) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  const auto found = kernel_names().find(function);
  return found == kernel_names().end() ? "unknown" : found->second.c_str();
}

struct Dim {
  unsigned x, y, z;
};

struct CallConfiguration {
  Dim grid, block;
  size_t shared;
  void* stream;
};

thread_local CallConfiguration pushed_configuration;

cudaError_t launch(const void* function, Dim grid, Dim block, void* stream, void** arguments) {
  enter();
  if (fault() != kSuccess) return keep(0);
  const char* name = name_of(function);
  const unsigned threads = block.x * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || threads == 0 || threads > 1024) {
    std::fprintf(stderr, "fake GPU: %s has a grid of %u %u %u and a block of %u %u %u\n", name, grid.x, grid.y, grid.z,
                 block.x, block.y, block.z);
    return keep(kInvalidConfiguration);
  }
  if (arguments != nullptr && std::strstr(name, "spin_kernel") != nullptr) {
    const long cycles = *static_cast<long*>(arguments[0]);
    count("cudaLaunchKernel", "sleep");
    push(stream_of(stream), "cudaLaunchKernel", [=] { usleep(cycles / kCyclesPerUs + 1); });
    return cudaSuccess;
  }
  fake::launch("cudaLaunchKernel", name, stream_of(stream));
  return cudaSuccess;
}

void* driver_function(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  for (const char* version : {"_v3", "_v2", ""}) {
    if (void* found = dlsym(driver, (std::string(name) + version).c_str())) return found;
  }
  return nullptr;
}

}  // namespace

}  // namespace fake

using namespace fake;

// ---- what nvcc's code calls when a library is loaded, and before a launch

API_OF(void**) __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
API_OF(void) __cudaRegisterFatBinaryEnd(void**) {}
API_OF(void) __cudaUnregisterFatBinary(void**) {}
API_OF(char) __cudaInitModule(void**) { return 1; }
API_OF(void) __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                    int*) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  kernel_names()[host] = name;
}
API_OF(void) __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t bytes, int, int) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  symbols()[host] = {bytes, nullptr};
}
API __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}
API_OF(unsigned) __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared, void* stream) {
  pushed_configuration = {grid, block, shared, stream};
  return 0;
}
API __cudaPopCallConfiguration(Dim* grid, Dim* block, size_t* shared, void* stream) {
  *grid = pushed_configuration.grid;
  *block = pushed_configuration.block;
  *shared = pushed_configuration.shared;
  *static_cast<void**>(stream) = pushed_configuration.stream;
  return cudaSuccess;
}

// ---- kernels

API __cudaLaunchKernel(void* function, Dim grid, Dim block, void** arguments, size_t, void* stream) {
  return launch(function, grid, block, stream, arguments);
}
API cudaLaunchKernel(const void* function, Dim grid, Dim block, void** arguments, size_t, void* stream) {
  return launch(function, grid, block, stream, arguments);
}
API cudaLaunchCooperativeKernel(const void* function, Dim grid, Dim block, void** arguments, size_t, void* stream) {
  return launch(function, grid, block, stream, arguments);
}
API cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  const Dim grid{config->gridDim.x, config->gridDim.y, config->gridDim.z};
  const Dim block{config->blockDim.x, config->blockDim.y, config->blockDim.z};
  return launch(function, grid, block, config->stream, arguments);
}
API cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  called("cudaLaunchHostFunc");
  if (fault() == kSuccess) push(stream_of(stream), "cudaLaunchHostFunc", [=] { function(data); });
  return keep(0);
}
API cudaStreamAddCallback(void* stream, void (*function)(void*, cudaError_t, void*), void* data, unsigned) {
  called("cudaStreamAddCallback");
  if (fault() == kSuccess) push(stream_of(stream), "cudaStreamAddCallback", [=] { function(stream, cudaSuccess, data); });
  return keep(0);
}
API cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 232448 - 1024;
  return cudaSuccess;
}
API cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
API cudaGetSymbolAddress(void** address, const void* symbol) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  Symbol& found = symbols()[symbol];
  if (found.address == nullptr) found.address = device_alloc(found.bytes != 0 ? found.bytes : 4096);
  *address = found.address;
  return cudaSuccess;
}
API cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, int) { return cudaSuccess; }

// ---- devices

API cudaGetDeviceCount(int* number) {
  *number = 0;
  if (setting("FAKE_GPU_DRIVER", 13000) < 13000) return keep(kInsufficientDriver);
  if (devices() == 0) return keep(kNoDevice);
  *number = devices();
  return cudaSuccess;
}
API cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
API cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return keep(kInvalidDevice);
  current_device = device;
  set_context(primary_context());
  return keep(0);
}
API cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "NVIDIA H100 80GB HBM3");
  size_t free_bytes, total;
  memory_info(&free_bytes, &total);
  properties->totalGlobalMem = total;
  properties->sharedMemPerBlock = attribute(8);
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->totalConstMem = 65536;
  properties->major = attribute(75);
  properties->minor = attribute(76);
  properties->textureAlignment = 512;
  properties->multiProcessorCount = attribute(16);
  properties->pciBusID = device + 1;
  properties->asyncEngineCount = attribute(40);
  properties->memoryBusWidth = attribute(37);
  properties->l2CacheSize = attribute(38);
  properties->maxThreadsPerMultiProcessor = attribute(39);
  properties->sharedMemPerMultiprocessor = attribute(81);
  properties->sharedMemPerBlockOptin = attribute(97);
  properties->maxBlocksPerMultiProcessor = attribute(106);
  properties->reservedSharedMemPerBlock = 1024;
  properties->canMapHostMemory = properties->concurrentKernels = properties->unifiedAddressing = 1;
  properties->streamPrioritiesSupported = properties->managedMemory = properties->cooperativeLaunch = 1;
  properties->canUseHostPointerForRegisteredMem = properties->hostRegisterSupported = properties->clusterLaunch = 1;
  return cudaSuccess;
}
API cudaDeviceGetAttribute(int* value, int number, int) {
  *value = attribute(number);
  return cudaSuccess;
}
API cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaDeviceGetDefaultMemPool(void** pool, int) {
  *pool = reinterpret_cast<void*>(8);
  return cudaSuccess;
}
API cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
API cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaDeviceSynchronize() {
  called("cudaDeviceSynchronize");
  wait_for_all("cudaDeviceSynchronize");
  return keep(0);
}
API cudaDriverGetVersion(int* version) {
  *version = static_cast<int>(setting("FAKE_GPU_DRIVER", 13000));
  return cudaSuccess;
}
API cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
API cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, int* status) {
  *function = driver_function(name);
  if (status != nullptr) *status = *function != nullptr ? 0 : 1;
  if (*function == nullptr) std::fprintf(stderr, "fake GPU: the driver has no %s\n", name);
  return cudaSuccess;
}
API cudaProfilerStart() { return cudaSuccess; }
API cudaProfilerStop() { return cudaSuccess; }

// ---- errors

API_OF(const char*) cudaGetErrorName(cudaError_t error) {
  switch (static_cast<int>(error)) {
    case kOutOfMemory: return "cudaErrorMemoryAllocation";
    case kNotReady: return "cudaErrorNotReady";
    case kAssert: return "cudaErrorAssert";
    default: return "cudaErrorOther";
  }
}
API_OF(const char*) cudaGetErrorString(cudaError_t error) {
  switch (static_cast<int>(error)) {
    case kOutOfMemory: return "out of memory";
    case kInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case kNoDevice: return "no CUDA-capable device is detected";
    case kAssert: return "device-side assert triggered";
    case kNotSupported: return "operation not supported";
  }
  static thread_local char text[64];
  std::snprintf(text, sizeof text, "error %d of the fake GPU", static_cast<int>(error));
  return text;
}
API cudaGetLastError() {
  const cudaError_t error = fault() != kSuccess ? static_cast<cudaError_t>(fault()) : last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaPeekAtLastError() { return fault() != kSuccess ? static_cast<cudaError_t>(fault()) : last_error; }

// ---- memory

API cudaMalloc(void** address, size_t bytes) {
  called("cudaMalloc", "", bytes);
  *address = device_alloc(bytes != 0 ? bytes : 1);
  return keep(*address != nullptr ? kSuccess : kOutOfMemory);
}
API cudaMallocAsync(void** address, size_t bytes, void*) { return cudaMalloc(address, bytes); }
API cudaFree(void* address) {
  if (address == nullptr) return keep(0);
  called("cudaFree");
  return keep(device_free(address));
}
API cudaFreeAsync(void* address, void*) { return cudaFree(address); }
API cudaHostAlloc(void** address, size_t bytes, unsigned) {
  called("cudaHostAlloc", "", bytes);
  *address = host_alloc(bytes);
  return keep(*address != nullptr ? kSuccess : kOutOfMemory);
}
API cudaFreeHost(void* address) { return keep(host_free(address)); }
API cudaHostRegister(void* address, size_t bytes, unsigned) {
  called("cudaHostRegister", "", bytes);
  return keep(host_register(address, bytes));
}
API cudaHostUnregister(void* address) {
  called("cudaHostUnregister");
  return keep(host_unregister(address));
}
API cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  called("cudaMemGetInfo");
  memory_info(free_bytes, total);
  return keep(0);
}
API cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  std::memset(attributes, 0, sizeof *attributes);
  const Kind kind = kind_of(address);
  attributes->type = kind == kDevice ? cudaMemoryTypeDevice
                     : kind == kHost ? cudaMemoryTypeHost
                                     : cudaMemoryTypeUnregistered;
  attributes->device = kind == kPageable ? -2 : current_device;
  attributes->devicePointer = kind == kPageable ? nullptr : const_cast<void*>(address);
  attributes->hostPointer = kind == kHost ? const_cast<void*>(address) : nullptr;
  return cudaSuccess;
}
API cudaMemcpy(void* target, const void* source, size_t bytes, int) {
  enter();
  if (fault() == kSuccess) copy(target, source, bytes, stream_of(nullptr), true, "cudaMemcpy");
  return keep(0);
}
API cudaMemcpyAsync(void* target, const void* source, size_t bytes, int, void* stream) {
  enter();
  if (bytes != 0 && fault() == kSuccess) copy(target, source, bytes, stream_of(stream), false, "cudaMemcpyAsync");
  return keep(0);
}
API cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, void* stream) {
  enter();
  if (fault() == kSuccess) copy(target, source, bytes, stream_of(stream), false, "cudaMemcpyPeerAsync");
  return keep(0);
}
API cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                      size_t height, int, void* stream) {
  enter();
  if (fault() == kSuccess) copy_2d(target, target_pitch, source, source_pitch, width, height, stream_of(stream));
  return keep(0);
}
API cudaMemset(void* target, int value, size_t bytes) {
  enter();
  set(target, value, bytes, stream_of(nullptr));
  wait(stream_of(nullptr), "cudaMemset");
  return keep(0);
}
API cudaMemsetAsync(void* target, int value, size_t bytes, void* stream) {
  enter();
  if (fault() == kSuccess) set(target, value, bytes, stream_of(stream));
  return keep(0);
}

// ---- streams and events

API cudaStreamCreateWithPriority(void** stream, unsigned, int priority) {
  called("cudaStreamCreate");
  *stream = new_stream(priority);
  return keep(0);
}
API cudaStreamCreate(void** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaStreamCreateWithFlags(void** stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
API cudaStreamDestroy(void*) { return keep(0); }
API cudaStreamGetPriority(void* stream, int* found) {
  *found = priority(stream_of(stream));
  return cudaSuccess;
}
API cudaStreamIsCapturing(void*, int* status) {
  *status = 0;
  return cudaSuccess;
}
API cudaStreamGetCaptureInfo(void*, int* status, unsigned long long* id, void** graph, void***, void**, size_t* number) {
  *status = 0;
  if (id != nullptr) *id = 0;
  if (graph != nullptr) *graph = nullptr;
  if (number != nullptr) *number = 0;
  return cudaSuccess;
}
API cudaThreadExchangeStreamCaptureMode(int*) { return cudaSuccess; }
API cudaStreamQuery(void* stream) {
  called("cudaStreamQuery");
  return keep(idle(stream_of(stream)) ? kSuccess : kNotReady);
}
API cudaStreamSynchronize(void* stream) {
  called("cudaStreamSynchronize");
  wait(stream_of(stream), "cudaStreamSynchronize");
  return keep(0);
}
API cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  called("cudaStreamWaitEvent");
  if (fault() == kSuccess) wait(stream_of(stream), static_cast<Event*>(event));
  return keep(0);
}
API cudaEventCreateWithFlags(void** event, unsigned flags) {
  called("cudaEventCreate");
  *event = new_event((flags & cudaEventDisableTiming) == 0);
  return keep(0);
}
API cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, 0); }
API cudaEventDestroy(void* event) {
  free_event(static_cast<Event*>(event));
  return keep(0);
}
API cudaEventRecord(void* event, void* stream) {
  called("cudaEventRecord");
  if (fault() == kSuccess) record(static_cast<Event*>(event), stream_of(stream));
  return keep(0);
}
API cudaEventRecordWithFlags(void* event, void* stream, unsigned) { return cudaEventRecord(event, stream); }
API cudaEventQuery(void* event) {
  called("cudaEventQuery");
  return keep(reached(static_cast<Event*>(event)) ? kSuccess : kNotReady);
}
API cudaEventSynchronize(void* event) {
  called("cudaEventSynchronize");
  wait(static_cast<Event*>(event), "cudaEventSynchronize");
  return keep(0);
}
API cudaEventElapsedTime(float* milliseconds, void* first, void* last) {
  return keep(elapsed(static_cast<Event*>(first), static_cast<Event*>(last), milliseconds));
}

// ---- what this does not have

#define REFUSED(name)                \
  API name(...) {                    \
    count(#name, "not supported");   \
    return keep(kNotSupported);      \
  }
REFUSED(cudaGraphAddNode)
REFUSED(cudaGraphConditionalHandleCreate)
REFUSED(cudaGraphDebugDotPrint)
REFUSED(cudaGraphDestroy)
REFUSED(cudaGraphExecDestroy)
REFUSED(cudaGraphGetNodes)
REFUSED(cudaGraphInstantiateWithFlags)
REFUSED(cudaGraphLaunch)
REFUSED(cudaGraphNodeGetDependencies)
REFUSED(cudaIpcCloseMemHandle)
REFUSED(cudaIpcGetEventHandle)
REFUSED(cudaIpcGetMemHandle)
REFUSED(cudaIpcOpenEventHandle)
REFUSED(cudaIpcOpenMemHandle)
REFUSED(cudaKernelSetAttributeForDevice)
REFUSED(cudaLibraryGetKernel)
REFUSED(cudaLibraryLoadData)
REFUSED(cudaLibraryUnload)
REFUSED(cudaStreamBeginCapture)
REFUSED(cudaStreamBeginCaptureToGraph)
REFUSED(cudaStreamEndCapture)
REFUSED(cudaStreamUpdateCaptureDependencies)
REFUSED(cudaMemPoolGetAttribute)
REFUSED(cudaMemPoolSetAccess)
REFUSED(cudaMemPoolSetAttribute)
REFUSED(cudaMemPoolTrimTo)
